"""Usual mistakes of log-sum-exps: a wrong one is compared with the values that each mistake gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..cases.case import Case
from ..cases.features.kv_splits import splits_of
from ..contract import AttentionLayer, KVSplit
from ..families.softmax.attention import Attention
from ..families.softmax.kv_splits import attend_split
from ..steps.data import StepData, make_layers


@dataclass(frozen=True, eq=False)
class LseEvidence:
    """The log-sum-exps of one KV split in one layer."""

    case: Case
    data: StepData
    layer: int
    part: int
    """Index among the case's KV splits; the index after the last split means the result that the backend merged."""
    found: torch.Tensor
    """Natural logarithms, [T, Hq] float64."""
    stored: torch.Tensor
    """Values as the backend returned them, [T, Hq]."""
    base: str = "e"
    """The declared base: "e" or "2"."""

    @property
    def merged(self) -> bool:
        """True if the log-sum-exp is that of all KV splits."""
        return self.part >= len(splits_of(self.case))

    @cached_property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """Both layers of the model."""
        return make_layers(self.case)

    def attended(self, *, sinks: bool, **changes: Any) -> Attention:
        """Attention on the split's keys: with or without the sinks, and with changed layers."""
        part = KVSplit() if self.merged else splits_of(self.case)[self.part]
        return attend_split(self.data, [replace(layer, **changes) for layer in self.layers], replace(part, sinks=sinks))

    def lse(self, *, sinks: bool, **changes: Any) -> torch.Tensor:
        """Log-sum-exps [T, Hq] float64."""
        return self.attended(sinks=sinks, **changes).lse[self.layer]

    @property
    def has_sinks(self) -> bool:
        """True if the split counts the sinks of its layer."""
        has = self.layers[self.layer].sinks is not None
        return has and (self.merged or splits_of(self.case)[self.part].sinks)

    @property
    def sinks(self) -> torch.Tensor | None:
        """Sinks [Hq] float64."""
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
    """Values that result if [Hq, T] is read as [T, Hq], in a step without padding."""
    right = e.lse(sinks=e.has_sinks)
    return right.t().reshape(right.shape)


def _untransposed(e: LseEvidence) -> torch.Tensor:
    right = e.lse(sinks=e.has_sinks)
    return right.reshape(right.shape[::-1]).t()


def _sinks_added(e: LseEvidence) -> torch.Tensor | None:
    """Count sinks once too often."""
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
    """Merge natural values in base 2, or values in base 2 as natural ones, depending on the base (sglang #33064)."""
    if not e.merged:
        return None
    one = math.log(2) if e.base == "e" else 1 / math.log(2)
    parts = [attend_split(e.data, e.layers, part).lse[e.layer] for part in splits_of(e.case)]
    return torch.logsumexp(torch.stack(parts) * one, 0) / one


MISTAKES: Sequence[tuple[Callable[[LseEvidence], torch.Tensor | None], str]] = (
    (
        _base_2_for_e,
        "it is in base 2, but base e is declared: multiply it by ln 2, or declare base='2'",
    ),
    (
        _base_2_twice,
        "it is log2(e) times the value in base 2, which is declared: it is converted to base 2 twice",
    ),
    (
        _base_e_for_2,
        "it is in base e, but base 2 is declared: divide it by ln 2, or declare base='e'",
    ),
    (
        _base_e_twice,
        "it is ln 2 times the declared value in base e: it is multiplied by ln 2 twice, or was in base e before",
    ),
    (
        _merged_in_the_other_base,
        "KV splits are merged as if they were in the other base than declared (2 or e): each has a wrong weight",
    ),
    (_transposed, "heads come before rows in its memory: declare layout='[H, T]', or transpose it"),
    (_untransposed, "rows come before heads in its memory: declare layout='[T, H]', or transpose it"),
    (_sinks_added, "the sink is counted once more than it should be: part.sinks is True in only one of the KV splits"),
    (_sinks_left_out, "the sink is left out: part.sinks is True, so it counts in this KV split"),
    (_maximum, "it is only the row's maximum: the logarithm of the sum is left out"),
    (_sum_alone, "it is only the logarithm of the sum: the row's maximum is left out"),
    (_unscaled, "its logits are not scaled"),
    (_uncapped, "its logits are not capped"),
    (_without_k_scale, "its logits lack the k_scale of the FP8 pool"),
)
"""Pairs of the log-sum-exp that a mistake gives (None if it makes no difference), and the hint."""
