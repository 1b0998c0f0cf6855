"""Covering arrays are covertable's own, row by row: what they are made of decides case ids."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from covertable import make
from covertable.sorters import hash as by_hash

from attn_testkit.catalogue.covering import covering_array

SIZES = [
    (2, 2, 2),
    (1, 4, 1, 3),
    (5, 3, 2, 7),
    (2, 3, 4, 3, 2, 6),
    (1, 1, 1),
    (7, 3, 3, 2, 5),
    (4, 4, 4, 4, 4, 4, 4),
    (2, 9, 2, 2, 3, 5, 1, 6),
    (3, 101, 2),
]


@pytest.mark.parametrize("strength", [2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_those_of_the_library(sizes: tuple[int, ...], strength: int) -> None:
    for salt in ("decode", "extend", "pairs"):
        theirs = make([list(range(size)) for size in sizes], strength=strength, sorter=by_hash, salt=salt)
        assert covering_array(sizes, strength, salt) == theirs


@pytest.mark.parametrize("strength", [2, 3])
def test_every_combination_stands_in_a_row(strength: int) -> None:
    sizes = (3, 4, 2, 5)
    rows = covering_array(sizes, strength, "any")
    for dimensions in combinations(range(len(sizes)), strength):
        met = {tuple(row[i] for i in dimensions) for row in rows}
        assert met == set(product(*(range(sizes[i]) for i in dimensions)))


def test_salts_give_other_rows() -> None:
    assert covering_array((5, 3, 2, 7), 2, "a") != covering_array((5, 3, 2, 7), 2, "b")
