"""More rows than were planned: a server pads what the layers around attention are given, once the step is planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...contract import Capabilities, ForwardMode
from ..fields import C, Fields
from .way import Way

__all__ = ["MORE_ROWS"]

_LENS = (9, 70, 1)


def _fits(claims: Capabilities, case: Fields) -> bool:
    return claims.server.takes_more_rows and case.mode is not ForwardMode.DRAFT_DECODE


def _cases(claims: Capabilities, small: C) -> Iterator[C]:
    if _fits(claims, small):
        new = small.new[:1] * len(_LENS)
        yield replace(small, prefixes=_LENS, new=new, data="gauss", bucket=4, way="morerows")


MORE_ROWS = Way(
    "morerows", "each forward has rows of no request behind those of its plan", "server.takes_more_rows", _cases, _fits
)
