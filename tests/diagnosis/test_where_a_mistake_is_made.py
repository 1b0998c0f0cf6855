"""Mistakes that a family supposes: the requests in which they are made, and answers within which anything fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.diagnosis.questions import _where_it_is_made
from attn_testkit.families.expected import expect
from attn_testkit.families.table import family_of
from attn_testkit.steps.schedule import make_schedule

LENS = torch.tensor([3, 9, 20, 40])


def made(wrong: list[bool], near: list[bool]) -> str | None:
    seen: Any = SimpleNamespace(wrong=torch.tensor(wrong).view(1, 4, 1, 1))
    return _where_it_is_made(seen, torch.tensor(near).view(1, 4), LENS)


@pytest.mark.parametrize(
    ("wrong", "near", "said"),
    [
        ([True] * 4, [True] * 4, ""),
        ([False, True, True, True], [True] * 4, ""),
        ([False, False, True, True], [False, False, True, True], ", in requests of 20 or more keys (requests of 9 or"),
        ([True, False, False, False], [True, False, False, True], ", in requests of 3 or fewer keys (requests of 9 or"),
        ([False, True, False, True], [False, True, False, True], None),
    ],
)
def test_right_requests_may_be_untouched_if_their_length_tells_them_apart(
    wrong: list[bool], near: list[bool], said: str | None
) -> None:
    found = made(wrong, near)
    assert (found is None) is (said is None)
    assert said is None or (found or "").startswith(said)
    assert bool(found) == bool(said)


SPARSE = make_schedule(
    parse_case("decode-mla16-d128r64-bf16-p16-k1.2.5.9.14.2.30-interleaved-shifted-sel16empty-b7prod")
)
STATES = make_schedule(
    parse_case("decode-gdn4x2-d64-bf16-p16-k3.1.12.7.2.20.5-shuffled-weak_decay-k64w4s32-layers1from0-b9prod")
)


def answers(schedule: Any) -> dict[str, torch.Tensor]:
    data = expect(schedule, schedule.steps[0]).data
    return {each.text: each.answer.out for each in family_of(schedule.case).supposed(schedule, data)}


def test_entries_that_count_in_the_denominator_make_outputs_smaller_and_no_row_longer() -> None:
    found = next(out for text, out in answers(SPARSE).items() if "entries of `selected` of -1 load zeros" in text)
    right = expect(SPARSE, SPARSE.steps[0]).attention
    known = found.isfinite() & right.isfinite()
    assert bool((found.abs() <= right.abs() + 1e-12)[known].all())
    assert not torch.equal(found[known], right[known])


def test_slots_of_others_give_their_state_and_their_window() -> None:
    texts = [text for text in answers(STATES) if text.startswith("a request uses the slots of")]
    assert len(texts) == 5
    own = next(out for text, out in answers(STATES).items() if "before it, and the first one its own" in text)
    right = expect(STATES, STATES.steps[0]).attention
    assert torch.equal(own[:, 0], right[:, 0]), "the first request has its own slot"
    assert not torch.allclose(own[:, 1:].nan_to_num(), right[:, 1:])
