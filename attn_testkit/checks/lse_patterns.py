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
from ..families.softmax.attention import Attention
from ..families.softmax.parts import attend_part

__all__ = ["MISTAKES", "LseEvidence"]


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
    base: str = "e"
    """What is claimed: "e" or "2"."""

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


def _base_2_for_e(e: LseEvidence) -> torch.Tensor | None:
    return e.lse(sinks=e.has_sinks) / math.log(2) if e.base == "e" else None


def _base_2_twice(e: LseEvidence) -> torch.Tensor | None:
    return e.lse(sinks=e.has_sinks) / math.log(2) if e.base == "2" else None


def _base_e_for_2(e: LseEvidence) -> torch.Tensor | None:
    return e.lse(sinks=e.has_sinks) * math.log(2) if e.base == "2" else None


def _base_e_twice(e: LseEvidence) -> torch.Tensor | None:
    return e.lse(sinks=e.has_sinks) * math.log(2) if e.base == "e" else None


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


def _merged_in_the_other_base(e: LseEvidence) -> torch.Tensor | None:
    """Base 2 of natural ones, or natural of those in base 2, whichever is claimed (sglang #33064)."""
    if not e.merged:
        return None
    one = math.log(2) if e.base == "e" else 1 / math.log(2)
    parts = [attend_part(e.data, e.layers, part).lse[e.layer] for part in parts_of(e.case)]
    return torch.logsumexp(torch.stack(parts) * one, 0) / one


MISTAKES: Sequence[tuple[Callable[[LseEvidence], torch.Tensor | None], str]] = (
    (
        _base_2_for_e,
        "it is in base 2, and a natural one is claimed: multiply it by ln 2, or claim base='2'",
    ),
    (
        _base_2_twice,
        "it is log2(e) times what it should be in base 2, which is claimed: it is turned to base 2 twice",
    ),
    (
        _base_e_for_2,
        "it is a natural one, and base 2 is claimed: divide it by ln 2, or claim base='e'",
    ),
    (
        _base_e_twice,
        "it is ln 2 times the natural one, which is claimed: it is multiplied by ln 2 twice, or was natural before",
    ),
    (
        _merged_in_the_other_base,
        "parts of the claimed base are merged as if they were of the other one (base 2 or e): each has a wrong weight",
    ),
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
