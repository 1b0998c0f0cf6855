"""Experiments with cases that differ from the wrong one in one feature.

A changed case has different slots, values and derived parameters. So each answer needs several draws: without the
change all of them must be wrong, and with it all of them right, or nothing is reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from ..cases.case import Case
from ..cases.derived_parameters import address_varies
from ..cases.layers import PERIOD, Layers
from ..checks import Comparison
from ..contract import ForwardMode
from ..families.expected import expect
from ..steps.numerics import Numerics
from ..steps.schedule import Schedule, Step, make_schedule
from .rerun import Rerunner

DRAWS = 3
"""Number of other draws of a case, each with its own values and derived parameters."""
_LONGEST = 8192
"""Most KV tokens of a request for which other cases are run: each needs a run of the oracle."""
_MOST_REQUESTS = 64
"""Most requests of a batch for which other cases are run."""
_SHORT = 16
"""Smallest tile of keys of any kernel."""

_PAGES = (1, 16, 32, 64, 128, 256)
"""Page sizes of servers."""
_FEW = 2
"""Fewest other page sizes that have to be wrong, so that one which is right is not right by chance."""

_CHANGES: dict[str, Callable[[Case], Case]] = {
    "cap": lambda case: case.with_changes(logit_cap=0.0),
    "sinks": lambda case: case.with_changes(sinks=False),
    "fp8": lambda case: case.with_changes(kv_dtype="same"),
    "layout": lambda case: case.with_changes(kv_layout="nhd"),
    "holes": lambda case: (
        case.with_changes(selection=replace(case.selection, holes=False)) if case.selection is not None else case
    ),
    "window": lambda case: case.with_changes(window=-1, layer_windows="any", non_causal_window="none"),
    "data": lambda case: case.with_changes(data="gauss"),
    "counts": lambda case: (
        case.with_changes(rows=case.rows.counted((most_rows(case),) * case.bs)) if case.mode.is_ragged() else case
    ),
    "layers": lambda case: case.with_changes(layers=Layers()) if case.layers.count > PERIOD else case,
    "shapes": lambda case: case.with_changes(layers=replace(case.layers, shapes=())),
    "groups": lambda case: case.with_changes(layers=replace(case.layers, groups=False)),
    "far": lambda case: case.with_changes(variants=case.variants - {"far"}),
    "big pool": lambda case: case.with_changes(variants=case.variants - {"bigpool"}),
}


def _if_possible(change: Callable[[Case], Case]) -> Callable[[Case], Case]:
    def changed(case: Case) -> Case:
        try:
            return change(case)
        except ValueError:
            return case

    return changed


FEATURES: dict[str, Callable[[Case], Case]] = {name: _if_possible(change) for name, change in _CHANGES.items()}
"""Name -> the case without that feature; an equal case if it does not have it, or if another feature needs it."""


def most_rows(case: Case) -> int:
    """Number of new rows per request for which a padded layout of a ragged step has room."""
    return max(case.new) if case.mode is ForwardMode.EXTEND else case.width


class ChangedCases:
    """Runs of eager first steps of other cases. Each is run once, on demand."""

    def __init__(self, rerunner: Rerunner, schedule: Schedule, *, right: int = 0, wrong: int = 0) -> None:
        """``right``, ``wrong``: KV tokens of the longest request that is right in the wrong step, and of the shortest
        one that is wrong; 0 for none.
        """
        self._rerunner, self._schedule = rerunner, schedule
        self._seen = (right, wrong)

    @cached_property
    def lasting(self) -> bool:
        """True if the case can be examined, and is also wrong with other values, slots and derived parameters."""
        case = self._schedule.case
        plain = case.instance_of is None and not case.multi_mode and not case.rounds
        return plain and self._small and self._all_are(case, right=False)

    @property
    def _small(self) -> bool:
        """True if the first step of the case has requests, and so few that a run of the oracle is quick."""
        step = self._schedule.steps[0]
        return bool(step.requests) and max(step.lens) <= _LONGEST and step.bs <= _MOST_REQUESTS

    def right_without(self, feature: str) -> bool:
        """True if the case has a feature (one of ``FEATURES``), is wrong with it, and right without it."""
        case = self._schedule.case
        try:
            without = FEATURES[feature](case)
        except ValueError:
            return False  # such a case does not exist
        return without != case and self.lasting and self._all_are(without, right=True)

    def wrong_without(self, feature: str) -> bool:
        """True if the case has a feature (one of ``FEATURES``), and is wrong without it, too: the feature is not the
        cause."""
        try:
            without = FEATURES[feature](self._schedule.case)
        except ValueError:
            return False  # such a case does not exist
        return without != self._schedule.case and self._small and self._right(without) is False

    def right_with_data(self, data: str) -> bool | None:
        """True if each draw of the case is right with data of this pattern, False if one is wrong; None if unknown."""
        try:
            other = self._schedule.case.with_changes(data=data)
        except ValueError:
            return None  # such a case does not exist
        if not self.lasting:
            return None
        for draw in range(1, DRAWS + 1):
            if (answer := self._right(other.with_seed(other.seed + draw))) is not True:
                return answer
        return True

    @cached_property
    def only_right_page(self) -> int:
        """The only page size of those tried with which the case is right, if it is wrong with its own; else 0."""
        case, answers = self._schedule.case, dict[int, bool | None]()
        for page in _PAGES if self.lasting else ():
            if page == case.page_size:
                continue
            with contextlib.suppress(ValueError):  # such a case does not exist
                answers[page] = self._right(case.with_changes(page_size=page))
        right = [page for page, answer in answers.items() if answer]
        known = len(right) == 1 and list(answers.values()).count(False) >= _FEW
        return right[0] if known and self._all_are(case.with_changes(page_size=right[0]), right=True) else 0

    def right_elsewhere(self, step: Step) -> bool:
        """True if the pool crosses a multiple of 4 GiB, and ``step`` is wrong there but right elsewhere."""
        own = self._schedule
        if not address_varies(own.case) or not own.case.derived("pool-address"):
            return False
        runs = [self._rerunner.eager(own, step, pools_anywhere=each) for each in (True, False)]
        return [bool(run and Comparison(run, expect(own, step)).right) for run in runs] == [True, False]

    @cached_property
    def right_with_fewer(self) -> bool:
        """True if the case is right without its last request, and another request has as many tokens as that one."""
        case = self._schedule.case
        lens = list(zip(case.prefixes, case.new or (0,) * case.bs, strict=True))
        if lens[-1] not in lens[:-1]:
            return False
        fewer = case.with_changes(prefixes=case.prefixes[:-1], rows=case.rows.counted(case.new[:-1]))
        return self.lasting and self._all_are(fewer, right=True)

    @cached_property
    def right_up_to(self) -> int:
        """The most KV tokens per request with which the case is right, if it is wrong with one token more; else 0.
        Longer requests are cut to that number. Numbers below a tile are not tried.
        """
        return self._right_up_to(self._schedule.case, *self._seen)

    @cached_property
    def right_up_to_without_sinks(self) -> int:
        """Value of ``right_up_to`` without sinks, if the case is always wrong with sinks; else 0."""
        case = self._schedule.case
        if not case.sinks or not self.lasting or self._right_at(case, _SHORT):
            return 0
        bare = case.with_changes(sinks=False)
        return self._right_up_to(bare) if self._all_are(bare, right=False) else 0

    def _right_up_to(self, case: Case, seen_right: int = 0, seen_wrong: int = 0) -> int:
        longest = max(self._schedule.steps[0].lens)
        # A run may take seconds in an interpreter, and the requests of the wrong step bound the search.
        right, wrong = max(_SHORT, seen_right), min(longest, seen_wrong or longest)
        if case.draft or case.chunks > 1 or right >= wrong or not self.lasting:
            return 0
        if not self._right_at(case, right):
            return 0
        while wrong - right > 1:
            middle = (right + wrong) // 2
            right, wrong = (middle, wrong) if self._right_at(case, middle) else (right, middle)
        # If whole tiles or pages are right again, the number of tokens is not the cause.
        beyond = {min(2 * right, longest), (wrong + longest) // 2}
        if any(self._right_at(case, n) for n in beyond - {right}):
            return 0
        below, above = with_keys_up_to(case, right), with_keys_up_to(case, wrong)
        known = below and above and self._all_are(below, right=True) and self._all_are(above, right=False)
        return right if known else 0

    def _right_at(self, case: Case, keys: int) -> bool:
        cut = with_keys_up_to(case, keys)
        return cut is not None and self._right(cut) is True

    def _all_are(self, case: Case, *, right: bool) -> bool:
        return all(self._right(case.with_seed(case.seed + draw)) is right for draw in range(1, DRAWS + 1))

    def _right(self, case: Case) -> bool | None:
        """Run a case; None if it is not declared, or the backend raises."""
        own = self._schedule
        if not self._rerunner.declared(case):
            return None
        # The declared products and new rows of an FP8 pool apply only to such a pool.
        alike = case.kv_dtype == own.case.kv_dtype
        schedule = make_schedule(case, own.numerics if alike else Numerics(lse_dtype=own.lse_dtype))
        step = schedule.steps[0]
        seen = self._rerunner.eager(schedule, step)
        return None if seen is None else Comparison(seen, expect(schedule, step)).right


def with_keys_up_to(case: Case, most: int) -> Case | None:
    """The case with requests cut to this number of KV tokens. None if the new tokens of a request are more."""
    extends = case.mode is ForwardMode.EXTEND
    counts = case.new if case.mode.is_ragged() else (case.width,) * case.bs
    if extends:
        counts = tuple(min(count, most) for count in counts)
    if max(counts) > most:
        return None
    prefixes = tuple(min(prefix, most - count) for prefix, count in zip(case.prefixes, counts, strict=True))
    return case.with_changes(prefixes=prefixes, rows=case.rows.counted(counts) if extends else case.rows)
