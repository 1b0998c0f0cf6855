"""One observed step with its expected result. Values that several checks need are computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..families.expected import Expected
from .describe import requests_wrong
from .key_counts import key_ratio
from .observation import Observation

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an element -> the integer dtype in which its bits are compared: NaN equals NaN, and -0 does not equal 0."""


def beyond(got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Bool in the shape of the three: True for elements of ``got`` that are not within ``limit`` of ``want``, NaN
    included."""
    return ~((got.double() - want.double()).abs() <= limit)


class Ratios(NamedTuple):
    """Error over limit, float64. Up to 1 is right, and NaN counts as infinite."""

    element: torch.Tensor
    """Ratio of each element, [L, T, Hq, Dv]."""
    row: torch.Tensor
    """Ratio of the norm of each row of a head, [L, T, Hq]."""


class Worst(NamedTuple):
    """A place in the attention outputs, and the ratio of its error to its limit."""

    layer: int
    row: int
    """Index into the T live rows."""
    head: int
    dim: int
    ratio: float
    """Error over limit; above 1."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Evaluation of one step's attention outputs. L layers, T live rows, Hq query heads, Dv values; on the host."""

    observed: Observation
    expected: Expected

    def name(self, layer: int) -> str:
        """Name, by its id, of the layer that ran as number ``layer``."""
        return self.observed.schedule.case.layers.name(layer)

    @cached_property
    def out(self) -> torch.Tensor:
        """Stacked outputs of all layers, [L, T, Hq, Dv] in the backend's dtype."""
        maps, shape = self.observed.schedule.case.head_maps, self.expected.attention.shape[1:]
        if not maps:
            return torch.stack([out.reshape(shape) for out in self.observed.attention])
        pairs = zip(maps, self.observed.attention, strict=True)
        return torch.stack(
            [each.q_whole(out.reshape(-1, each.layer.num_qo_heads, each.layer.head_dim)) for each, out in pairs]
        )

    @cached_property
    def exists(self) -> torch.Tensor:
        """Elements that a layer has, [L, 1, Hq, Dv] bool: all, unless layers have different heads."""
        whole = self.expected.attention
        exists = torch.ones(len(whole), 1, *whole.shape[2:], dtype=torch.bool)
        for layer, each in enumerate(self.observed.schedule.case.head_maps):
            exists[layer] = each.q_whole(each.q_part(exists[layer]))
        return exists

    @cached_property
    def unwritten(self) -> torch.Tensor:
        """Elements that still hold the poison's bits, which no computation gives, [L, T, Hq, Dv] bool."""
        return self.out.view(BITS[self.out.dtype.itemsize]) == -1

    @cached_property
    def finite(self) -> torch.Tensor:
        """Elements that are neither NaN nor Inf, [L, T, Hq, Dv] bool. Unwritten ones are NaN."""
        return self.out.isfinite()

    @cached_property
    def all_finite(self) -> bool:
        """True if no element is NaN or Inf."""
        return bool(self.finite.all())

    @cached_property
    def ratios(self) -> Ratios:
        """Error over limit of each element, and of each row of a head."""
        # In place: this is most of the cost of evaluating a step.
        error = self.out.to(torch.float64, copy=True).sub_(self.expected.attention)
        by_row = torch.linalg.vector_norm(error, dim=-1).div_(self.expected.row_limit)
        by_element = error.abs_().div_(self.expected.attention_limit)
        return Ratios(by_element.nan_to_num_(torch.inf, torch.inf), by_row.nan_to_num_(torch.inf, torch.inf))

    @cached_property
    def key_ratio(self) -> torch.Tensor:
        """Largest error of the count of any KV token, over half a token, [L, T, Hq] float64.

        Only for codes; 0 for other data, and in rows with NaN or Inf.
        """
        if self.expected.key_sum is None:
            return torch.zeros_like(self.ratios.row)
        return key_ratio(self.out, self.expected, self.observed.step.lens)

    @cached_property
    def margin(self) -> float:
        """Largest error / limit of the attention outputs: up to 1 is right, NaN is infinity. 0 without rows."""
        return max((float(part.max()) for part in (*self.ratios, self.key_ratio) if part.numel()), default=0.0)

    @property
    def right(self) -> bool:
        """True if every element and row is written, finite and within its limit, and, for codes, every KV token counted
        as often as it should be. Poison is NaN, and NaN exceeds its limit.
        """
        return self.margin <= 1

    @cached_property
    def wrong(self) -> torch.Tensor:
        """Elements beyond their limit, NaN included, [L, T, Hq, Dv] bool; also whole rows in which only the norm or the
        count of a KV token is wrong.
        """
        wrong = self.ratios.element > 1
        lost = ((self.ratios.row > 1) | (self.key_ratio > 1)) & ~wrong.any(-1)
        return wrong | (lost[..., None] & self.exists)

    @cached_property
    def wrong_rows(self) -> tuple[int, ...]:
        """Flat rows, ascending, with a wrong value in any layer."""
        return tuple(self.wrong.any(0).flatten(1).any(-1).nonzero().flatten().tolist())

    @cached_property
    def wrong_requests(self) -> tuple[int, ...]:
        """Requests, ascending, with a wrong value in any row."""
        rows = self.wrong.permute(1, 0, 2, 3)
        return tuple(requests_wrong(rows, self.expected.data.row_request, self.observed.step.bs))

    @cached_property
    def eager(self) -> torch.Tensor | None:
        """Outputs of the eager run of the same step, [L, T, Hq, Dv] in the backend's dtype, if there was one."""
        run = self.observed.eager_run
        return None if run is None else Comparison(run, self.expected).out

    @cached_property
    def as_in_eager(self) -> bool:
        """True if the eager run of the same step gave the same bits."""
        out, eager = self.out, self.eager
        if eager is None or out.dtype != eager.dtype:
            return False
        bits = BITS[out.dtype.itemsize]
        return torch.equal(out.view(bits), eager.view(bits))

    @cached_property
    def ratio_to_eager(self) -> torch.Tensor | None:
        """Distance from the eager run over two limits, [L, T, Hq, Dv] float64: each may be off by one."""
        if self.eager is None:
            return None
        apart = (self.out.double() - self.eager.double()).abs()
        return (apart / (2 * self.expected.attention_limit)).nan_to_num(torch.inf, torch.inf)

    @cached_property
    def worst(self) -> Worst | None:
        """The finite element with the largest ratio of error to limit, else an element of the row whose norm exceeds
        its limit; None if nothing does."""
        if self.right:
            return None
        by_element, by_row = self.ratios
        elements = torch.where(self.finite, by_element, 0.0)
        if float(elements.max()) > 1:
            layer, row, head, dim = place_of_max(elements)
            return Worst(layer, row, head, dim, float(elements.max()))
        rows = torch.where(self.finite.all(-1), by_row, 0.0)
        if float(rows.max()) <= 1:
            return None
        layer, row, head = place_of_max(rows)
        return Worst(layer, row, head, int(by_element[layer, row, head].argmax()), float(rows.max()))

    @cached_property
    def worst_row(self) -> int | None:
        """The flat row for a finding's headline: an unwritten one, else one with NaN or Inf, else the worst; None if
        all are right."""
        for bad in (self.unwritten, ~self.finite):
            if bad.any():
                return int(bad.nonzero()[0][1])
        if self.worst is not None:
            return self.worst.row
        return None if self.right else place_of_max(self.key_ratio)[1]


def place_of_max(tensor: torch.Tensor) -> tuple[int, ...]:
    """Indices of the largest element of ``tensor``."""
    return tuple(int(i) for i in torch.unravel_index(tensor.argmax(), tensor.shape))
