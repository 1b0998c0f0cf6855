"""Padded requests that have neither rows nor keys."""

from __future__ import annotations

from collections.abc import Iterator

from ...contract import Capabilities
from ..fields import C, Fields
from .way import Way

__all__ = ["NO_ROWS"]

_LENS = (9, 70, 1)


def _fits(claims: Capabilities, case: Fields) -> bool:
    return case.mode in claims.graph and set(claims.server.padded_requests) > {"nothing"}


def _cases(claims: Capabilities, small: C) -> Iterator[C]:
    if _fits(claims, small):
        yield small.of_requests(_LENS, padded=3, data="gauss", variants=frozenset({"norows"}))


NO_ROWS = Way(
    "norows",
    "padded requests have neither rows nor keys",
    "server.padded_requests",
    _cases,
    _fits,
    says={"padded_requests": "nothing"},
    reaches_kernels=False,
)
