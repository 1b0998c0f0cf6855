"""Prompts of layers with states: the first wrong row and its chunk, and decays with which the result is right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attn_testkit.diagnosis.hints.states import decays_that_are_right, first_wrong_row


def hint_if_right_with(*right: str) -> str:
    """Hint for a case of mild decay that is right only with these patterns of data."""
    evidence = SimpleNamespace(
        schedule=SimpleNamespace(case=SimpleNamespace(data="mild_decay")),
        changed=SimpleNamespace(right_with_data=lambda data: data in right),
    )
    found = decays_that_are_right.find(cast(Any, evidence))
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize(
    ("right", "says"),
    [
        (("no_decay", "unit_keys", "strong_decay"), "right if the decay is exactly 1 or 0"),
        (("no_decay", "unit_keys"), "right if nothing decays, so a decay is wrong"),
        (("strong_decay",), "right if a token forgets all before it"),
        (("strong_decay", "unit_keys"), "only keys that are not orthogonal show it"),
    ],
)
def test_patterns_that_are_right_say_what_is_wrong(right: tuple[str, ...], says: str) -> None:
    found = hint_if_right_with(*right)
    assert says in found
    listed, _, others = found.partition(", and fails with ")
    assert all(each in listed for each in right)
    assert "mild_decay" in others


def test_data_of_gates_alone_say_that_a_product_of_decays_is_wrong() -> None:
    evidence = SimpleNamespace(
        schedule=SimpleNamespace(case=SimpleNamespace(data="exact_gates")),
        changed=SimpleNamespace(right_with_data=lambda data: True),
    )
    found = decays_that_are_right.find(cast(Any, evidence))
    assert "fails with exact_gates: only a row whose decay differs from those next to it" in found


def test_without_a_right_pattern_and_with_a_single_odd_one_nothing_is_said() -> None:
    assert hint_if_right_with() == ""
    assert hint_if_right_with("unit_keys") == ""


def test_if_no_other_data_can_be_tried_nothing_is_said() -> None:
    """Then no data are right, and only those of the case are wrong."""
    evidence = SimpleNamespace(
        schedule=SimpleNamespace(case=SimpleNamespace(data="like_keys")),
        changed=SimpleNamespace(right_with_data=lambda data: None),
    )
    assert decays_that_are_right.find(cast(Any, evidence)) == ""


def hint_of_rows(counts: list[int], wrong: list[tuple[int, int]]) -> str:
    """Hint for requests of so many rows, of which these pairs of a request and a row are wrong."""
    places = [(request, row) for request, count in enumerate(counts) for row in range(count)]
    evidence = SimpleNamespace(
        rows=[places.index(each) for each in wrong],
        expected=SimpleNamespace(
            data=SimpleNamespace(row_request=torch.tensor(places)[:, 0], row_offset=torch.tensor(places)[:, 1])
        ),
        step=SimpleNamespace(requests=[SimpleNamespace(new=count) for count in counts]),
    )
    found = first_wrong_row.find(cast(Any, evidence))
    assert isinstance(found, str)
    return found


def test_the_first_wrong_row_names_the_chunk_that_begins_there() -> None:
    second = [(1, 64), (1, 65)]
    assert "right up to row 63 and wrong from row 64 on, the first row of its second chunk" in hint_of_rows(
        [34, 70], second
    )
    assert hint_of_rows([70, 70], second) == "", "the other request has as many rows and is right"
    within = [(0, row) for row in range(2, 9)] + [(1, row) for row in range(2, 5)]
    assert "rows 0..1 of each request are right, and later rows are wrong" in hint_of_rows([9, 5, 1], within)
    assert hint_of_rows([9, 5], [(0, 0), (1, 3)]) == ""
