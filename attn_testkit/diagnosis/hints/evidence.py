"""Evidence about one wrong step, on which hints are based."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ...checks import Comparison
from ...checks.observation import Observation
from ...contract import AttentionLayer, HeadShape
from ...families.expected import Expected
from ...families.softmax.answer import attend_with_limit
from ...steps.data import StepData
from ...steps.schedule import Schedule, Step
from ..attended_keys import AttendedKeys
from ..changed_case import ChangedCases
from ..misrouted_rows import MisroutedRow

SMALLEST_TILE = 16
"""Smallest tile of keys of any kernel."""
SMALL_ERROR = 5.0
"""Error, in limits, up to which one extra rounding may be the reason."""
LONGEST = 8192
"""Most KV tokens of a request for which mistakes are tried: each needs a run of the oracle."""
SAME_RESULTS = ("mean", "negative", "plus_minus_one", "one_hot")
"""Patterns of data in which heads of a group, rows, or many KV tokens may have equal results."""


@dataclass(frozen=True)
class Supposed:
    """Answer of a backend with some mistake. Fields that are not set are those of the step."""

    text: str = ""
    """Hint if the wrong rows are right for it."""
    data: StepData | None = None
    layers: Sequence[AttentionLayer] = ()
    as_given: bool | None = None
    """True if new rows are attended to as given, not as the pool stores them."""
    products: str = ""
    """Value of ``matmul_dtype``."""
    q_scale: str = ""
    """Value of ``q_scale``."""
    every_row: bool = False
    """True if right rows must be right for it too."""


@dataclass(frozen=True)
class Evidence:
    """Evidence about one wrong step."""

    schedule: Schedule
    comparison: Comparison
    attended: AttendedKeys | None
    """KV tokens that one wrong row attended to; None if they could not be found out."""
    passed: list[Observation]
    """Steps of the same case-run that were right."""
    in_graph: bool
    """True if the eager run of the step is right."""
    misrouted: tuple[MisroutedRow, ...] = ()
    """Wrong rows that hold results of others."""
    right_when_fresh: bool = False
    """True if an eager step after others is right as the first of a fresh instance."""
    computes_nan: bool = False
    """True if NaN remains with zeros in unowned slots, and with another fill of fresh memory."""
    right_when_alone: bool = False
    """True if a replay after others is right as the only one."""
    reads_foreign: bool = False
    """True if the result is finite with zeros instead of NaN in unowned slots."""
    right_with_zeros: bool = False
    """True if that result is right too."""
    of_capture: bool | None = None
    """True if a replay is right once its graph is captured with the same batch, False if it is wrong then, too."""
    changed: ChangedCases | None = None
    """Runs of other cases, if the step is wrong on a fresh instance in eager mode."""

    @property
    def observed(self) -> Observation:
        """The observation of the step."""
        return self.comparison.observed

    @property
    def expected(self) -> Expected:
        """The expected results of the step."""
        return self.comparison.expected

    @property
    def step(self) -> Step:
        """The wrong step."""
        return self.observed.step

    @property
    def wrong(self) -> list[int]:
        """Wrong requests, ascending."""
        return list(self.comparison.wrong_requests)

    @property
    def rows(self) -> list[int]:
        """Wrong flat rows, ascending."""
        return list(self.comparison.wrong_rows)

    @property
    def wrong_shapes(self) -> list[HeadShape]:
        """Head shapes of wrong layers."""
        case, layers = self.schedule.case, [place for place, bad in enumerate(self.wrong_layers) if bad]
        return list(dict.fromkeys(case.head_maps[i].layer if case.head_maps else case.head_shape for i in layers))

    @property
    def wrong_layers(self) -> list[bool]:
        """List of bool, one per layer in the order in which they run: true if the layer is wrong."""
        wrong: list[bool] = self.comparison.wrong.flatten(1).any(-1).tolist()
        return wrong

    @property
    def before(self) -> Step | None:
        """The step that the same instance ran before this one and that makes this one wrong."""
        if self.right_when_fresh:
            return self.schedule.steps[0]
        steps = self.schedule.steps
        return steps[steps.index(self.step) - 1] if self.right_when_alone and self.step in steps[1:] else None

    @property
    def lens(self) -> list[int]:
        """Number of KV tokens of each request, those of this step included."""
        return self.step.lens

    @property
    def branches(self) -> bool:
        """True if visibility among the new rows does not follow from their order (trees, drafts)."""
        return any(r.draft or (r.tree is not None and r.tree.topk > 1) for r in self.step.requests)

    @property
    def may_be_nan(self) -> bool:
        """True if elements with the bits of poison are known to be a NaN that was read or computed."""
        return self.reads_foreign or self.computes_nan

    @property
    def counts_alone(self) -> bool:
        """True if only counts of KV tokens are wrong: each element is within its limit, so other limits do not help."""
        return self.comparison.all_finite and self.comparison.worst is None

    @property
    def can_be_asked(self) -> bool:
        """True if other KV tokens can be tried: for wrong, finite, eager results, and requests that are not long."""
        comparison = self.comparison
        asked = not self.schedule.case.head_maps and max(self.lens, default=0) <= LONGEST
        wrong = comparison.all_finite and not comparison.right and comparison.worst is not None
        return asked and wrong and not self.in_graph

    def near(self, supposed: Supposed) -> torch.Tensor:
        """Heads of rows that are what the supposed backend gives, [L, T, Hq] bool."""
        near, _ = self.near_or_nan(supposed)
        return near & self.comparison.finite.all(-1)

    def answer(self, supposed: Supposed) -> torch.Tensor:
        """Output of the supposed backend, [L, T, Hq, Dv] float64."""
        return self._answer(supposed)[0]

    def near_or_nan(self, supposed: Supposed) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``near``, and heads of rows in which that backend gives NaN. Those are near if they are NaN."""
        return self._near_or_nan(*self._answer(supposed))

    def right_for(self, supposed: Supposed) -> bool:
        """True if every wrong row of a layer, or every row, is what the supposed backend gives.

        Within limits that the mistake makes wider, the right answer may be near as well. So what remains of the error
        has to be small, unless the mistake is one of rounding, which changes only limits.
        """
        want, limit = self._answer(supposed)
        near = (self._near_or_nan(want, limit)[0] & self.comparison.finite.all(-1)).all(-1)
        fits = (near if supposed.every_row else near[self.comparison.wrong.flatten(2).any(-1)]).all()
        return bool(fits) and (bool(supposed.products or supposed.q_scale) or self.explained_by(want))

    def explained_by(self, supposed: torch.Tensor) -> bool:
        """True if the supposed output leaves little of the error, and next to nothing if less precision explains it."""
        return explains(self.comparison, supposed, _HARDLY_ANY if self.may_be_precision else _UNEXPLAINED)

    @cached_property
    def may_be_precision(self) -> bool:
        """True if less precision explains the error: it is small, or within the limits of FP8 products that lose small
        weights, if the pool is FP8. Within such errors many mistakes are near by chance."""
        fp8 = self.schedule.case.kv_dtype != "same" and self.schedule.matmul_dtype != "fp8_e4m3_unscaled"
        if self.comparison.margin <= SMALL_ERROR or not fp8:
            return self.comparison.margin <= SMALL_ERROR
        want, limit = self._answer(Supposed(products="fp8_e4m3_unscaled"))
        near = self._near_or_nan(want, limit)[0] & self.comparison.finite.all(-1)
        return bool(near[self.comparison.wrong.any(-1)].all())

    def _answer(self, supposed: Supposed) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the supposed backend, and its limit."""
        schedule, given = self.schedule, supposed.as_given
        if given is None:
            given = schedule.new_rows_as_given and not self.step.stored
        if supposed.products:
            schedule = schedule.with_numerics(matmul_dtype=supposed.products)
        if supposed.q_scale:
            schedule = schedule.with_numerics(q_scale=supposed.q_scale)
        want, limit = attend_with_limit(schedule, supposed.data or self.expected.data, given, supposed.layers)
        return want.out, limit

    def _near_or_nan(self, want: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.comparison.out.double()
        # Of a row that sees no KV token the oracle has NaN, and a backend 0.
        is_nan = want.isnan()
        near = ((out - want).abs() <= limit) | (is_nan & ((out == 0) | out.isnan()))
        return near.all(-1), is_nan.any(-1)


def explains(comparison: Comparison, supposed: torch.Tensor, part: float | None = None) -> bool:
    """True if the supposed output [L, T, Hq, Dv] leaves little of the error of wrong heads: at most ``part`` of its
    square. Within wide limits, as of exact data, many answers are near."""
    of = comparison.wrong.any(-1) & comparison.finite.all(-1)
    out, want = comparison.out.double()[of], comparison.expected.attention[of]
    left = (out - supposed[of]).nan_to_num(0.0)
    return bool(left.square().sum() <= (_UNEXPLAINED if part is None else part) * (out - want).square().sum())


_UNEXPLAINED = 0.25
"""Part of the squared error of wrong rows that rounding may leave."""
_HARDLY_ANY = 0.02
"""Part that rounding may leave if less precision explains the error, too. An answer has to be much better than that
explanation, which leaves all of the error: rounding in FP8 was once reported as 'k_scale is used for values' and as a
wrong KV head."""


def with_own_values(data: StepData) -> StepData:
    """``data`` with separate values even if a row holds key and value at once. A kernel reads such a row twice, and may
    read or scale it in two ways.
    """
    if data.stored_values is not None or data.row_format is not None:
        return data
    return replace(data, stored_values=data.stored_keys[..., : data.v.shape[-1]])


def places_of(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """List, for each flat row, its request, its index there, and the number of rows of that request."""
    return [(b, i, n) for b, n in enumerate(counts) for i in range(n)]
