"""The diagnosis of one case-run has a time limit, after which nothing more is run and the failure says so."""

from __future__ import annotations

from contextlib import closing

import pytest
from attn_testkit.runner_modes.messages import RunRecord
from in_process import plan_run

from attn_testkit.diagnosis.rerun import Rerunner, TimeUp
from attn_testkit.examples.off_by_one import OffByOneBackend as OffByOne
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options

CASE = "decode-gqa4x2-d64-bf16-p16-k21.3-shuffled-gauss-b2prod"
CUT = (
    "the diagnosis was stopped after 1e-06 s, so a better hint may be missing; the command of `repro` has no such limit"
)


@pytest.mark.parametrize(("seconds", "cut"), [(1e-6, True), (None, False), (600.0, False)])
def test_a_diagnosis_that_is_cut_says_so_and_still_names_the_check(seconds: float | None, cut: bool) -> None:
    plan = plan_run(backends=[OffByOne], device="cpu", cases=[CASE], executions=["eager"])
    with closing(Runner(Options(in_process=True, diagnose_seconds=seconds))) as runner:
        (result,) = runner.run(plan, plan.items)
    (finding,) = result.findings
    assert finding.check == "matches-oracle"
    assert (CUT in finding.hint.splitlines()) is cut
    assert bool(finding.attended) is not cut, "the attended keys take runs of their own"
    assert finding.errors is not None


def test_only_the_search_for_the_cause_is_cut_and_not_that_for_the_check() -> None:
    asked = []

    def drive(request: object) -> RunRecord:
        asked.append(request)
        return RunRecord()

    rerunner = Rerunner(drive, None, seconds=0.0)  # type: ignore[arg-type]
    rerunner._ask(None, None)  # type: ignore[arg-type]
    rerunner.may_be_cut = True
    with pytest.raises(TimeUp):
        rerunner._ask(None, None)  # type: ignore[arg-type]
    assert (len(asked), rerunner.was_cut) == (1, True)
