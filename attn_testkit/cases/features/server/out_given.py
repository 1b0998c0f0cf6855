"""Outputs in memory that the caller gives."""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities
from ...fields import C, Fields
from .variant import ServerVariant

_LENS = (9, 70, 1)


def _fits(declared: Capabilities, case: Fields) -> bool:
    return declared.server.takes_out


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if _fits(declared, small):
        yield small.of_requests(_LENS, padded=1, data="gauss", variants=frozenset({"given_out"}))


OUT_GIVEN = ServerVariant(
    "given_out",
    "each forward gets out=, which it writes and returns",
    "server.takes_out",
    _cases,
    _fits,
    excludes={"KV splits": "forward_return_lse has no out=: each part has its own output, and they are merged"},
    order=50,
    also=("lent", "out="),
)
