"""Outputs in memory that the caller gives."""

from __future__ import annotations

from collections.abc import Iterator

from ...contract import Capabilities
from ..fields import C, Fields
from .way import Way

__all__ = ["LENT"]

_LENS = (9, 70, 1)


def _fits(claims: Capabilities, case: Fields) -> bool:
    return claims.server.takes_out


def _cases(claims: Capabilities, small: C) -> Iterator[C]:
    if _fits(claims, small):
        yield small.of_requests(_LENS, padded=1, data="gauss", variants=frozenset({"lent"}))


LENT = Way(
    "lent",
    "each forward is given out=, which it writes and returns",
    "server.takes_out",
    _cases,
    _fits,
    excludes={"KV splits": "forward_return_lse has no out=: each part has an output of its own, and they are merged"},
)
