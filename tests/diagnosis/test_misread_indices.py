"""Indices of a selection that are looked up in the wrong way: named where the numbers show it, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from in_process import check_backend
from wrong_steps import observed

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.diagnosis.hints import Evidence
from attn_testkit.diagnosis.questions import Asked, ask
from attn_testkit.families.expected import expect
from attn_testkit.families.sparse.misread_indices import _walked, supposed_of_slots
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.s_selected_keys import (
    CountOfKeysFromLengths,
    LengthsNotClippedToTopK,
    MinusOneClampedToSlotZero,
    PositionsTakenForSlots,
    SelectionIgnored,
    SelectionOfTheRowBefore,
    SlotsTakenForPositions,
    SortedSelectionAssumed,
    StaleIndicesBehindTheCount,
)
from attn_testkit_corpus.faults.s_selected_rows import BatchOffsetAddedTwice, LanesBehindTheKeysScoreZero

DECODE = "decode-mqa4-d64-bf16-p16-k40.9.100-shuffled-gauss-sel16-b4prod"
VERIFY = "target-verify-mqa4-d64-bf16-p16-k40.9.100-chain4-shuffled-gauss-sel16{}-b4prod"
EXTEND = "extend-mqa4-d64-bf16-p16-k40.9-n20a30.10-chunks2-shuffled-gauss-sel16{}-b3prod"
MLA = "draft-extend-v2-mla16-d64r32-bf16-p16-k40.9-n4a4.2-shuffled-gauss-sel16{}-b2prod"

NAMED = (
    "of the row before",
    "of the row after",
    "used as slots",
    "slots already",
    "not clipped to top-k",
    "in a row of `selected` is",
    "min(top-k, keys)",
)


def hint_of(backend: type, case_id: str) -> str:
    found = check_backend(backend, device="cpu", cases=[case_id], executions=["eager"])
    return next(each.findings for each in found if each.case)[0].hint


@pytest.mark.parametrize(
    ("backend", "case_id", "named"),
    [
        (PositionsTakenForSlots, VERIFY.format(""), "used as slots"),
        (SlotsTakenForPositions, VERIFY.format("slots"), "slots already"),
        (SlotsTakenForPositions, MLA.format("slotsholes"), "slots already"),
        (LengthsNotClippedToTopK, DECODE, "not clipped to top-k: a row walks as many indices"),
        (LengthsNotClippedToTopK, EXTEND.format("holes"), "those after its 16 are the next row's"),
        (SelectionOfTheRowBefore, DECODE, "a row uses the selection of the row before it"),
        (SelectionOfTheRowBefore, VERIFY.format(""), "a row uses the selection of the row before it"),
        (
            CountOfKeysFromLengths,
            VERIFY.format(""),
            "min(top-k, keys) indices, so -1 among them is attended to as key 0",
        ),
    ],
)
def test_an_index_that_is_looked_up_wrongly_is_named_and_nothing_else_of_it(
    backend: type, case_id: str, named: str
) -> None:
    hint = hint_of(backend, case_id)
    assert named in hint
    assert sum(words in hint for words in NAMED) == 1


@pytest.mark.parametrize(
    ("backend", "case_id"),
    [
        (BatchOffsetAddedTwice, VERIFY.format("")),
        (LanesBehindTheKeysScoreZero, VERIFY.format("")),
        (MinusOneClampedToSlotZero, DECODE),
        (SelectionIgnored, VERIFY.format("")),
        (SortedSelectionAssumed, MLA.format("holes")),
        (StaleIndicesBehindTheCount, DECODE.replace("sel16", "sel16holes")),
        # Positions of this case are slots of page 0 or of nobody: zeros, which many mistakes give.
        (PositionsTakenForSlots, MLA.format("")),
    ],
)
def test_other_mistakes_are_not_taken_for_a_wrong_look_up(backend: type, case_id: str) -> None:
    assert not any(words in hint_of(backend, case_id) for words in NAMED)


class _Answers:
    """A backend that gives the same output whenever it is asked, and raises with the data of a probe."""

    grids: frozenset[tuple[str, tuple[int, ...]]] = frozenset()

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def eager(self, schedule, step, *, unowned, pattern=None):
        assert unowned == 0.0
        return observed(schedule, self.out) if pattern is None else None


def asked_about(case_id: str, change) -> str:
    """What is reported of a first step that is ``change(expected, supposed answers by text)``."""
    schedule = make_schedule(parse_case(case_id))
    expected = expect(schedule, schedule.steps[0])
    answers = {each.text: each.answer for each in supposed_of_slots(schedule, expected.data, schedule.steps[0])}
    out = change(expected.attention.clone(), answers).nan_to_num(nan=0.0)
    evidence = Evidence(schedule, Comparison(observed(schedule, out), expected), None, [], in_graph=False)
    return "\n".join(ask(Asked(evidence, _Answers(out), in_graph=False)).texts)  # type: ignore[arg-type]


def _as_slots(answers):
    return next(answer for text, answer in answers.items() if "used as slots" in text).out


def test_every_row_of_a_wrong_layer_has_to_be_right_for_the_mistake_and_two_rows_have_to_be_wrong() -> None:
    def all_rows(out, answers):
        return _as_slots(answers)

    def one_layer(out, answers):
        out[0] = _as_slots(answers)[0]
        return out

    def but_one_row(out, answers):
        mistaken = _as_slots(answers).clone()
        mistaken[:, 3] = out[:, 3]
        return mistaken

    def other_number(out, answers):
        mistaken = _as_slots(answers).clone()
        mistaken[0, 1, 0, 0] += 1.0
        return mistaken

    case_id = VERIFY.format("")
    assert "used as slots" in asked_about(case_id, all_rows)
    assert "used as slots" in asked_about(case_id, one_layer)
    assert asked_about(case_id, but_one_row) == ""
    assert asked_about(case_id, other_number) == ""
    # One request of one row, which no layer but the first has wrong.
    assert asked_about("decode-mqa4-d64-bf16-p1-k70-shuffled-gauss-sel16-b1prod", one_layer) == ""


def test_two_mistakes_that_give_the_same_numbers_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_testkit.diagnosis import questions
    from attn_testkit.families.family import Supposition

    real = questions.family_of

    def with_another(text: str):
        def family(case):
            def twice(*asked):
                yield from (found := list(supposed_of_slots(*asked)))
                yield from (Supposition(text or each.text, each.answer) for each in found)

            own = real(case)
            return SimpleNamespace(
                supposed_of_slots=twice, supposed=own.supposed, questions=frozenset(), unread=own.unread,
                with_unread_finite=own.with_unread_finite,
            )  # fmt: skip

        return family

    monkeypatch.setattr(questions, "family_of", with_another(""))
    assert "used as slots" in asked_about(VERIFY.format(""), lambda out, answers: _as_slots(answers))
    monkeypatch.setattr(questions, "family_of", with_another("another mistake"))
    assert asked_about(VERIFY.format(""), lambda out, answers: _as_slots(answers)) == ""


def test_a_walk_of_as_many_indices_as_a_row_has_keys_ends_behind_the_last_row() -> None:
    selected = torch.tensor([[[10, 11], [12, -1], [14, 15]]])
    walked = _walked(selected, torch.tensor([[3], [1], [3]]))
    assert walked.tolist() == [[[10, 11, 12], [12, -3, -3], [14, 15, -2]]]


@pytest.mark.parametrize("words", ["gauss-sel4of16", "gauss-sel16-idx4"])
def test_cases_whose_indices_are_blocks_or_the_backend_s_own_ask_nothing(words: str) -> None:
    schedule = make_schedule(parse_case(f"decode-mqa4-d64-bf16-p16-k40.9-shuffled-{words}-b4prod"))
    assert list(supposed_of_slots(schedule, expect(schedule, schedule.steps[0]).data, schedule.steps[0])) == []
