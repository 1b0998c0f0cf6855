"""A case of one query head and one KV head, as a rank of a small model has them: half of a pair, and no group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..contract import Capabilities
from .case import Case, Heads

__all__ = ["one_head_cases"]


def one_head_cases(claims: Capabilities, small: Case) -> Iterator[Case]:
    """Where ``mha`` is claimed; made of ``small``, a case with little work for each row."""
    if "mha" in claims.families:
        two = (9, 70)
        head_dim = min(claims.head_dims) if small.is_mla else small.head_dim
        yield replace(
            small, heads=Heads("mha", 1, 1), head_dim=head_dim, rope_dim=0, prefixes=two,
            new=small.new[:1] * len(two), data="gauss", bucket=len(two) + 1,
        )  # fmt: skip
