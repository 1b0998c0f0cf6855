"""Padded requests that have neither rows nor keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...contract import Capabilities
from ..fields import C, Fields
from .way import Way

__all__ = ["NO_ROWS"]

_LENS = (9, 70, 1)


def _fits(claims: Capabilities, case: Fields) -> bool:
    return case.mode in claims.graph and set(claims.server.padded_requests) > {"nothing"}


def _cases(claims: Capabilities, small: C) -> Iterator[C]:
    if _fits(claims, small):
        yield replace(small, prefixes=_LENS, new=small.new[:1] * len(_LENS), data="gauss", bucket=6, way="norows")


NO_ROWS = Way(
    "norows",
    "padded requests have neither rows nor keys",
    "server.padded_requests",
    _cases,
    _fits,
    says={"padded_requests": "nothing"},
    reaches_kernels=False,
)
