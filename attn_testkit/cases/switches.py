"""Batches on both sides of the sizes at which a backend says that its kernel changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..contract import Capabilities
from .case import Case

__all__ = ["switch_cases"]

_LENS = (9, 70, 1, 33)
"""Keys of the requests, by turns: several splits, and none."""


def switch_cases(claims: Capabilities, small: Case) -> Iterator[Case]:
    """Made of ``small``, a case with as little work for each row as is claimed. The graph is as large as the batch."""
    for bs in sorted({size for at in claims.kernel_changes_at for size in (at - 1, at)}):
        lens = tuple(_LENS[i % len(_LENS)] for i in range(bs))
        yield replace(small, prefixes=lens, new=small.new[:1] * bs, data="gauss", bucket=bs)
