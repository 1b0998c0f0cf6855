"""The decays with which a case of states is right, and what they say about the cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from attn_testkit.diagnosis.hints.states import decays_that_are_right


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
    listed, _, others = found.partition(", wrong with ")
    assert all(each in listed for each in right)
    assert "mild_decay" in others


def test_without_a_right_pattern_and_with_a_single_odd_one_nothing_is_said() -> None:
    assert hint_if_right_with() == ""
    assert hint_if_right_with("unit_keys") == ""
