"""The step of a case that is like the wrong one but for one thing: is it right?

A changed case has other slots, other numbers and other choices. So each answer is that of several draws: without the
change all of them have to be wrong, and with it all of them right, or nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from ..cases.case import Case
from ..cases.layers import PERIOD, Layers
from ..cases.numerics import Numerics
from ..cases.schedule import Schedule, make_schedule
from ..checks import Judgement
from ..contract import ForwardMode
from ..oracle.expect import expect
from .rerun import Rerunner

__all__ = ["FEATURES", "ChangedCases", "most_rows", "with_keys_up_to"]

DRAWS = 3
"""Other draws of a case that are asked, each with numbers and choices of its own."""
_LONGEST = 8192
"""KV tokens of a request up to which other cases are asked: each costs an answer of the oracle."""
_MOST_REQUESTS = 64
"""Requests of a batch up to which they are."""
_SHORT = 16
"""No kernel's tile of keys is smaller."""

FEATURES: dict[str, Callable[[Case], Case]] = {
    "cap": lambda case: replace(case, logit_cap=0.0),
    "sinks": lambda case: replace(case, sinks=False),
    "fp8": lambda case: replace(case, kv_dtype="same"),
    "window": lambda case: replace(case, window=-1, layer_windows="any"),
    "data": lambda case: replace(case, data="gauss"),
    "counts": lambda case: (
        replace(case, rows=case.rows.counted((most_rows(case),) * case.bs)) if case.mode.is_ragged() else case
    ),
    "layers": lambda case: replace(case, layers=Layers()) if case.layers.count > PERIOD else case,
    "shapes": lambda case: replace(case, layers=replace(case.layers, shapes=())),
    "groups": lambda case: replace(case, layers=replace(case.layers, groups=False)),
    "far": lambda case: replace(case, variants=case.variants - {"far"}),
    "big pool": lambda case: replace(case, variants=case.variants - {"bigpool"}),
}
"""Name -> the case without that; an equal one where it has none of it."""


def most_rows(case: Case) -> int:
    """New rows of a request for which a padded layout of a ragged step has room."""
    return max(case.new) if case.mode is ForwardMode.EXTEND else case.width


class ChangedCases:
    """Asks a backend for eager first steps of other cases. Each question is put once, when somebody wants to know."""

    def __init__(self, rerunner: Rerunner, schedule: Schedule) -> None:
        self._rerunner, self._schedule = rerunner, schedule

    @cached_property
    def lasting(self) -> bool:
        """Whether the case can be asked about, and is wrong with other numbers, slots and choices too."""
        case, step = self._schedule.case, self._schedule.steps[0]
        plain = case.host is None and not case.mixed and not case.rounds and step.chunk_of is None
        if not plain or not step.requests or max(step.lens) > _LONGEST or step.bs > _MOST_REQUESTS:
            return False
        return self._all_are(case, right=False)

    def right_without(self, feature: str) -> bool:
        """Whether the case is right without a feature (one of ``FEATURES``) and wrong with it. False without it."""
        case = self._schedule.case
        try:
            without = FEATURES[feature](case)
        except ValueError:
            return False  # there is no such case
        return without != case and self.lasting and self._all_are(without, right=True)

    @cached_property
    def right_with_fewer(self) -> bool:
        """Whether the case is right without its last request, where another one has as many tokens as that."""
        case = self._schedule.case
        lens = list(zip(case.prefixes, case.new or (0,) * case.bs, strict=True))
        if lens[-1] not in lens[:-1]:
            return False
        fewer = replace(case, prefixes=case.prefixes[:-1], rows=case.rows.counted(case.new[:-1]))
        return self.lasting and self._all_are(fewer, right=True)

    @cached_property
    def right_up_to(self) -> int:
        """The most KV tokens of a request with which the case is right, where it is wrong from one more on; else 0.

        Requests that have more are cut to as many. Nothing below a tile counts.
        """
        return self._right_up_to(self._schedule.case)

    @cached_property
    def right_up_to_without_sinks(self) -> int:
        """The same without sinks, where a case with sinks is wrong for any number of KV tokens; else 0."""
        case = self._schedule.case
        if not case.sinks or not self.lasting or self._right_at(case, _SHORT):
            return 0
        bare = replace(case, sinks=False)
        return self._right_up_to(bare) if self._all_are(bare, right=False) else 0

    def _right_up_to(self, case: Case) -> int:
        longest = max(self._schedule.steps[0].lens)
        if case.draft or case.chunks > 1 or longest <= _SHORT or not self.lasting:
            return 0
        right, wrong = _SHORT, longest
        if not self._right_at(case, right):
            return 0
        while wrong - right > 1:
            middle = (right + wrong) // 2
            right, wrong = (middle, wrong) if self._right_at(case, middle) else (right, middle)
        # Where whole tiles or pages are right again, the number of tokens is not what counts.
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
        """None: the case is not claimed, or the backend raises."""
        own = self._schedule
        if not self._rerunner.claims(case):
            return None
        # What is said of products and new rows beside an FP8 pool holds for that alone.
        alike = case.kv_dtype == own.case.kv_dtype
        schedule = make_schedule(case, own.numerics if alike else Numerics(lse_dtype=own.lse_dtype))
        step = schedule.steps[0]
        seen = self._rerunner.eager(schedule, step)
        return None if seen is None else Judgement(seen, expect(schedule, step)).right


def with_keys_up_to(case: Case, most: int) -> Case | None:
    """The case with no request of more KV tokens. None where new tokens alone are more."""
    extends = case.mode is ForwardMode.EXTEND
    counts = case.new if case.mode.is_ragged() else (case.width,) * case.bs
    if extends:
        counts = tuple(min(count, most) for count in counts)
    if max(counts) > most:
        return None
    prefixes = tuple(min(prefix, most - count) for prefix, count in zip(case.prefixes, counts, strict=True))
    return replace(case, prefixes=prefixes, rows=case.rows.counted(counts) if extends else case.rows)
