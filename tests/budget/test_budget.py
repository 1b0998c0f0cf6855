"""A run that its budget cuts short says so, never looks like a complete one, and can be gone on with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from signed import signed

from attn_testkit.cli import main
from attn_testkit.reports.outcome import Results, verdict
from attn_testkit.reports.record import read_report, schema
from attn_testkit.reports.render import html_page, markdown_summary
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.names import NOT_STARTED
from attn_testkit.results.remarks import left_lines
from attn_testkit.results.run_header import CUT, RunHeader, exit_code
from attn_testkit.running.case_runs import loop
from attn_testkit.running.case_runs.lane import Lane, Work
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.request import Item, Options, Plan, not_started

HEADER = RunHeader("1", "2026-01-01T00:00:00", "attn-testkit run -b m:B", "core", 0, "cuda", "GPU", {}, {"m:B": "1"}, 4)


def result(status: Status = Status.PASSED, number: int = 0, execution: str = "eager") -> CaseResult:
    return CaseResult("m:B", "decode", execution, f"decode-{number}", status, device="cuda")


def left(number: int, execution: str = "eager", mode: str = "decode") -> CaseResult:
    return not_started(Item("m:B", mode, execution, f"{mode}-{number}"), 60.0)


def test_a_cut_run_is_neither_conformant_nor_a_failure() -> None:
    rows = [result(), result(number=1), left(2), left(3)]
    assert exit_code(4, rows) == CUT == 7
    assert verdict(HEADER, rows) == (
        "INCOMPLETE: 2 of 4 planned case-runs passed; 2 were not started because the budget was used up"
    )
    assert not Results(HEADER, tuple(rows)).ok


@pytest.mark.parametrize(
    ("rows", "code", "words"),
    [
        ([result(Status.FAILED), *map(left, (1, 2, 3))], 1, "NOT CONFORMANT: 1 failed of 4 planned case-runs; 3 were"),
        ([result(), left(1), left(2)], 1, "INCOMPLETE: 1 of 4 planned case-runs ran"),
        ([*map(left, range(4))], 1, "NOT CONFORMANT: 0 of 4 planned case-runs passed; nothing is known to work; 4"),
        ([result(number=n) for n in range(4)], 0, "CONFORMANT (core): 4 of 4"),
    ],
)  # fmt: skip
def test_what_else_is_wrong_is_said_first(rows: list[CaseResult], code: int, words: str) -> None:
    assert exit_code(4, rows) == code
    assert verdict(HEADER, rows).startswith(words)


def test_a_problem_besides_is_no_cut_run() -> None:
    assert exit_code(2, [result(), left(1)], problems=["expired"]) == 1
    assert verdict(HEADER, [result(), left(1), left(2), left(3)], problems=["expired"]).startswith("NOT CONFORMANT")


def test_not_run_for_another_reason_is_not_the_budgets() -> None:
    lost = replace(left(1), reason="not run: the device's context was lost")
    assert not lost.left_out
    assert not replace(left(1), status=Status.FAILED).left_out
    assert exit_code(2, [result(), lost]) == 1


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        ("attn-testkit run -b m:B --budget 60", "attn-testkit run -b m:B"),
        ("attn-testkit run --budget=60 -b m:B --html x.html", "attn-testkit run -b m:B"),
        ("attn-testkit run -b m:B --json a.json --budget 60", "attn-testkit run -b m:B --rest-of a.json"),
        (
            "attn-testkit run -b m:B --rest-of a.json --last 'b c.json' --json=b.json --budget 60",
            "attn-testkit run -b m:B --rest-of a.json --rest-of b.json",
        ),
        ("pytest --pyargs attn_testkit.suite --attn-budget=60", "pytest --pyargs attn_testkit.suite"),
    ],
)
def test_what_was_left_is_counted_by_mode_with_the_command_that_runs_it(command: str, rest: str) -> None:
    rows = [result(), left(1), left(1, "graph"), left(2, "graph"), left(3, mode="extend")]
    assert left_lines(replace(HEADER, command=command), rows) == [
        "left out by the budget: decode eager 1, decode graph 2, extend eager 1",
        f"the rest: {rest}",
    ]
    assert left_lines(HEADER, [result()]) == []


@pytest.fixture
def loop_at(monkeypatch: pytest.MonkeyPatch):
    """The real loop on a clock that each case-run moves by a second."""
    now = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])

    def run(budget: float | None, count: int) -> list[str]:
        def one(self: Lane, plan: Plan, work: Work) -> tuple[CaseResult, None]:
            now[0] += 1.0
            return result(number=int(work.item.case)), None

        monkeypatch.setattr(Lane, "run", one)
        runner = Runner(Options(budget_s=budget))
        items = [Item("m:B", "decode", "eager", str(n)) for n in range(count)]
        found = list(runner.run(Plan(HEADER, tuple(items), (), (Candidate("m:B"),)), items))
        assert len(found) == count
        return [r.reason for r in found]

    return run


def test_no_case_run_begins_when_the_time_is_up_and_each_has_a_row(loop_at) -> None:
    over = f"{NOT_STARTED}the budget of 3 s was over"
    assert loop_at(3.0, 5) == ["", "", "", over, over]
    assert loop_at(3.5, 5) == ["", "", "", "", over.replace("3 s", "3.5 s")]
    assert loop_at(None, 5) == [""] * 5


@pytest.fixture
def call(fake, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _call(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["attn-testkit", *argv])
        code = main(list(argv))
        out, err = capfd.readouterr()
        return code, out, err

    return _call


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--budget", "nan"], "budget is nan; expected seconds above 0"),
        (["--budget", "0"], "budget is 0; expected seconds above 0"),
        (["--budget", "-1"], "budget is -1; expected seconds above 0"),
        (["--budget", "1m"], "budget is '1m'; expected seconds, such as 60"),
        (["--last", "x.json"], "give it with --budget"),
        (["--budget", "9", "--last", "none.json"], "cannot read none.json: No such file"),
        (["--rest-of", "none.json"], "cannot read none.json: No such file"),
        (["--rest-of", "x.json", "--json", "x.json"], "--json would overwrite the results file that --rest-of reads"),
    ],
)
def test_wrong_usage_is_one_line_and_four(call, argv, message):
    code, out, err = call("run", "--backend", "fake:ok", *argv)
    assert (code, out) == (4, "")
    assert message in err
    assert err.count("\n") == 1


def test_the_rest_of_a_record_is_what_did_not_run_in_it(call):
    call("run", "--backend", "fake:pid,notrun", "--mode", "decode", "--json", "a.json")
    code, out, _ = call("run", "--backend", "fake:pid,notrun", "--rest-of", "a.json", "--json", "b.json")
    assert code == 1
    rows = [r for r in read_report("b.json").results if r.case]
    assert len({(r.execution, r.case) for r in rows}) == len(rows) == 8
    # The hint is the process that ran it: what ran earlier is in the new record, and was not run again.
    earlier = {(r.execution, r.case): r.hints for r in read_report("a.json").results if r.hints}
    again = {(r.execution, r.case): r.hints for r in rows if r.hints}
    assert len(earlier) == 2
    assert earlier.items() <= again.items()
    assert len(set(again.values())) == 2
    assert out.splitlines()[-1] == "INCOMPLETE: 4 of 8 planned case-runs ran"
    assert read_report("b.json").header.planned == 8


def test_the_rest_of_a_record_and_the_record_are_conformant_together(call):
    call("run", "--backend", "fake:ok", "--mode", "decode", "--json", "a.json")
    record = json.loads(Path("a.json").read_text())
    assert record["header"]["planned"] == 2
    code, out, _ = call("run", "--backend", "fake:ok", "--rest-of", "a.json")
    assert code == 0
    assert out.splitlines()[-1].startswith("CONFORMANT (smoke): 4 of 4")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backend", "fake:ok,ok"], "a.json is from another run: its backends is {'fake:ok': '1.0'}"),
        (["--backend", "fake:ok", "--seed", "1"], "its seed is 0, here 1"),
        (["--backend", "fake:ok", "--tier", "core"], "its tier is 'smoke', here 'core'"),
        (["--backend", "fake:ok"], "nothing is left to run: all 4 case-runs ran in a.json"),
    ],
)
def test_the_rest_of_another_run_is_refused(call, argv, message):
    call("run", "--backend", "fake:ok", "--json", "a.json")
    code, out, err = call("run", *argv, "--rest-of", "a.json")
    assert (code, out) == (4, "")
    assert message in err


def cut_report(call) -> Path:
    """A record of a cut run, of the command line."""
    call("run", "--backend", "fake:ok", "--json", "full.json", "--budget", "500")
    data = json.loads(Path("full.json").read_text())
    for row in data["results"][-2:]:
        row |= {"status": "not run here", "reason": f"{NOT_STARTED}the budget of 500 s was over", "checks": []}
    data |= {"exit_code": 7, "counts": {"passed": 2, "not run here": 2}}
    jsonschema.validate(data, schema())
    Path("cut.json").write_text(json.dumps(signed(data)))
    return Path("cut.json")


def test_pages_and_summaries_say_what_was_left(call):
    report = read_report(cut_report(call))
    for text in (html_page(report), markdown_summary(report)):
        assert "INCOMPLETE: 2 of 4 planned case-runs passed; 2 were not started because the budget was used up" in text
        assert "left out by the budget: target-verify eager 1, target-verify graph 1" in text
        assert "--rest-of full.json" in text
        assert "<title>✓" not in text
        assert "✅" not in text


SUITE = ("--pyargs", "attn_testkit.suite", "-Wignore::pytest.PytestAssertRewriteWarning", "-pno:hypothesispytest")
INSTALL_FAKE = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1] / "front_ends")!r})
import attn_testkit.running.processes.judge_process as judge_process
judge_process.RUNNER = "fake_runner"
import fake_runner
"""


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["serial", "xdist"])
def test_in_pytest_what_is_left_is_skipped_and_the_session_ends_with_seven(pytester, fake, monkeypatch, workers):
    monkeypatch.setenv("COLUMNS", "200")
    clock = """
import attn_testkit.plugin.session as session
real, calls = session.time.monotonic, []
class Clock:
    @staticmethod
    def monotonic():
        calls.append(1)
        return float(len(calls))
session.time = Clock
"""
    pytester.makeconftest(INSTALL_FAKE + clock)
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    found = pytester.runpytest_subprocess(*SUITE, "--attn-backend=fake:ok,ok", "--attn-budget=4", "-rs", *workers)
    passed = found.parseoutcomes()["passed"]
    assert 0 < passed < 8
    found.assert_outcomes(passed=passed, skipped=8 - passed)
    assert found.ret == 7
    found.stdout.fnmatch_lines([f"INCOMPLETE: {passed} of 8 planned case-runs passed; {8 - passed} were not started*"])
    found.stdout.fnmatch_lines(["*not started: the budget of 4 s was over*"])
