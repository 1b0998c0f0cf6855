"""Cases of one KV head with one query head, as on a rank of a small model, and of three KV heads, as in SmolLM2-135M:
several heads, but no power of two.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case, Heads
from ..contract import Capabilities

_KV_HEADS = 3
_LENS = (9, 70)


def one_head_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases of one head, if ``mha`` is declared; derived from ``small``, a case with little work for each row."""
    if "mha" in declared.heads.families:
        head_dim = min(declared.heads.head_dims) if small.heads.layout.values_in_keys else small.head_dim
        yield small.of_requests(_LENS, padded=1).with_changes(
            heads=Heads("mha", 1, 1), head_dim=head_dim, rope_dim=0, data="gauss"
        )


def three_kv_heads_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases of the smallest declared group; derived from ``small``, a case with little work for each row."""
    groups = sorted(declared.heads.gqa_ratios - {1}) if "gqa" in declared.heads.families else []
    if not groups and "mha" not in declared.heads.families:
        return
    family, group = ("gqa", groups[0]) if groups else ("mha", 1)
    head_dim = min(declared.heads.head_dims) if small.heads.layout.values_in_keys else small.head_dim
    yield small.of_requests(_LENS, padded=1).with_changes(
        heads=Heads(family, group * _KV_HEADS, _KV_HEADS), head_dim=head_dim, rope_dim=0, data="gauss"
    )
