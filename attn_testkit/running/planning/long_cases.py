"""Cases that were named by hand and take minutes on a CPU: the header reports them before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

from ...cases.case import Case

MOST_PRODUCTS = 1e8
"""Products of a query row and a key, over all heads and layers, that the oracle and a backend in torch compute on a CPU
in well under a minute."""


def products_of(case: Case) -> int:
    """Number of products of a query row and a key that one step of a case needs, over all heads and layers."""
    new = case.new or (1,) * case.bs
    pairs = sum(rows * (keys + rows) for keys, rows in zip(case.prefixes, new, strict=True))
    return pairs * case.heads.q_heads * case.layers.count


def long_cases(cases: Iterable[Case]) -> tuple[str, ...]:
    """One sentence per case that takes minutes on a CPU."""
    return tuple(
        f"{case.id} has {products_of(case) / 1e6:,.0f} million products of a query row and a key in a step, which may "
        "take minutes on a CPU"
        for case in cases
        if products_of(case) > MOST_PRODUCTS
    )
