"""Runs that looked green because the kit was used carelessly, and their controls."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from attn_testkit.cli import main
from attn_testkit.contract import Bounds, Capabilities, ForwardMode, HeadShapes, KVPools, Precision
from attn_testkit.reports.outcome import Results
from attn_testkit.reports.record import Record, read_report
from attn_testkit.reports.verdict import conclude
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.names import FUZZ
from attn_testkit.results.remarks import not_declared_lines
from attn_testkit.results.run_header import RunHeader
from attn_testkit.running.planning.narrow import not_declared_here

HERE = Path(__file__).parent
HEADER = RunHeader("1", "", "run", "core", 0, "cuda", "GPU", {"torch": "2"}, {"m:B": "1"}, 2)


def row(case: str, status: Status = Status.PASSED, backend: str = "m:B", **more: object) -> CaseResult:
    return CaseResult(backend, "decode", "eager", case, status, device="cuda", **more)  # type: ignore[arg-type]


def test_a_case_run_that_passed_twice_is_not_two():
    found = conclude(HEADER, [row("decode-a"), row("decode-a")])
    assert (found.word, found.code) == ("INCOMPLETE", 1)
    assert conclude(HEADER, [row("decode-a"), row("decode-b")]).word == "CONFORMANT (core)"
    other = replace(row("decode-a"), execution="graph")
    assert conclude(HEADER, [row("decode-a"), other]).word == "CONFORMANT (core)"
    for rows in ([row("decode-a"), row("decode-a", Status.FAILED)], [row("decode-a", Status.FAILED), row("decode-a")]):
        assert conclude(HEADER, [*rows, row("decode-b")]).text == "1 failed of 2 planned case-runs"
    assert conclude(replace(HEADER, tier=FUZZ), [row("decode-a"), row("decode-a")]).text.startswith("of 2 random")


def test_results_that_nobody_planned_are_not_accepted():
    rows = [row("decode-a"), row("decode-b"), row("decode-c")]
    found = conclude(HEADER, rows)
    assert (found.word, found.code) == ("NOT CONFORMANT", 1)
    assert found.text.endswith(", but 1 case-runs have a result that nobody planned")
    absent = [*rows[:2], row("decode-large", Status.NOT_RUN_HERE, reason="needs a GPU"), row("", Status.UNSUPPORTED)]
    assert conclude(HEADER, absent).word == "CONFORMANT (core)", "what is not run here was not planned, and has a row"


def test_a_backend_of_which_nothing_ran_next_to_one_that_passed_is_named():
    header = replace(HEADER, backends={"m:B": "1", "n:C": "1", "o:D": "1"})
    absent = [row("", Status.NOT_RUN_HERE, "n:C", reason="needs sm100"), row("", Status.UNSUPPORTED, "o:D")]
    found = conclude(header, [row("decode-a"), row("decode-b"), *absent])
    assert found.text.endswith("; nothing of n:C ran (needs sm100); nothing of o:D ran (nothing declared or selected)")
    ran = [row("decode-a"), row("decode-b", backend="n:C")]
    assert "nothing of" not in conclude(replace(header, backends={"m:B": "1", "n:C": "1"}), ran).text


SUITE = """
import sys
sys.path.insert(0, {here!r})
import attn_testkit.running.processes.judge_process as judge_process
judge_process.RUNNER = "fake_runner"
"""


@pytest.mark.parametrize("option", ["--attn-backend=fake:wrong", "--attn-report=out.json"])
def test_options_of_the_suite_without_the_suite_are_wrong_usage(pytester: pytest.Pytester, fake, option):
    pytester.makeconftest(SUITE.format(here=str(HERE)))
    pytester.makepyfile(test_mine="def test_mine(): pass")
    quick = ("-Wignore::pytest.PytestAssertRewriteWarning", "-pno:hypothesispytest")
    found = pytester.runpytest_inprocess(*quick, option)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stdout.fnmatch_lines(["attn-testkit: --attn-backend or --attn-report was given, and no test of the suite *"])
    assert pytester.runpytest_inprocess(*quick).ret == 0
    assert pytester.runpytest_inprocess(*quick, option, "--collect-only").ret == 0


def test_a_file_of_cases_may_have_a_byte_order_mark_and_other_line_ends(fake, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ids.txt").write_bytes("\ufeffdecode-wrong-k1\r\ndecode-ok-k0\r\n".encode())
    assert main(["run", "--backend", "fake:ok,wrong", "--cases-from", "ids.txt"]) == 1
    assert "NOT CONFORMANT: 2 failed of 4 selected case-runs (8 planned)" in capfd.readouterr().out


def test_what_is_not_declared_stands_next_to_the_verdict(tmp_path, capsys):
    narrow = not_declared_here(Capabilities(eager={ForwardMode.DECODE, ForwardMode.EXTEND}, graph={ForwardMode.EXTEND}))
    assert narrow == (
        "graph for decode",
        "target-verify, draft-extend, draft-extend-v2, draft-decode",
        "gqa, mqa, mla",
        "left at the default: heads.families, heads.head_dims, precision.dtypes, kv_pool.page_sizes, "
        "bounds.max_context_len",
    )
    header = replace(HEADER, not_declared={"m:B": narrow})
    line = f"not declared: {'; '.join(narrow)}"
    assert not_declared_lines(header.not_declared) == [line]
    assert str(Results(header, (row("decode-a"), row("decode-b")))).splitlines()[-2] == line
    record = Record(tmp_path / "out.json", header)
    record.finish(1)
    assert read_report(tmp_path / "out.json").header == header
    both = {"m:B": ("mla",), "n:C": (), "o:D": ("mqa",)}
    assert not_declared_lines(both) == ["not declared (m:B): mla", "not declared (o:D): mqa"]


def test_what_is_declared_is_not_named():
    every = frozenset(ForwardMode)
    wide = Capabilities(
        eager=every,
        graph=every,
        heads=HeadShapes(families={"mha", "gqa", "mqa", "mla"}, gqa_ratios={2}, head_dims={128}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={64}),
        bounds=Bounds(max_context_len=4096, max_q_rows=4, max_topk=1),
    )
    assert not_declared_here(wide) == ()
    assert not_declared_here(wide.with_changes(eager={"decode"})) == (
        "eager for target-verify, draft-extend, draft-extend-v2, extend, draft-decode",
    )
    assert not_declared_here(wide.with_changes(heads={"gqa_ratios": {1, 2, 4, 8}})) == (), (
        "written, though it equals the default"
    )
    defaults = Capabilities(eager={"decode"}).with_changes(graph={"decode"})
    assert not_declared_here(pickle.loads(pickle.dumps(defaults)))[-1].startswith(
        "left at the default: heads.families, heads.head_dims"
    )
    written = defaults.with_changes(heads={"families": {"mha"}, "head_dims": {64, 128}})
    assert (
        not_declared_here(written)[-1]
        == "left at the default: precision.dtypes, kv_pool.page_sizes, bounds.max_context_len"
    )
