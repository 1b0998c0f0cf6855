"""Target-verify where a server has no trees: lengths that count the new tokens, and chains that come without links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...contract import Capabilities, ForwardMode
from ..fields import C, Fields
from ..rows import Verify
from ..trees import chain
from .way import Way

__all__ = ["BARE", "WITH_NEW"]

_LENS = (9, 70, 1)


def _verify(claims: Capabilities, small: C) -> C:
    rows = min(4, claims.max_q_rows)
    return small.of_requests(_LENS, padded=1, rows=Verify(chain(rows)), data="gauss")


def _fits_with_new(claims: Capabilities, case: Fields) -> bool:
    return case.mode is ForwardMode.TARGET_VERIFY and set(claims.server.verify_lens) > {"all"}


def _fits_bare(claims: Capabilities, case: Fields) -> bool:
    return claims.server.takes_bare_chains and case.tree is not None and case.tree == chain(len(case.tree))


def _with_new(claims: Capabilities, small: C) -> Iterator[C]:
    if _fits_with_new(claims, small):
        yield replace(_verify(claims, small), variants=frozenset({"withnew"}))


def _bare(claims: Capabilities, small: C) -> Iterator[C]:
    if small.mode is ForwardMode.TARGET_VERIFY and claims.server.takes_bare_chains:
        yield replace(_verify(claims, small), variants=frozenset({"bare"}))


WITH_NEW = Way(
    "withnew",
    "seq_lens of target-verify count the step's own tokens",
    "server.verify_lens",
    _with_new,
    _fits_with_new,
    says={"verify_lens": "all"},
)
BARE = Way(
    "bare",
    "a chain is verified without a tree: no custom_mask and no retrieve_*",
    "server.takes_bare_chains",
    _bare,
    _fits_bare,
    gives_none=True,
)
