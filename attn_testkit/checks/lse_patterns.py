"""What a wrong log-sum-exp is: it is held against those that usual mistakes give."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..cases.case import Case
from ..cases.data import StepData, make_layers
from ..cases.parts import parts_of
from ..contract import AttentionLayer, KVPart
from ..oracle.attention import Attention
from ..oracle.limits import UNIT_ROUNDOFF
from ..oracle.parts import attend_part

__all__ = ["LseEvidence", "lse_hint"]


@dataclass(frozen=True, eq=False)
class LseEvidence:
    """The log-sum-exps of one part in one layer."""

    case: Case
    data: StepData
    layer: int
    part: int
    """Place among the case's parts; behind the last one: what the backend merged."""
    found: torch.Tensor
    """[T, Hq] float64, as natural logarithms."""
    stored: torch.Tensor
    """[T, Hq], as they came."""

    @property
    def merged(self) -> bool:
        """Whether it is of all parts."""
        return self.part >= len(parts_of(self.case))

    @cached_property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The model's, both."""
        return make_layers(self.case)

    def attended(self, *, sinks: bool, **changes: Any) -> Attention:
        """Attention on the part's keys: with the sinks or without, and with something of the layers changed."""
        part = KVPart() if self.merged else parts_of(self.case)[self.part]
        return attend_part(self.data, [replace(layer, **changes) for layer in self.layers], replace(part, sinks=sinks))

    def lse(self, *, sinks: bool, **changes: Any) -> torch.Tensor:
        """[T, Hq] float64."""
        return self.attended(sinks=sinks, **changes).lse[self.layer]

    @property
    def has_sinks(self) -> bool:
        """Whether the part counts the sinks of its layer."""
        has = self.layers[self.layer].sinks is not None
        return has and (self.merged or parts_of(self.case)[self.part].sinks)

    @property
    def sinks(self) -> torch.Tensor | None:
        """[Hq] float64."""
        sinks = self.layers[self.layer].sinks
        return None if sinks is None else sinks.double()


def _base_2(e: LseEvidence) -> torch.Tensor:
    return e.lse(sinks=e.has_sinks) / math.log(2)


def _base_e(e: LseEvidence) -> torch.Tensor:
    return e.lse(sinks=e.has_sinks) * math.log(2)


def _transposed(e: LseEvidence) -> torch.Tensor:
    """What lies there where [Hq, T] is read as [T, Hq], of a step without padding."""
    right = e.lse(sinks=e.has_sinks)
    return right.t().reshape(right.shape)


def _untransposed(e: LseEvidence) -> torch.Tensor:
    right = e.lse(sinks=e.has_sinks)
    return right.reshape(right.shape[::-1]).t()


def _sinks_added(e: LseEvidence) -> torch.Tensor | None:
    """Once more than they should be."""
    return None if e.sinks is None else torch.logaddexp(e.lse(sinks=e.has_sinks), e.sinks.expand_as(e.found))


def _sinks_left_out(e: LseEvidence) -> torch.Tensor | None:
    return e.lse(sinks=False) if e.has_sinks else None


def _unscaled(e: LseEvidence) -> torch.Tensor:
    return e.lse(sinks=e.has_sinks, scaling=1.0)


def _uncapped(e: LseEvidence) -> torch.Tensor | None:
    return e.lse(sinks=e.has_sinks, logit_cap=0.0) if e.layers[e.layer].logit_cap else None


def _without_k_scale(e: LseEvidence) -> torch.Tensor | None:
    layer = e.layers[e.layer]
    if layer.k_scale == 1.0:
        return None
    return e.lse(sinks=e.has_sinks, scaling=layer.scaling / layer.k_scale)


def _maximum(e: LseEvidence) -> torch.Tensor:
    attended = e.attended(sinks=e.has_sinks)
    return attended.top[e.layer].where(attended.lse[e.layer] > -torch.inf, -torch.inf)


def _sum_alone(e: LseEvidence) -> torch.Tensor:
    attended = e.attended(sinks=e.has_sinks)
    return attended.lse[e.layer] - attended.top[e.layer]


_MISTAKES: Sequence[tuple[Callable[[LseEvidence], torch.Tensor | None], str]] = (
    (_base_2, "it is in base 2, and a natural one is claimed: multiply it by ln 2, or claim base='2'"),
    (_base_e, "it is a natural one, and base 2 is claimed: divide it by ln 2, or claim base='e'"),
    (_transposed, "heads lie before rows in its memory: claim layout='[H, T]', or transpose it"),
    (_untransposed, "rows lie before heads in its memory: claim layout='[T, H]', or transpose it"),
    (_sinks_added, "the sink is counted once more than it should be: part.sinks is True in one of the parts alone"),
    (_sinks_left_out, "the sink is left out: part.sinks says that it counts in this part"),
    (_maximum, "it is the row's maximum: the logarithm of the sum is left out"),
    (_sum_alone, "it is the logarithm of the sum alone: the row's maximum is left out"),
    (_unscaled, "its logits are not scaled"),
    (_uncapped, "its logits are not capped"),
    (_without_k_scale, "its logits lack the k_scale of the FP8 pool"),
)
"""A log-sum-exp that a mistake gives, None where it makes no difference; and what to say of it."""


_UNSHIFTED = (
    "an exponential of a large number is 0 or Inf, and so the logarithm of their sum is -Inf or Inf: take {} out "
    "before exp, and add it to the logarithm"
)


def lse_hint(evidence: LseEvidence, want: torch.Tensor, limit: torch.Tensor) -> str:
    """The first mistake that explains every row and head; empty where none does.

    ``want``, ``limit`` [T, Hq] float64: what is right, and how far it may be from that.
    """
    found = evidence.found
    if found.isnan().any():
        return "never written, or -inf minus -inf: a softmax over no key, or a merge of two parts without any"
    empty = want == -torch.inf
    if empty.any() and bool((((found - want).abs() <= limit) | empty).all()):
        return "a part without keys must have -inf: anything else gives it weight in a merge"
    widest = limit.where(limit.isfinite(), 0.0).max()
    for mistake, text in _MISTAKES:
        supposed = mistake(evidence)
        # A log-sum-exp in another base is off by as much as itself, in that base; one of another place has its limit.
        if supposed is not None and _alike(found, supposed, 2 * widest):
            return text
    if bool((found.isinf() & ~empty).any()):
        return _UNSHIFTED.format("the larger of the parts' log-sum-exps" if evidence.merged else "the maximum")
    rounded = evidence.stored.bfloat16().to(evidence.stored.dtype)
    if torch.equal(evidence.stored, rounded) and _alike(found, want, limit + UNIT_ROUNDOFF["bf16"] * want.abs()):
        return "it was rounded to bfloat16 on its way: keep it in float32, or claim dtype='model'"
    return ""


def _alike(found: torch.Tensor, supposed: torch.Tensor, limit: torch.Tensor) -> bool:
    return bool(((found == supposed) | ((found - supposed).abs() <= limit)).all())
