"""The check of the lossless loop: with a draft or without one, greedy decode says the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ..cases.data import VOCAB, make_layers
from ..cases.loop import Loop
from ..oracle.expect import Expected
from ..results import Finding
from .check import Check, Stage
from .describe import number, times

__all__ = ["CHECKS", "Said", "Spoken", "lossless", "ran_to_its_end"]


@dataclass(frozen=True, eq=False)
class Said:
    """What attention gave for one token of a request."""

    stage: str
    """``round 2, target-verify``."""
    request: int
    position: int
    """Of the token."""
    attention: npt.NDArray[np.float32] = field(repr=False)
    """[L, Hq * Dv]."""


@dataclass(frozen=True, eq=False)
class Spoken:
    """What came of a loop."""

    tokens: tuple[tuple[int, ...], ...]
    """Of each request, prompt included."""
    said: tuple[Said, ...]
    """Rows whose tokens were accepted: of draft-extend, draft-decode and verify."""
    accepted: tuple[tuple[int, ...], ...]
    """Round by round, request by request: accepted tokens of the draft."""


def ran_to_its_end(spoken: Spoken, loop: Loop) -> bool:
    """Every row that was due is there, for tokens that go on from the prompts, and has the shape of one."""
    layers, heads = len(make_layers(loop.schedules[0].case)), loop.schedules[0].case.heads.q_heads
    shape = (layers, heads * loop.schedules[0].case.head_dim)
    if np.shape(spoken.accepted) != loop.kept.shape or not all(0 <= n <= loop.steps for n in np.ravel(spoken.accepted)):
        return False
    lens = np.sum(spoken.accepted, 0) + len(spoken.accepted) + [len(prompt) for prompt in loop.prompts]
    return (
        [len(tokens) for tokens in spoken.tokens] == lens.tolist()
        and all(tokens[: len(prompt)] == prompt for tokens, prompt in zip(spoken.tokens, loop.prompts, strict=True))
        and all(0 <= token < VOCAB for tokens in spoken.tokens for token in tokens)
        and sorted((said.stage, said.request, said.position) for said in spoken.said)
        == sorted(loop.due(spoken.accepted))
        and all(said.attention.shape == shape for said in spoken.said)
    )


def lossless(spoken: Spoken, expected: Expected) -> list[Finding]:
    """Every row of an accepted token is what plain decode computes, and every token that is said its likeliest.

    ``expected``: plain decode over ``spoken.tokens``, a row for each token of each request.
    """
    starts = [0]
    for tokens in spoken.tokens:
        starts.append(starts[-1] + len(tokens))
    for said in spoken.said:
        row = starts[said.request] + said.position
        want, limit = expected.attention[:, row].flatten(1), expected.attention_limit[:, row].flatten(1)
        ratio = ((torch.tensor(said.attention, dtype=torch.float64) - want).abs() / limit).nan_to_num(torch.inf)
        if float(ratio.max()) > 1:
            layer, at = divmod(int(ratio.argmax()), ratio.shape[1])
            return [_finding(
                f"request {said.request} gets another result in the loop than in plain decode, "
                f"{times(float(ratio.max()))} over the limit",
                f"out[layer {layer}, token {said.position}, {at}] = {number(float(said.attention[layer, at]))}, "
                f"want {number(float(want[layer, at]))}",
                said.stage,
            )]  # fmt: skip
        logits, slack = expected.logits[row], 2 * float(expected.logits_limit[row].max())
        token = spoken.tokens[said.request][said.position + 1]
        if float(logits.max() - logits[token]) > slack:
            text = f"request {said.request} says token {token}, and greedy decode {int(logits.argmax())}"
            return [_finding(text, f"behind token {said.position}", said.stage)]
    return []


def _finding(headline: str, where: str, stage: str) -> Finding:
    return Finding(
        "lossless",
        headline,
        where=where,
        step=stage,
        hint="in a step of its own a stage reads KV that the kit stored, and here what earlier stages wrote: tokens of "
        "a rejected draft that are still seen, or something kept from one stage for the next",
    )


CHECKS = (
    Check(
        "lossless",
        "Draft-decode, target-verify and draft-extend, round after round on one instance, say what plain greedy decode "
        "says, whatever is accepted of a draft.",
        "Something kept from one stage for the next; tokens of a rejected draft that are still visible.",
        "sglang #21987; vLLM #43810",
        "`step` names the round and the stage that is the first to differ.",
        judged_from=Stage.COMPLETED,
        shown_by=lambda case: case.rounds > 0,
    ),
)
"""In the order in which they are worth reading. Judged from what a loop said."""
