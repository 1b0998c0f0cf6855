"""A tensor of biases among the rows of a step, which kernels add to logits (``qq_bias`` of vLLM's kernels)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...contract import BackendContext, Capabilities, ForwardMode
from ...glossary import Entry
from ..fields import Changes, Fields
from .feature import Asked, Columns, Feature, Trait, Without, Word, of_fields, option

_WORDS = {"none": "", "own": "qqbias", "shared": "qqbiasshared"}
_PHRASES = {"none": "", "own": "among the rows of each request", "shared": "among rows, the same for all requests"}


QQ_BIASES = ("none", "own", "shared")
"""Biases among the rows of a step: none, one for each request, or the same for all requests."""


def _declared(declared: Capabilities, case: Fields) -> bool:
    if case.qq_bias == "none":
        return True
    return case.mode in declared.options.qq_bias and (case.qq_bias == "shared" or not declared.options.shared_qq_bias)


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    if mode not in declared.options.qq_bias:
        return {}
    return {"qq_bias": ["none", "shared" if declared.options.shared_qq_bias else "own"]}


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if not context.modes <= declared.options.qq_bias:
        return "an additive bias", replace(context, qq_bias="shared")
    return (
        ("an additive bias for each request", replace(context, qq_bias="own"))
        if declared.options.shared_qq_bias
        else None
    )


def _read(word: str) -> Changes:
    return {"qq_bias": next(value for value, each in _WORDS.items() if each == word)}


def _wrong(case: Fields) -> str:
    return "" if case.qq_bias in QQ_BIASES else f"qq_bias {case.qq_bias!r}: one of {QQ_BIASES}"


def _context(schedules: Sequence[Any]) -> Changes:
    return {"qq_bias": schedules[0].case.qq_bias}


QQ_BIAS = Feature(
    name="additive bias",
    order=210,
    fields=("qq_bias",),
    option=True,
    traits=(
        Trait(
            "additive bias",
            lambda case: case.qq_bias != "none",
            excludes={
                "cross-attention layers": "encoder keys are not rows of the step",
                "noncausal": "a bias hides the rows that follow a row",
                "heads with their own scaling": "no model has both",
                "no prompts or drafts to verify": "this bias is among the rows of a prompt or a draft",
                "KV splits": "servers with a bias attend to all keys at once",
                "multi-mode instance": "the other modes of the instance have no bias",
                "chunks": "the bias of a prompt has columns for the rows of one step",
                "data that count keys": "the bias changes the weights of keys",
                "loop": "the model of a greedy loop has no bias",
                "selected keys": "models with an indexer have no bias",
            },
        ),
        Trait(
            "shared additive bias",
            lambda case: case.qq_bias == "shared",
            excludes={
                "branching trees": "the trees of requests differ",
            },
        ),
    ),
    wrong=_wrong,
    context=_context,
    words=(
        Word(
            "qqbias(?:shared)?",
            lambda match, so_far: _read(match[0]),
            lambda case: _WORDS[case.qq_bias],
            spelled=("qqbias", "qqbiasshared"),
        ),
    ),
    explained=(
        Entry(
            "qqbias",
            "A tensor of biases among the rows of the step, which is added to their logits. Each request has its own.",
            also=("additive bias", "qq_bias", "attn_bias"),
            page="reference/layers.md",
        ),
        Entry(
            "qqbiasshared",
            "The same, and all requests of a batch have one bias, as vLLM's kernel takes it.",
            page="reference/layers.md",
        ),
    ),
    describe=lambda case: {"qq_bias": _PHRASES[case.qq_bias]},
    declared=(Asked(lambda case: "additive bias" + " for each request" * (case.qq_bias == "own"), _declared),),
    values=Columns(
        _columns, meets={"qq_bias": ("prefixes", "new_tokens", "window", "logit_cap", "sinks")}, further=("qq_bias",)
    ),
    covered=(
        option(
            "additive bias",
            lambda declared, mode: mode in declared.options.qq_bias,
            lambda case: case.qq_bias != "none",
        ),
    ),
    simpler=of_fields("qq_bias", value=lambda case: case.qq_bias),
    undeclared=(_undeclared,),
    varies="step",
    apply=Without("steps/query_bias.py draws the numbers, runner_modes/tensors/query_bias.py gives them."),
)
