"""More requests times heads, and more rows, than one side of a CUDA grid holds; as many keys as long contexts have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..contract import Capabilities, ForwardMode
from .case import Case, Heads
from .companions import many_heads
from .dimensions.rows import most_rows
from .extend import room_for
from .layers import Layers

__all__ = ["large_cases", "too_large_for_a_cpu"]

_GRID = 65_535
"""The largest y and z of a grid: a launch with more fails, and what it was to write stays as it was (sglang #34941)."""
_KEYS = 130_900
"""Of 131,072 tokens of context; the others are new ones."""
_MANY_HEADS, _MOST_HEADS = 32, 128
_ROWS = 65
_PREFIXES = (1, 3, 9)


def large_cases(claims: Capabilities, tier: str, small: Case) -> Iterator[Case]:
    """Made of ``small``, a case with little work for each row and key. From core on one of decode, all else in full."""
    one = replace(small, layers=Layers(1), layout="shuffled", data="gauss")
    mla = small.is_mla
    if tier == "full":
        long = replace(one, heads=many_heads(claims, small.heads, _MANY_HEADS), data="footprint")
        yield replace(long, prefixes=(_KEYS, 70), new=small.new[:1] * 2, bucket=2)
    # Rows of MLA have 576 numbers a head: minutes of comparing.
    if (tier == "full" or small.mode is ForwardMode.DECODE) and not mla:
        yield _beyond_a_grid(replace(one, heads=many_heads(claims, small.heads, _MOST_HEADS)))
    if tier == "full" and small.mode is ForwardMode.EXTEND and not mla:
        rows = min(_ROWS, most_rows(claims, small.mode))
        new = (rows,) * (_GRID // rows + 1)
        heads = Heads("mha", 1, 1) if "mha" in claims.families else small.heads
        yield replace(one, heads=heads, prefixes=(1,) * len(new), new=new, width=room_for(new), bucket=len(new))


def too_large_for_a_cpu(case: Case) -> bool:
    """Backends in torch and fakes hold every row against every key: 17 GB for each head."""
    return sum(case.new) > _GRID


def _beyond_a_grid(wide: Case) -> Case:
    """So many requests that with the query heads they are just more than a grid holds."""
    requests = _GRID // wide.heads.q_heads + 1
    lens = tuple(sorted((_PREFIXES * requests)[:requests]))
    return replace(wide, prefixes=lens, new=wide.new[:1] * requests, bucket=requests)
