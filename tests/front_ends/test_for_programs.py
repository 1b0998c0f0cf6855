"""Texts for programs: one line of JSON, and annotations of GitHub; and commands that are easy to get right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fake_runner
import pytest

from attn_testkit.cli import main
from attn_testkit.cli.backend_file import spec_of
from attn_testkit.registry import UsageError
from attn_testkit.reports.annotations import annotation_lines
from attn_testkit.reports.covered import covered
from attn_testkit.reports.record import Report
from attn_testkit.reports.render import html_page
from attn_testkit.results.case_result import CaseResult, Status

GITHUB = {"GITHUB_ACTIONS": "true"}


@pytest.fixture
def call(fake, capfd, tmp_path, monkeypatch):
    """Call the command line in this process, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def _call(*argv: str) -> tuple[int, str, str]:
        return main(list(argv)), *capfd.readouterr()

    return _call


def run_of(words: str) -> Report:
    plan = fake_runner.plan_run(backends=[f"fake:{words}"])
    results = (*plan.preset, *map(fake_runner.run_item, plan.items))
    red = any(result.status is not Status.PASSED for result in results if result.case)
    return Report(plan.header, results, finished=True, exit_code=int(red))


def test_a_line_of_json_is_all_that_is_on_stdout(call):
    code, out, err = call("run", "--backend", "fake:ok,wrong", "--json", "-")
    (line,) = out.splitlines()
    found = json.loads(line)
    assert (code, found["exit_code"], found["word"]) == (1, 1, "NOT CONFORMANT")
    assert found["counts"]["failed"] == 4
    (cause,) = found["causes"]
    assert cause["repro"].startswith("attn-testkit repro --backend fake:ok,wrong")
    assert cause["check"] == "matches-oracle"
    assert "NOT CONFORMANT: 4 failed" in err
    assert not Path("-").exists()
    assert json.loads(call("run", "--backend", "fake:ok", "--json", "-")[1])["word"] == "CONFORMANT (smoke)"


def test_github_gets_an_annotation_per_cause_with_the_line_of_the_author(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = run_of("wrong")
    spec = "fake:wrong"
    header = replace(report.header, sources={spec: {"file": str(tmp_path / "pkg" / "adapter.py")}})
    raised = replace(fake_runner.finding(), check="completes", headline="forward raised KeyError: 50%, a\nb",
                     where="adapter.py:12 in run: x[y]")  # fmt: skip
    results = [replace(r, findings=(raised,)) if r.findings else r for r in report.results]
    (line,) = annotation_lines(header, results, GITHUB)
    assert line.startswith(
        "::error file=pkg/adapter.py,line=12,title=attn-testkit%3A completes::forward raised KeyError: 50%25"
    )
    (plain,) = annotation_lines(header, report.results, GITHUB)
    assert plain.startswith("::error file=pkg/adapter.py,title=attn-testkit%3A matches-oracle::"), "no line is known"
    assert annotation_lines(header, results, {}) == []
    assert annotation_lines(header, run_of("ok").results, GITHUB) == []


def test_the_command_line_prints_annotations_before_the_verdict(call, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    lines = call("run", "--backend", "fake:wrong")[1].splitlines()
    assert [line[:8] for line in lines].count("::error ") == 1
    assert lines[-1].startswith("NOT CONFORMANT")


BACKEND = "class {}(Base):\n    capabilities = 1\n\n"


def test_a_file_stands_for_its_only_backend_and_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    Path("one.py").write_text("raise SystemExit\nclass Helper: pass\n" + BACKEND.format("Mine"))
    Path("pkg/two.py").write_text(BACKEND.format("A") + BACKEND.format("B"))
    Path("none.py").write_text("x = 1\n")
    Path("child.py").write_text("class Child(Base): pass\n")
    Path("broken.py").write_text("def\n")
    assert spec_of("one.py") == "one:Mine"
    assert [spec_of(name) for name in ("triton", "m:C", "one.py:Mine")] == ["triton", "m:C", "one.py:Mine"]
    for name, said in (
        ("pkg/two.py", r"has 2 backends; name one: --backend pkg.two:A \(A, B\)"),
        ("none.py", "no class that sets `capabilities`.*: --backend none:Class"),
        ("child.py", "no class that sets `capabilities`.*: --backend child:Child"),
        ("broken.py", r"is not Python.*broken.py, line 1"),
        ("gone.py", "cannot read gone.py"),
        (str(tmp_path / "one.py"), "outside of this folder"),
    ):
        with pytest.raises(UsageError, match=said):
            spec_of(name)


def test_run_takes_a_file_and_refuses_any_other_word(call):
    assert call("run", "gone.py")[0] == 4
    Path("here.py").write_text(BACKEND.format("Mine"))
    assert "did you mean here.py?" in call("run", "here")[2]
    code, _, err = call("run", "fake:ok")
    assert (code, "a backend is named with --backend fake:ok" in err) == (4, True)


def test_report_without_an_option_prints_what_the_run_printed(call):
    _, ran, _ = call("run", "--backend", "fake:ok,wrong", "--json", "a.json")
    code, out, _ = call("results", "report", "a.json")
    assert code == 0
    assert out.splitlines()[-1] == ran.splitlines()[-1]
    assert "start here: " in out


def test_runs_of_different_backends_are_not_compared(call):
    call("run", "--backend", "fake:ok", "--json", "a.json")
    call("run", "--backend", "fake:ok,ok", "--json", "b.json")
    code, out, err = call("results", "compare", "a.json", "b.json")
    assert (code, out) == (4, "")
    assert "a.json is of fake:ok, and b.json of fake:ok,ok: these are different backends" in err


def test_a_green_page_shows_what_was_covered_and_a_red_one_the_case_runs_near_a_limit():
    green, red = html_page(run_of("ok")), html_page(run_of("ok,wrong"))
    assert "What was covered" in green
    assert "Closest to the limit" not in green
    assert "What was covered" not in red
    assert "Closest to the limit" in red


def test_what_was_covered_is_read_from_the_ids():
    ids = (
        "decode-gqa4x2-d64-bf16-p16-k21.3-shuffled-gauss-b2prod",
        "decode-mha2-d128-fp16-p64-k1025.33-contiguous-gauss-w4-kvfp8e4m3-b3prod",
        "extend-gqa2x2-d64-bf16-p16-k3.21.5-n4a1.3.4-shuffled-gauss-b3prod",
    )
    runs = [CaseResult("b", each.split("-")[0], "eager", each, Status.PASSED) for each in ids]
    decode, extend = covered([*runs, replace(runs[0], execution="graph"), replace(runs[2], status=Status.NOT_RUN_HERE)])
    assert (decode.mode, decode.executions, decode.cases, extend.mode) == ("decode", "eager, graph", 2, "extend")
    assert decode.values["head dim"] == "64, 128"
    assert decode.values["dtype"] == "bf16, fp16"
    assert decode.values["page size"] == "16, 64"
    assert decode.values["KV pool of"] == "fp8e4m3"
    assert (decode.tokens, decode.requests) == ("3 to 1,025", 2)
    assert decode.features == "a sliding window, an FP8 KV pool"
