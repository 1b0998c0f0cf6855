"""The plainest case of a mode: one request, and the least of everything that is claimed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..contract import Capabilities, ForwardMode
from .as_claimed import as_claimed
from .case import Case
from .dimensions.heads import smallest_heads_first
from .rows import minimal_rows

__all__ = ["plain_cases", "plainest_case"]

_FEW_KEYS, _SOME_KEYS = 5, 21


def plainest_case(claims: Capabilities, mode: ForwardMode) -> Case:
    """One request of no key before the step and of one row, and the least of every other claim. Raises ``ValueError``
    where the claims leave no head layout.
    """
    layouts = smallest_heads_first(claims)
    if not layouts:
        raise ValueError(f"{mode} is claimed, and no head layout with it")
    case = Case(
        rows=minimal_rows(mode),
        heads=layouts[0],
        head_dim=min(claims.head_dims),
        rope_dim=min(claims.mla_rope_dims) if layouts[0].layout.values_in_keys else 0,
        dtype=min(claims.dtypes),
        kv_dtype=max(claims.kv_dtypes),
        page_size=min(claims.page_sizes),
        prefixes=(0,),
        layout="contiguous",
    )
    return as_claimed(claims, case)


def plain_cases(claims: Capabilities, mode: ForwardMode) -> Iterator[Case]:
    """The plainest case, and what stands in for it where that one fails: the same with some keys before the step."""
    plainest = plainest_case(claims, mode)
    for keys in (*plainest.prefixes, _FEW_KEYS, _SOME_KEYS):
        yield replace(plainest, prefixes=(keys,))
