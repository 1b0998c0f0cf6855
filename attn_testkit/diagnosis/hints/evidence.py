"""What is known about one wrong step: what hints are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...cases.data import StepData
from ...cases.schedule import Schedule, Step
from ...checks import Judgement
from ...checks.observation import Observation
from ...contract import AttentionLayer, HeadShape
from ...families.softmax.answer import attend_with_limit
from ...oracle.expect import Expected
from ..attended_keys import AttendedKeys
from ..changed_case import ChangedCases
from ..swapped_rows import SwappedRow

__all__ = ["LONGEST", "SAME_RESULTS", "SMALLEST_TILE", "SMALL_ERROR", "Evidence", "Supposed", "places_of"]

SMALLEST_TILE = 16
"""No kernel's tile of keys is smaller."""
SMALL_ERROR = 5.0
"""Errors up to so many limits are what one rounding too many gives."""
LONGEST = 8192
"""KV tokens of a request up to which it is asked what other data give: each mistake costs an answer of the oracle."""
SAME_RESULTS = ("mean", "negative", "codes", "footprint")
"""Patterns of data in which heads of a group, rows, or many KV tokens may give the same."""


@dataclass(frozen=True)
class Supposed:
    """Answer of a backend with some mistake. Fields that are not given are the step's own."""

    text: str = ""
    """Hint if the wrong rows are right for it."""
    data: StepData | None = None
    layers: Sequence[AttentionLayer] = ()
    as_given: bool | None = None
    """Whether new rows are attended as given, not as the pool stores them."""
    products: str = ""
    """A ``matmul_dtype``."""
    q_scale: str = ""
    """A ``q_scale``."""
    every_row: bool = False
    """Whether rows that are right have to be right for it as well."""


@dataclass(frozen=True)
class Evidence:
    """What is known about one wrong step."""

    schedule: Schedule
    judgement: Judgement
    attended: AttendedKeys | None
    """What one wrong row attended to; None: the backend would not say."""
    passed: list[Observation]
    """Steps of the same case-run that were right."""
    in_graph: bool
    """The eager run of the step is right."""
    swapped: tuple[SwappedRow, ...] = ()
    """Wrong rows that hold what others should."""
    right_when_fresh: bool = False
    """An eager step after others, and as the first of a fresh instance it is right."""
    computes_nan: bool = False
    """NaN stays with zeros in unowned slots, and with another fill of fresh memory."""
    right_when_alone: bool = False
    """A replay after others, and as the only one it is right."""
    reads_foreign: bool = False
    """With zeros instead of NaN in unowned slots the result is finite."""
    right_with_zeros: bool = False
    """And not only finite."""
    changed: ChangedCases | None = None
    """Asks for other cases, where the step is wrong on a fresh instance in eager."""

    @property
    def observed(self) -> Observation:
        """What was seen of it."""
        return self.judgement.observed

    @property
    def expected(self) -> Expected:
        """What it should have given."""
        return self.judgement.expected

    @property
    def step(self) -> Step:
        """The wrong step."""
        return self.observed.step

    @property
    def wrong(self) -> list[int]:
        """Requests that are wrong, ascending."""
        return list(self.judgement.wrong_requests)

    @property
    def rows(self) -> list[int]:
        """Flat rows that are wrong, ascending."""
        return list(self.judgement.wrong_rows)

    @property
    def wrong_shapes(self) -> list[HeadShape]:
        """Of the heads of layers that are wrong."""
        case, layers = self.schedule.case, [place for place, bad in enumerate(self.wrong_layers) if bad]
        return list(dict.fromkeys(case.head_maps[i].layer if case.head_maps else case.head_shape for i in layers))

    @property
    def wrong_layers(self) -> list[bool]:
        """Of each layer, in the order in which they run, whether a number of it is wrong."""
        wrong: list[bool] = self.judgement.wrong.flatten(1).any(-1).tolist()
        return wrong

    @property
    def before(self) -> Step | None:
        """The step that the same instance ran before this one, and that this one is wrong because of."""
        if self.right_when_fresh:
            return self.schedule.steps[0]
        steps = self.schedule.steps
        return steps[steps.index(self.step) - 1] if self.right_when_alone and self.step in steps[1:] else None

    @property
    def lens(self) -> list[int]:
        """KV tokens of each request, those of this step included."""
        return self.step.lens

    @property
    def branches(self) -> bool:
        """Whether visibility among the new rows does not follow from their order (trees, drafts)."""
        return any(r.draft or (r.tree is not None and r.tree.topk > 1) for r in self.step.requests)

    @property
    def may_be_nan(self) -> bool:
        """Whether what has the bits of poison is known to be a NaN that was read or computed."""
        return self.reads_foreign or self.computes_nan

    @property
    def counts_alone(self) -> bool:
        """Whether only counts of KV tokens are wrong: each element is within its limit, so no other limit helps."""
        return self.judgement.all_finite and self.judgement.worst is None

    @property
    def can_be_asked(self) -> bool:
        """Whether asking of other KV tokens tells anything: of wrong, finite, eager results and no long request."""
        judgement = self.judgement
        asked = not self.schedule.case.head_maps and max(self.lens, default=0) <= LONGEST
        wrong = judgement.all_finite and not judgement.right and judgement.worst is not None
        return asked and wrong and not self.in_graph

    def near(self, supposed: Supposed) -> torch.Tensor:
        """[L, T, Hq] bool: which heads of rows are what the supposed backend gives."""
        schedule, given = self.schedule, supposed.as_given
        if given is None:
            given = schedule.new_rows_as_given and not self.step.stored
        if supposed.products:
            schedule = schedule.with_numerics(matmul_dtype=supposed.products)
        if supposed.q_scale:
            schedule = schedule.with_numerics(q_scale=supposed.q_scale)
        want, limit = attend_with_limit(schedule, supposed.data or self.expected.data, given, supposed.layers)
        out = self.judgement.out.double()
        # Of a row that sees no KV token the oracle has NaN, and a backend 0.
        return (((out - want.out).abs() <= limit) | (want.out.isnan() & (out == 0))).all(-1)

    def right_for(self, supposed: Supposed) -> bool:
        """Whether every wrong row of a layer is what the supposed backend gives, or every row."""
        near = self.near(supposed).all(-1)
        return bool((near if supposed.every_row else near[self.judgement.wrong.flatten(2).any(-1)]).all())


def places_of(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of each flat row: its request, its number there, and how many rows that request has."""
    return [(b, i, n) for b, n in enumerate(counts) for i in range(n)]
