"""The minimal case of a mode: one request, and the least of everything that is declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..contract import Capabilities, ForwardMode
from .case import Case
from .dimensions.heads import smallest_heads_first
from .nearest_declared import nearest_declared
from .rows import minimal_rows

__all__ = ["minimal_case", "minimal_cases"]

_FEW_KEYS, _SOME_KEYS = 5, 21


def minimal_case(declared: Capabilities, mode: ForwardMode) -> Case:
    """One request of no key before the step and of one row, and the least of every other capability. Raises
    ``ValueError`` where the capabilities leave no head layout.
    """
    layouts = smallest_heads_first(declared)
    if not layouts:
        raise ValueError(f"{mode} is declared, and no head layout with it")
    case = Case(
        rows=minimal_rows(mode),
        heads=layouts[0],
        head_dim=min(declared.head_dims),
        rope_dim=min(declared.mla_rope_dims) if layouts[0].layout.values_in_keys else 0,
        dtype=min(declared.dtypes),
        kv_dtype=max(declared.kv_dtypes),
        page_size=min(declared.page_sizes),
        prefixes=(0,),
        layout="contiguous",
    )
    return nearest_declared(declared, case)


def minimal_cases(declared: Capabilities, mode: ForwardMode) -> Iterator[Case]:
    """The minimal case, and a replacement if that one fails: the same with some keys before the step."""
    minimal = minimal_case(declared, mode)
    for keys in (*minimal.prefixes, _FEW_KEYS, _SOME_KEYS):
        yield replace(minimal, prefixes=(keys,))
