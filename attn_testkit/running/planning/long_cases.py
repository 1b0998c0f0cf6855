"""Estimates of how long cases take: rough efforts, and cases named by hand that take minutes on a CPU."""

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


_SMALL = 1e6
"""Products that take as long as the rest of a case-run; near the best in runs of core on an H200."""


def effort_of(case: Case) -> float:
    """Rough time of a case, where 1 is that of a very small one."""
    rows = case.new or (case.width,) * case.bs
    layers, heads, width = case.layers.count, case.heads, case.head_dim
    if case.state is not None:
        return 1 + layers * sum(rows) * heads.q_heads * width * 2 * case.state.k_dim / _SMALL
    pairs = sum(new * (keys + new) for keys, new in zip(case.prefixes, rows, strict=True))
    stored = sum(case.prefixes) + sum(rows)
    return 1 + layers * width * (2 * pairs * heads.q_heads + 8 * stored * heads.kv_heads) / _SMALL


def long_cases(cases: Iterable[Case]) -> tuple[str, ...]:
    """One sentence per case that takes minutes on a CPU."""
    return tuple(
        f"{case.id} has {products_of(case) / 1e6:,.0f} million products of a query row and a key in a step, which may "
        "take minutes on a CPU"
        for case in cases
        if products_of(case) > MOST_PRODUCTS
    )
