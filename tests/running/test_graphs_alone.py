"""A mode that is declared in graphs alone: nothing of it runs eagerly, and results say what that leaves open."""

from __future__ import annotations

import pytest
from in_process import check_backend

from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit_corpus.faults import a_graphs_alone as faults
from attn_testkit_corpus.faults.parent import PlannedBackend

CASE = "decode-gqa2x2-d64-bf16-p16-k5.9.14.2-shuffled-gauss-b6prod"


class DecodeInGraphs(faults.GraphsAlone):
    """Raises where decode is planned eagerly."""

    capabilities = faults.GraphsAlone.capabilities.with_changes(
        eager={"target-verify"}, graph={"decode", "target-verify"}
    )


class Both(PlannedBackend):
    """The same, and decode runs eagerly too."""

    capabilities = DecodeInGraphs.capabilities.with_changes(eager={"decode", "target-verify"})


def results(backend: type, case: str = CASE) -> dict[str, CaseResult]:
    found = check_backend(backend, cases=[case], device="cpu", modes=["decode"])
    return {result.execution: result for result in found}


@pytest.mark.parametrize("case", [CASE, f"{CASE}-multi_mode", f"{CASE}-empty_batches"])
def test_its_cases_are_replayed_and_no_step_of_it_runs_eagerly(case: str) -> None:
    found = results(DecodeInGraphs, case)
    assert found["graph"].status is Status.PASSED, found["graph"].findings
    assert found["graph"].not_evaluated == ("graph-matches-eager",)
    assert "matches-oracle" in found["graph"].checks
    assert (found["eager"].status, found["eager"].case) == (Status.UNSUPPORTED, "")


def test_with_an_eager_run_the_two_are_compared() -> None:
    found = results(Both)
    assert found["graph"].not_evaluated == ()
    assert "graph-matches-eager" in found["graph"].checks
    assert found["eager"].status is Status.PASSED


@pytest.mark.parametrize(
    ("backend", "check", "hint"),
    [
        (faults.CapturedLengthsInGraphsAlone, "matches-oracle", "it is not known whether eager would be wrong too"),
        (faults.PaddedRowsCountInGraphsAlone, "padding-inert", "the step passes in a bucket of exactly 4"),
        (faults.GraphsAloneAndNothingChecked, "refuses-undeclared", "call super().__init__(context) first"),
    ],
)
def test_what_is_wrong_is_found_and_no_eager_run_is_made_up(backend: type, check: str, hint: str) -> None:
    result = results(backend)["graph"]
    (finding,) = result.findings
    assert finding.check == check
    assert hint in finding.hint
    assert "only the graph is wrong" not in finding.hint
    assert "graph-matches-eager" in result.not_evaluated
