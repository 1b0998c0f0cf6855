"""Covering arrays: each allowed combination stands in a row, and no row has two values that exclude each other."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from attn_testkit.catalogue.covering import Value, covering_array

SIZES = [
    (2, 2, 2),
    (1, 4, 1, 3),
    (5, 3, 2, 7),
    (2, 3, 4, 3, 2, 6),
    (1, 1, 1),
    (4, 4, 4, 4, 4, 4, 4),
    (2, 9, 2, 2, 3, 5, 1, 6),
    (3, 101, 2),
]


def has(row: list[int], pair: tuple[Value, Value]) -> bool:
    return all(row[column] == value for column, value in pair)


@pytest.mark.parametrize("strength", [2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_combination_stands_in_a_row(sizes: tuple[int, ...], strength: int) -> None:
    rows = covering_array(sizes, strength, "any")
    for columns in combinations(range(len(sizes)), strength):
        assert {tuple(row[i] for i in columns) for row in rows} == set(product(*(range(sizes[i]) for i in columns)))


@pytest.mark.parametrize(("sizes", "strength", "most"), [((4,) * 7, 2, 32), ((3,) * 6, 3, 54), ((7, 5, 5, 3), 2, 41)])
def test_rows_are_not_many_more_than_they_must_be(sizes: tuple[int, ...], strength: int, most: int) -> None:
    assert len(covering_array(sizes, strength, "any")) <= most


@pytest.mark.parametrize("strength", [2, 3])
def test_excluded_values_never_meet_and_all_others_do(strength: int) -> None:
    sizes = (3, 3, 2, 2, 4)
    excluded: list[tuple[Value, Value]] = [((0, 0), (1, 1)), ((0, 0), (1, 2)), ((2, 1), (3, 1)), ((3, 1), (4, 0))]
    rows = covering_array(sizes, strength, "any", excluded=excluded)
    assert not [row for row in rows if any(has(row, pair) for pair in excluded)]
    for columns in combinations(range(len(sizes)), strength):
        allowed = {
            values
            for values in product(*(range(sizes[i]) for i in columns))
            if not any(pair in excluded for pair in combinations(zip(columns, values, strict=True), 2))
        }
        assert {tuple(row[i] for i in columns) for row in rows} == allowed


def test_a_value_that_would_leave_a_column_without_any_is_left_out() -> None:
    """The first column's 1 excludes both values of the last, so no row can have it."""
    rows = covering_array((2, 2, 2), 2, "any", excluded=[((0, 1), (2, 0)), ((0, 1), (2, 1))])
    assert {row[0] for row in rows} == {0}
    assert {(row[1], row[2]) for row in rows} == set(product(range(2), repeat=2))


def test_further_columns_are_plain_in_the_first_rows_only() -> None:
    rows = covering_array((4, 4, 4, 2, 2), 2, "any", later={3, 4}, alone=5)
    assert [row[3:] for row in rows[:5]] == [[0, 0]] * 5
    for columns in combinations(range(5), 2):
        assert len({tuple(row[i] for i in columns) for row in rows}) == (4, 4, 4, 2, 2)[columns[0]] * (
            4, 4, 4, 2, 2)[columns[1]]  # fmt: skip


def test_a_column_that_meets_nothing_has_its_values_about_as_often_as_each_other_and_none_that_is_excluded() -> None:
    unpaired = [(0, 2), (1, 2)]
    rows = covering_array((4, 4, 3), 2, "any", unpaired, excluded=[((0, 1), (2, 1))])
    counts = [sum(row[2] == value for row in rows) for value in range(3)]
    assert max(counts) - min(counts) <= 1
    assert not [row for row in rows if row[0] == 1 and row[2] == 1]


def test_salts_give_other_rows() -> None:
    assert covering_array((5, 3, 2, 7), 2, "a") != covering_array((5, 3, 2, 7), 2, "b")
