"""Log-linear attention as a recurrence of the family: a state for each level of a Fenwick tree (arXiv 2506.04761).

A request of t tokens has a state in each level l whose bit of t is set, the sum of 2^l tokens. A token reads each of
them with the weight of its level, and then is added as in a binary counter: it carries into the levels below the lowest
zero bit, which become empty. ``fla.ops.log_linear_attn`` has the same levels above its chunks of 64 rows, and keeps the
inputs of a chunk that is not whole.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ..rounding import FLOAT32

LevelSlip = Literal[
    "", "not cleared", "one too few", "weight below", "weight above", "prefix only", "new tokens only", "with the token"
]
"""Mistake of a backend. ``not cleared``: levels that merge stay as they are. ``one too few``: a token carries into the
highest level that should merge, and not into the one above it. ``weight below``, ``weight above``: each level has the
weight of the level next to it. The others count the tokens before a row: those before the step, those of the step, or
one more."""


def filled_levels(tokens: int | torch.Tensor, levels: int) -> torch.Tensor:
    """[..., levels] bool: levels with a state after this number of tokens, an integer or [...] int64."""
    return (torch.as_tensor(tokens)[..., None] >> torch.arange(levels) & 1).bool()


def by_level(rows: torch.Tensor, levels: int) -> torch.Tensor:
    """[L, b, n, Hv, ...] of the matrices of slots, or of their rows, [L, b, n * Hv, ...]."""
    return rows.reshape(*rows.shape[:2], levels, rows.shape[2] // levels, *rows.shape[3:])


class Token(NamedTuple):
    """One token of each of b requests, in L layers. float64; K is the width of a key, n the number of levels."""

    own: torch.Tensor
    """[L, b, Hv, V, K]: what it adds."""
    own_off: torch.Tensor
    """[L, b, Hv, V]: limit of the error of a row of it."""
    decay: torch.Tensor
    """[L, b, Hv, 1]."""
    decay_off: torch.Tensor
    """[L, b, Hv, 1]: relative error of the decay, which all levels have."""
    moved: float
    """Relative error of a state that decays, besides that of the decay."""
    q: torch.Tensor
    """[L, b, Hv, K]."""
    q_off: torch.Tensor
    """[L, b, Hv, 1]: norm of its error."""
    read_off: float
    """Relative error of a product of a row of a state and q."""
    lost: float
    """Half of the smallest number to which a factor of a product is rounded."""
    weights: torch.Tensor
    """[L, b, Hv, n + 1]: of the token itself, and of each level."""
    weights_off: torch.Tensor
    tokens: torch.Tensor
    """[b] int64: tokens of each request before it."""


def step_of_levels(
    state: torch.Tensor, walk: torch.Tensor, now: Token, slip: LevelSlip
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token: states [L, b, n * Hv, V, K] and walks [L, b, n * Hv, V] -> both after it, what it reads [L, b, Hv, V],
    and the error of that.

    Errors of levels that merge, or that one token reads, add up as their squares do. But the rounding of a decay is the
    same in all m levels of a request: it counts sqrt(m) times in each, so that the root of the sum of its squares is
    its sum or more.
    """
    levels = now.weights.shape[-1] - 1
    states = by_level(state, levels) * now.decay[:, :, None, :, :, None]
    sizes = torch.linalg.vector_norm(states, dim=-1)
    walks = by_level(walk, levels) * now.decay[:, :, None]
    count = filled_levels(now.tokens, levels).sum(-1)[None, :, None, None]
    moved = (now.moved**2 + count * now.decay_off.square()).sqrt()
    walks = (walks.square() + (moved[:, :, None] * sizes).square()).sqrt()
    own_size = torch.linalg.vector_norm(now.own, dim=-1)
    out, off = _read(states, sizes, walks, own_size, now, slip)
    # Levels below the lowest zero bit of the number of tokens merge with the token, into the level of that bit.
    into = (~filled_levels(now.tokens, levels)).long().argmax(-1)
    numbers = torch.arange(levels)
    if slip == "one too few":
        into = (into - 1).clamp(min=0)
    merging, target = (each[None, :, :, None, None] for each in (numbers < into[:, None], numbers == into[:, None]))
    merged = now.own + (states * merging[..., None]).sum(2)
    most = own_size + (sizes * merging).sum(2)
    rounded = FLOAT32 * into.double().sqrt()[None, :, None, None] * most
    merged_walk = (now.own_off.square() + (walks * merging).square().sum(2) + rounded.square()).sqrt()
    if slip != "not cleared":
        states, walks = states.masked_fill(merging[..., None], 0.0), walks.masked_fill(merging, 0.0)
    states, walks = states + merged[:, :, None] * target[..., None], walks + merged_walk[:, :, None] * target
    return states.flatten(2, 3), walks.flatten(2, 3), out, off


def _read(
    states: torch.Tensor, sizes: torch.Tensor, walks: torch.Tensor, own_size: torch.Tensor, now: Token, slip: LevelSlip
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums that tokens read of decayed states [L, b, n, Hv, V, K] and of themselves, [L, b, Hv, V], and the errors."""
    levels = now.weights.shape[-1] - 1
    weights, weights_off = (each.transpose(2, 3)[..., None] for each in (now.weights, now.weights_off))
    every = torch.cat([now.own[:, :, None], states], 2)
    sizes = torch.cat([own_size[:, :, None], sizes], 2)
    walks = torch.cat([now.own_off[:, :, None], walks], 2)
    if slip.startswith("weight"):
        places = torch.arange(weights.shape[2]) + (1 if slip == "weight above" else -1)
        # The token itself has its own weight.
        places[0] = 0
        weights = weights[:, :, places.clamp(max=weights.shape[2] - 1)]
    read = (every @ now.q[:, :, None, ..., None]).squeeze(-1)
    there = torch.cat([torch.ones_like(now.tokens, dtype=torch.bool)[:, None], filled_levels(now.tokens, levels)], 1)
    weights, weights_off = (each * there[None, :, :, None, None] for each in (weights, weights_off))
    terms = weights * read
    q_size, root = torch.linalg.vector_norm(now.q, dim=-1, keepdim=True)[:, :, None], now.q.shape[-1] ** 0.5
    off = (
        weights * (now.q_off[:, :, None] * sizes + now.read_off * q_size * sizes + now.lost * root * (q_size + sizes))
        + weights_off * read.abs() + FLOAT32 * weights.shape[2] ** 0.5 * terms.abs()
    )  # fmt: skip
    return terms.sum(2), off.sum(2) + (weights * q_size * walks).square().sum(2).sqrt()
