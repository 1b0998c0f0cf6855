"""How far back the cause of a failure is looked for, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attn_testkit.runner_modes.messages import RunCase

from attn_testkit.contract import Execution
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.running.case_runs.between_cases import MOST_PREDECESSORS, explained_by_what_was_kept

FAILED = CaseResult("m:A", "decode", "eager", "c", Status.FAILED, findings=(Finding("finite", "NaN", hint="a hint"),))


def record(count: int) -> list[RunCase]:
    return [RunCase(f"case {i}", Execution.EAGER) for i in range(count)]


def search(count: int, needed: int, *, far: bool = True) -> tuple[CaseResult | None, list[int]]:
    """What is found where the last ``needed`` of ``count`` bring it back, and how many were tried each time."""
    tried: list[int] = []

    def fails(before: Sequence[RunCase]) -> bool:
        tried.append(len(before))
        assert list(before) == record(count)[count - len(before) :], "the last ones, in their order"
        return len(before) >= needed > 0

    return explained_by_what_was_kept(FAILED, record(count), fails, search=far), tried


def hint_of(found: CaseResult | None) -> str:
    assert found is not None
    return found.findings[0].hint


def test_the_one_before_is_asked_first_and_then_twice_as_many() -> None:
    for count, needed, asked in ((1, 1, [0, 1]), (9, 1, [0, 1]), (9, 3, [0, 1, 2, 4]), (9, 9, [0, 1, 2, 4, 8, 9])):
        found, tried = search(count, needed)
        assert tried == asked
        assert found is not None
        assert found.after == tuple(f"eager:case {i}" for i in range(count - asked[-1], count))
        named = found.after[0] if asked[-1] == 1 else f"the {asked[-1]} case-runs that repro names"
        assert hint_of(found) == (
            f"right in a fresh process, wrong after {named}: something is kept in a module global or a class "
            "attribute, and outlives the instance\na hint"
        )


def test_it_is_looked_for_no_further_back_than_so_many() -> None:
    found, tried = search(3 * MOST_PREDECESSORS, 0)
    assert tried == [0, 1, 2, 4, 8, 16, 32, MOST_PREDECESSORS]
    assert hint_of(found).startswith(
        f"right in a fresh process, and there also after the {MOST_PREDECESSORS} case-runs before it "
        f"(of {3 * MOST_PREDECESSORS}): probably it needs other state of the process"
    )
    _, tried = search(MOST_PREDECESSORS, 0)
    assert tried[-1] == MOST_PREDECESSORS


@pytest.mark.parametrize(
    ("count", "far", "said"),
    [(1, True, "after the case-run before it:"), (2, True, "after the 2 case-runs before it:"),
     (2, False, "after the case-run before it (of 2):")],
)  # fmt: skip
def test_what_was_tried_is_said_where_nothing_brings_it_back(count: int, far: bool, said: str) -> None:
    found, tried = search(count, 0, far=far)
    assert said in hint_of(found)
    assert hint_of(found).endswith("\na hint")
    assert tried[-1] == (count if far else 1)
    assert found is not None
    assert found.after == ()


def test_what_is_wrong_in_a_fresh_process_too_has_no_cause_before_it() -> None:
    for answer in (True, None):
        assert explained_by_what_was_kept(FAILED, record(3), lambda before, answer=answer: answer) is None  # type: ignore[misc]
    assert explained_by_what_was_kept(FAILED, [], lambda before: False) is None


def test_a_crash_has_it_in_its_reason() -> None:
    crashed = CaseResult("b", "decode", "eager", "z", Status.CRASHED, reason="it died")
    found = explained_by_what_was_kept(crashed, record(3), lambda before: len(before) == 3)
    assert found is not None
    assert found.reason.startswith("it died\nright in a fresh process, wrong after the 3 case-runs that repro names")
    assert len(found.after) == 3
