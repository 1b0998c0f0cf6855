"""A large batch of long requests for whoever claims batch invariance: where a sum is split shows in no short one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..contract import Capabilities
from .case import Case
from .layers import Layers

__all__ = ["company_cases"]

_PREFIXES, _OF_EACH = (3, 40, 77, 114, 151, 188), 11
"""Of up to a few tiles, in more than 64 requests."""
_BY_BITS = ("fp32", "fp16", "bf16")
"""An output of more bits shows a sum of another order more often."""


def company_cases(claims: Capabilities, small: Case) -> Iterator[Case]:
    """More requests than kernels for few take, with keys of several tiles each (pegainfer #623). Made of ``small``."""
    if not claims.batch_invariant:
        return
    prefixes = tuple(prefix for prefix in _PREFIXES for _ in range(_OF_EACH))
    yield replace(
        small,
        dtype=next(dtype for dtype in _BY_BITS if dtype in claims.dtypes),
        prefixes=prefixes,
        new=small.new[:1] * len(prefixes),
        layers=Layers(1),
        data="gauss",
        layout="shuffled",
        bucket=len(prefixes),
    )
