"""The next step is planned before the device is done with this one: overlapping schedulers do so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...contract import Capabilities
from ..fields import C, Fields
from .way import Way

__all__ = ["AHEAD"]

_LENS = (9, 70, 1, 33)


def _fits(claims: Capabilities, case: Fields) -> bool:
    return claims.server.overlap_scheduling


def _cases(claims: Capabilities, small: C) -> Iterator[C]:
    if _fits(claims, small):
        new = small.new[:1] * len(_LENS)
        yield replace(small, prefixes=_LENS, new=new, layout="shuffled", data="gauss", bucket=5, way="ahead")


AHEAD = Way(
    "ahead",
    "the next step is planned while the device is still busy with this one",
    "server.overlap_scheduling",
    _cases,
    _fits,
)
