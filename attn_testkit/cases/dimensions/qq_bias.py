"""A tensor of biases among the rows of a step, which kernels add to logits (``qq_bias`` of vLLM's kernels)."""

from __future__ import annotations

from dataclasses import replace

from ...contract import BackendContext, Capabilities
from ..fields import Changes, Fields
from .dimension import Asked, Dimension, Without, Word, of_fields, option

_WORDS = {"none": "", "own": "qqbias", "shared": "qqbiasshared"}
_PHRASES = {"none": "", "own": "among the rows of each request", "shared": "among rows, the same for all requests"}


def _declared(declared: Capabilities, case: Fields) -> bool:
    if case.qq_bias == "none":
        return True
    return case.mode in declared.qq_bias and (case.qq_bias == "shared" or not declared.shared_qq_bias)


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    # A backend without any is asked for many things already, and its contexts stay what they were.
    if not declared.qq_bias:
        return None
    if not context.modes <= declared.qq_bias:
        return "an additive bias", replace(context, qq_bias="shared")
    return ("an additive bias for each request", replace(context, qq_bias="own")) if declared.shared_qq_bias else None


def _read(word: str) -> Changes:
    return {"qq_bias": next(value for value, each in _WORDS.items() if each == word)}


QQ_BIAS = Dimension(
    name="additive bias",
    fields=("qq_bias",),
    words=(
        Word(
            "qqbias(?:shared)?",
            lambda match, so_far: _read(match[0]),
            lambda case: _WORDS[case.qq_bias],
            spelled=("qqbias", "qqbiasshared"),
        ),
    ),
    describe=lambda case: {"qq_bias": _PHRASES[case.qq_bias]},
    declared=(Asked(lambda case: "additive bias" + " for each request" * (case.qq_bias == "own"), _declared),),
    fit=Without("Cases are made of declared options."),
    values=Without("catalogue/qq_bias.py has cases of it."),
    combined=Without("Cases of it have windows, soft caps and sinks already (catalogue/qq_bias.py)."),
    covered=(
        option(
            "additive bias",
            lambda declared, mode: mode in declared.qq_bias,
            lambda case: case.qq_bias != "none",
            "catalogue/qq_bias.py has cases of it.",
        ),
    ),
    simpler=of_fields("qq_bias", value=lambda case: case.qq_bias),
    undeclared=(_undeclared,),
    random=lambda draws, declared, so_far: {},
    varies="step",
    apply=Without("steps/query_bias.py draws the numbers, runner_modes/query_bias.py gives them."),
)
