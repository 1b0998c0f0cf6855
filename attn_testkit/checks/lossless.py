"""The check of the greedy-equivalence loop: greedy decode generates the same tokens with a draft and without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ..families.expected import Expected
from ..results.finding import Finding
from ..steps.data import VOCAB
from ..steps.greedy_loop import Loop
from .describe import number, times
from .evaluation import Evaluation


@dataclass(frozen=True, eq=False)
class TokenAttention:
    """The attention outputs of one token of a request."""

    stage: str
    """The round and the mode, as ``round 2, target-verify``."""
    request: int
    position: int
    """Position of the token."""
    attention: npt.NDArray[np.float32] = field(repr=False)
    """Attention outputs, [L, Hq * Dv]."""


@dataclass(frozen=True, eq=False)
class GeneratedTokens:
    """The results of a loop."""

    tokens: tuple[tuple[int, ...], ...]
    """Tokens of each request, prompt included."""
    said: tuple[TokenAttention, ...]
    """Rows whose tokens were accepted: of draft-extend, draft-decode and verify."""
    accepted: tuple[tuple[int, ...], ...]
    """Number of accepted draft tokens, by round and request."""
    drafts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Drafts of a target-verify loop, by round and request. Empty in a draft-decode loop."""


def ran_to_its_end(spoken: GeneratedTokens, loop: Loop) -> bool:
    """True if every expected row exists, with the right shape, for tokens that continue the prompts."""
    case = loop.schedules[0].case
    shape = (case.layers.count, case.heads.q_heads * case.head_dim)
    if np.shape(spoken.accepted) != loop.kept.shape or not all(0 <= n <= loop.steps for n in np.ravel(spoken.accepted)):
        return False
    drafted = (*loop.kept.shape, loop.steps) if case.tree is not None else (0,)
    return (
        [len(tokens) for tokens in spoken.tokens] == loop.lens(spoken.accepted)
        and all(tokens[: len(prompt)] == prompt for tokens, prompt in zip(spoken.tokens, loop.texts, strict=True))
        and np.shape(spoken.drafts) == drafted
        and all(0 <= token < VOCAB for tokens in spoken.tokens for token in tokens)
        and sorted((said.stage, said.request, said.position) for said in spoken.said)
        == sorted(loop.due(spoken.accepted))
        and all(said.attention.shape == shape for said in spoken.said)
    )


def lossless(
    spoken: GeneratedTokens,
    loop: Loop,
    expected: Expected,
    mistake: Callable[[TokenAttention, int], str] = lambda said, layer: "",
) -> list[Finding]:
    """Check that every row of an accepted token equals that of plain decode, and that every token is the most likely
    one.

    ``expected``: plain decode over ``spoken.tokens``, one row per token of each request. ``mistake``: (wrong row,
    number of a wrong layer) -> the mistake that explains it, or nothing.
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
                f"{loop.name(said.request)} gets a different result in the loop than in plain decode, "
                f"{times(float(ratio.max()))} over the limit",
                f"out[layer {layer}, token {said.position}, {at}] = {number(float(said.attention[layer, at]))}, "
                f"want {number(float(want[layer, at]))}",
                said.stage,
                mistake(said, layer) or _HINT,
            )]  # fmt: skip
        if said.position + 1 < len(loop.texts[said.request]):
            # The prompt says what follows.
            continue
        logits, slack = expected.logits[row], 2 * float(expected.logits_limit[row].max())
        token = spoken.tokens[said.request][said.position + 1]
        if float(logits.max() - logits[token]) > slack:
            text = (
                f"{loop.name(said.request)} generates token {token} in the loop, but token {int(logits.argmax())} in "
                "greedy decode"
            )
            return [_finding(text, f"after token {said.position}", said.stage, _HINT)]
    return []


_HINT = (
    "here a stage reads KV and states that earlier stages left, not what the kit stored: probably tokens of a "
    "rejected draft are still visible, or a value cached in one stage is reused in the next"
)


def _finding(headline: str, where: str, stage: str, hint: str) -> Finding:
    return Finding("lossless", headline, where=where, step=stage, hint=hint)


EVALUATIONS = (
    Evaluation(
        "lossless",
        shown_by=lambda case: case.rounds > 0,
    ),
)
