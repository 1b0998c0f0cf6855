"""Differences between replays of a case, in addition to lengths and data: order of slots, contents of padding, data.

A replay costs a tenth of a capture, so one capture is replayed with every layout and every padding, whichever the case
names, and with data that reveal a wrong key, even if the case's data do not. The first two steps follow the case: an
eager run has the first, and a failure in them depends on nothing else.
"""

from __future__ import annotations

from ..cases.features.data_pattern import DATA, REVEALING
from ..cases.features.padding import PADDINGS
from ..cases.features.slot_order import LAYOUTS
from ..cases.fields import Fields

_AS_NAMED = 2
"""Number of steps that follow the case id."""
# Shared pages and rows that are filled up with live requests are decisions about whole steps.
_LAYOUTS = tuple(layout for layout in LAYOUTS if layout != "shared")
_PADDINGS = tuple(padding for padding in PADDINGS if padding != "small")


def data_at(case: Fields, index: int) -> str:
    """Data pattern of step ``index``. Patterns that are made for a magnitude, or that count keys, are kept."""
    if case.data not in DATA or index < _AS_NAMED:
        return case.data
    values = (case.data, *(data for data in REVEALING if data != case.data))
    return _turned(values, case.data, index, backwards=case.derived("data-turns") == 1)


def layout_at(case: Fields, index: int) -> str:
    """Order of slots in step ``index``; a shared layout stays one."""
    if case.layout not in _LAYOUTS or index < _AS_NAMED:
        return case.layout
    return _turned(_LAYOUTS, case.layout, index, backwards=case.derived("layout-turns") == 1)


def padding_at(case: Fields, index: int) -> str:
    """Contents of the rows after the live ones of step ``index``; ``small`` has no such rows and is kept."""
    if case.padding not in _PADDINGS or index < _AS_NAMED:
        return case.padding
    return _turned(_PADDINGS, case.padding, index, backwards=case.derived("padding-turns") == 1)


def _turned(values: tuple[str, ...], named: str, index: int, *, backwards: bool) -> str:
    turns = index - _AS_NAMED + 1
    return values[(values.index(named) + (-turns if backwards else turns)) % len(values)]
