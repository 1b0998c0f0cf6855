"""Declared values that a list of cases tries, counted from the cases themselves.

A case tries a value if a backend that is wrong at this value fails the case: a page size by a request of more than one
page, a number of query rows by a request of that many. Each mode has to try a value, because kernels are chosen by
mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..cases.case import Case
from ..cases.features.data_pattern import EQUAL_LOGITS
from ..cases.features.feature import Covered, Without
from ..cases.features.feature import Value as Value
from ..cases.features.table import FEATURES
from ..contract import Capabilities, ForwardMode


def _bounds_with_cases_first(covered: Covered) -> bool:
    return not covered.bound or isinstance(covered.make, Without)


DECLARED_VALUES: Mapping[str, Covered] = {
    covered.name: covered
    for covered in sorted(
        (covered for feature in FEATURES for covered in feature.covered), key=_bounds_with_cases_first
    )
}
"""Name -> kind of declared value, in the order in which they are checked and get small cases
(``catalogue/cases_for_uncovered.py``): numbers of rows first, so that wide groups join the case with the most rows."""


def is_tried(covered: Covered, declared: Capabilities, case: Case, value: Value) -> bool:
    """True if ``case`` tries ``value``. Data that show no error of a query or a key try nothing."""
    return case.data not in EQUAL_LOGITS and covered.covers(covered.tried(declared, case), value)


def not_covered(declared: Capabilities, mode: ForwardMode, cases: Sequence[Case]) -> list[tuple[str, Value]]:
    """Declared values that none of ``cases`` tries in ``mode``: names of ``DECLARED_VALUES`` and values, sorted.

    ``cases`` of other modes are ignored. For an undeclared mode the result is empty.
    """
    if mode not in declared.eager | declared.graph:
        return []
    own = [case for case in cases if case.mode is mode and case.data not in EQUAL_LOGITS]
    lacking: list[tuple[str, Value]] = []
    for name, capability in DECLARED_VALUES.items():
        # Hundreds of cases try a few values, and hundreds are declared.
        found = {capability.tried(declared, case) for case in own}
        values = sorted(capability.declared(declared, mode), key=_order)
        lacking += [(name, value) for value in values if not any(capability.covers(one, value) for one in found)]
    return lacking


def describe_not_covered(
    declared: Capabilities, modes: Sequence[ForwardMode], cases: Sequence[Case], each: bool = False
) -> tuple[str, ...]:
    """Values that ``not_covered`` finds in ``modes``, in words: one phrase for the values of a capability that are
    missing in the same modes. ``each``: only capabilities of which every value is tried, without bounds and ranges of
    numbers."""
    lacking: dict[tuple[str, Value | None], list[ForwardMode]] = {}
    for mode in modes:
        own = [case for case in cases if case.mode is mode]
        for name, value in not_covered(declared, mode, own):
            if each and (DECLARED_VALUES[name].bound or DECLARED_VALUES[name].sampled):
                continue
            lacking.setdefault(_words(declared, DECLARED_VALUES[name], value, own), []).append(mode)
    phrases: dict[tuple[str, tuple[ForwardMode, ...]], list[Value]] = {}
    for (words, one), where in lacking.items():
        phrases.setdefault((words, tuple(where)), []).extend([] if one is None else [one])
    return tuple(
        " ".join(filter(None, (words, _listed(values))))
        + ("" if len(where) == len(modes) else f" ({', '.join(where)})")
        for (words, where), values in phrases.items()
    )


def _words(declared: Capabilities, capability: Covered, value: Value, own: Sequence[Case]) -> tuple[str, Value | None]:
    """The missing value in words, and the value itself if others may be listed with it."""
    if not capability.bound:
        return capability.words, value
    numbers = (capability.tried(declared, case) for case in own if case.data not in EQUAL_LOGITS)
    most = max((number for number in numbers if isinstance(number, int)), default=0)
    return f"more than {most:,} of {value:,} {capability.words}", None


def _listed(values: Sequence[Value]) -> str:
    """``2, 4-7, 16``: three or more consecutive numbers are a range."""
    runs: list[list[Value]] = []
    for value in values:
        last = runs[-1][-1] if runs else None
        if isinstance(value, int) and isinstance(last, int) and value == last + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(_spelled, run) for run in runs)
    return ", ".join(part for group in parts for part in group)


def _spelled(value: Value) -> str:
    return " with ".join(value) if isinstance(value, tuple) else str(value)


def _order(value: Value) -> tuple[int, str]:
    return (value, "") if isinstance(value, int) else (0, _spelled(value))
