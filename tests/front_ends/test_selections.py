"""A run that takes a part of its tier is never CONFORMANT, whatever selected the part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from fake_runner import known
from signed import signed

from attn_testkit import check_backend
from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit.reports.outcome import Results
from attn_testkit.reports.record import read_report, schema
from attn_testkit.reports.verdict import MUST_AGREE, conclude, narrowed, refuse_another_run, verdict
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.run_header import RunHeader, Selection

HERE = Path(__file__).parent
HEADER = RunHeader("1", "", "run", "core", 0, "cuda", "GPU", {"torch": "2"}, {"m:B": "1"}, 50, selection=Selection(
    ("mode decode",), 388
))  # fmt: skip


def rows(count: int, status: Status = Status.PASSED, case: str = "decode-gqa4x2-k{}") -> list[CaseResult]:
    return [CaseResult("m:B", "decode", "eager", case.format(n), status, device="cuda") for n in range(count)]


@pytest.fixture
def call(fake, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        out, err = capfd.readouterr()
        return code, out.splitlines()[-1] if out else "", err

    return _call


def test_the_line_names_tier_families_executions_and_what_was_selected():
    assert verdict(HEADER, rows(50)) == (
        "PARTIAL: 50 of 388 planned case-runs ran, all passed; tier core, gqa, eager; selected by mode decode"
    )
    mixed = [*rows(48), *rows(1, case="decode-mla16-k9"), replace(rows(1, case="decode-mqa8-k9")[0], execution="graph")]
    assert "; tier core, gqa, mla and mqa, eager and graph; selected by mode decode" in verdict(HEADER, mixed)
    assert conclude(HEADER, rows(50)).code == 0
    assert conclude(HEADER, rows(50)).word == "PARTIAL"


EXTENDS = [CaseResult("m:B", m, "eager", "", Status.UNSUPPORTED) for m in ("draft-extend", "draft-extend-v2")]


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("-k 'nosuch'", "without it, `--collect-only` lists them"),
        ("mode extend", "without it, `--collect-only` lists them"),
        ("mode draft-extend", "not declared: draft-extend"),
        ("case 'draft-extend-v2-gqa4x2-k3'", "not declared: draft-extend-v2"),
        ("case 'decode-*'", "without it, `--collect-only` lists them"),
    ],
)
def test_a_selection_of_nothing_is_named_and_says_what_to_do(by, said):
    header = replace(HEADER, planned=0, selection=Selection((by,), 388))
    assert verdict(header, EXTENDS) == f"NOTHING RAN: none of 388 planned case-runs is selected by {by}; {said}"
    assert conclude(header, EXTENDS).code == 5


def test_everything_that_a_tier_plans_is_conformant_and_nothing_less():
    whole = replace(HEADER, planned=50, selection=Selection())
    assert verdict(whole, rows(50)) == "CONFORMANT (core): 50 of 50 planned case-runs passed"
    assert narrowed(whole, 50, "-k 'x or not x'") is whole
    assert verdict(narrowed(whole, 49, "-k x"), rows(49)).startswith("PARTIAL: 49 of 50 planned case-runs ran, all")


def test_an_empty_shard_does_not_say_that_anything_passed():
    empty = replace(narrowed(HEADER, 0, "-k x", shard="3/8"), planned_in_all=10)
    assert verdict(empty, []).startswith(
        "SHARD 3/8: 0 of 388 planned case-runs ran, since this shard has none; tier core"
    )


def test_a_selection_of_a_selection_keeps_the_whole_and_names_both():
    twice = narrowed(HEADER, 10, "-k x", shard="3/8")
    assert (twice.planned, twice.selection.of, twice.selection.by) == (10, 388, ("mode decode", "-k x"))
    assert verdict(twice, rows(10)).startswith("SHARD 3/8: 10 of 388 planned case-runs ran, all passed; tier core")
    assert narrowed(twice, 5, "a hook", asked=False).selection.asked is False
    unknown = replace(HEADER, selection=Selection(("case 'x'",)))
    assert narrowed(unknown, 5, "-k x").selection.of == 0, "what nobody counted stays uncounted"
    assert verdict(unknown, rows(50)).startswith("PARTIAL: 50 selected case-runs ran, all passed;")


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ([*rows(49), *rows(1, Status.FAILED, "decode-bad")], "NOT CONFORMANT: 1 failed of 50 selected case-runs (388"),
        (rows(49), "INCOMPLETE: 49 of 50 selected case-runs (388 planned) ran"),
        (
            [*rows(48), *rows(2, Status.KNOWN_FAILURE, "decode-gqa2x2-{}")],
            "PARTIAL: 50 of 388 planned case-runs ran: 48 ",
        ),
        ([*rows(50), *rows(2, Status.UNSUPPORTED, "decode-no{}")], "PARTIAL: 50 of 388 planned case-runs ran, all pa"),
    ],
)
def test_what_did_not_pass_is_never_hidden_by_the_selection(found, word):
    assert verdict(HEADER, found).startswith(word)
    if Status.UNSUPPORTED in {row.status for row in found}:
        assert verdict(HEADER, found).endswith("; 2 selected case-runs are not declared")


def test_cases_that_the_tier_does_not_plan_are_not_counted_as_its_own():
    header = replace(HEADER, selection=replace(HEADER.selection, beyond=20))
    assert verdict(header, rows(50)).startswith(
        "PARTIAL: 30 of 388 planned case-runs and 20 that the tier does not plan ran, all passed"
    )


def test_a_selection_that_nobody_asked_for_is_not_ok():
    header = replace(HEADER, selection=replace(HEADER.selection, by=("a hook",), asked=False))
    assert conclude(header, rows(50)).code == 1
    assert "selected by a hook, which no argument of this command asked for" in verdict(header, rows(50))
    asked, not_asked = Results(HEADER, tuple(rows(50))), Results(header, tuple(rows(50)))
    assert (asked.ok, asked.partial) == (True, True)
    assert (not_asked.ok, not_asked.partial) == (False, True)


@pytest.mark.parametrize(
    ("argv", "by"),
    [
        (("--mode", "decode"), "mode decode"),
        (("--execution", "graph"), "execution graph"),
        (("--case", "decode-*", "--mode", "decode"), "mode decode, case 'decode-*'"),
        (("--cases-from", "ids.txt"), "the cases of ids.txt"),
    ],
)
def test_the_command_line_says_what_selected(call, argv, by):
    Path("ids.txt").write_text("decode-ok-k0\ntarget-verify-ok-k1\n")
    code, line, _ = call("run", "--backend", "fake:ok,ok", *argv, "--json", "out.json")
    assert code == 0
    assert line.startswith("PARTIAL: 4 of 8 planned case-runs ran, all passed; tier smoke, ")
    assert f"; selected by {by}; emulated device" in line
    jsonschema.validate(json.loads(Path("out.json").read_text()), schema())
    report = read_report("out.json")
    assert (report.header.selection.of, report.header.selection.by) == (8, tuple(by.split(", ")))
    assert call("results", "report", "out.json", "--markdown")[0] == 0


def test_a_selection_that_leaves_nothing_out_is_the_whole_tier(call):
    assert call("run", "--backend", "fake:ok", "--case", "*")[1].startswith(
        "CONFORMANT (smoke): 4 of 4 planned case-runs"
    )


def test_check_backend_is_ok_for_what_the_caller_selected_and_says_that_it_is_a_part(fake):
    part, whole = check_backend("fake:ok", modes=["decode"]), check_backend("fake:ok")
    assert (part.ok, part.partial, part.verdict.partition(":")[0]) == (True, True, "PARTIAL")
    assert (whole.ok, whole.partial, whole.verdict.partition(":")[0]) == (True, False, "CONFORMANT (smoke)")


@pytest.mark.parametrize("what", MUST_AGREE)
def test_runs_that_differ_do_not_mix_and_both_values_are_named(what):
    other = replace(HEADER, **{what: {"m:B": "2"} if what in ("backends", "versions") else "another"})
    refuse_another_run("a.json", HEADER, "here", HEADER)
    with pytest.raises(UsageError) as error:
        refuse_another_run("a.json", HEADER, "in b.json", other)
    assert f"its {what} is {getattr(HEADER, what)!r}, in b.json {getattr(other, what)!r}" in str(error.value)


def of_code(code: str, file: str = "/a/m.py") -> RunHeader:
    return replace(HEADER, sources={"m:B": {"file": file, "sha256": "1" * 64, "code": code, "kernels": ""}})


def test_runs_of_other_code_do_not_mix_and_both_are_named():
    with pytest.raises(UsageError) as error:
        refuse_another_run("a.json", of_code("1" * 64), "here", of_code("2" * 64))
    assert str(error.value).startswith(
        "a.json is from other code: m:B was /a/m.py (111111111111) there, here /a/m.py (222222222222), or a module"
    )
    for other in (of_code("1" * 64, "/elsewhere/m.py"), of_code(""), HEADER):
        refuse_another_run("a.json", of_code("1" * 64), "here", other)
        refuse_another_run("a.json", other, "here", of_code("1" * 64))


def test_the_failures_of_a_record_stay_failures_in_the_verdict_on_its_rest(call):
    call("run", "--backend", "fake:ok,wrong", "--mode", "decode", "--json", "a.json")
    code, line, _ = call("run", "--backend", "fake:ok,wrong", "--mode", "target-verify", "--rest-of", "a.json")
    assert code == 1
    assert line.startswith("NOT CONFORMANT: 4 failed of 4 selected case-runs (8 planned)"), "2 of them in a.json"


def test_a_failure_of_one_record_is_not_hidden_by_a_pass_in_another(call):
    call("run", "--backend", "fake:ok", "--mode", "decode", "--json", "good.json")
    record = json.loads(Path("good.json").read_text())
    for row in record["results"]:
        row |= {"status": "failed"} if row["case"] == "decode-ok-k0" and row["execution"] == "eager" else {}
    record["counts"] = {"failed": 1, "passed": 1}
    record["exit_code"] = 1
    Path("bad.json").write_text(json.dumps(signed(record)))
    for files in (("good.json", "bad.json"), ("bad.json", "good.json")):
        code, line, _ = call("run", "--backend", "fake:ok", *(word for f in files for word in ("--rest-of", f)))
        assert (code, line) == (1, "NOT CONFORMANT: 1 failed of 4 planned case-runs")


def test_a_known_failure_of_a_record_is_excused_again_or_not_at_all(call):
    Path("known.toml").write_text(known("*-wrong-*"))
    excused = ("--known-failures", "known.toml")
    call("run", "--backend", "fake:ok,wrong", "--mode", "decode", "--json", "a.json", *excused)
    rest = ("run", "--backend", "fake:ok,wrong", "--rest-of", "a.json")
    assert call(*rest, *excused)[:2] == (0, call(*rest, *excused)[1])
    assert call(*rest, *excused)[1].startswith("CONFORMANT (smoke): 4 of 8 planned case-runs passed, 4 known failures")
    assert call(*rest)[1] == "NOT CONFORMANT: 4 failed of 8 planned case-runs"


def test_the_first_failure_that_stops_a_rest_is_a_new_one(call):
    call("run", "--backend", "fake:ok,wrong", "--mode", "decode", "--json", "a.json")
    code, line, err = call("run", "--backend", "fake:ok,wrong", "--rest-of", "a.json", "-x")
    assert code == 1
    assert "stopped after 1 failure\n" in err
    assert line.startswith("NOT CONFORMANT: 3 failed of 8 planned case-runs; 2 did not run")


CONFTEST = """
import sys
sys.path.insert(0, {here!r})
import attn_testkit.running.processes.judge_process as judge_process
judge_process.RUNNER = "fake_runner"

def pytest_collection_modifyitems(config, items):
    {hook}
"""
HOOKS = {
    "deselects": "gone = [i for i in items if 'graph' in i.name]; items[:] = [i for i in items if i not in gone]; "
    "config.hook.pytest_deselected(items=gone)",
    "drops": "items[:] = [i for i in items if 'graph' not in i.name]",
    "none": "pass",
}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, fake):
    def _run(hook: str, *args: str) -> pytest.RunResult:
        monkeypatch.setenv("COLUMNS", "200")
        pytester.makeconftest(CONFTEST.format(here=str(HERE), hook=HOOKS[hook]))
        pytester.makeini("[pytest]\nfilterwarnings = error\n")
        quick = ("-Wignore::pytest.PytestAssertRewriteWarning", "-pno:hypothesispytest")
        return pytester.runpytest_inprocess(
            "--pyargs", "attn_testkit.suite", *quick, "--attn-backend=fake:ok,ok", *args
        )

    return _run


@pytest.mark.parametrize("hook", ["deselects", "drops"])
def test_what_a_hook_takes_away_is_named_and_the_session_is_red(suite, hook):
    found = suite(hook)
    assert found.ret == 1
    found.stdout.fnmatch_lines(
        ["PARTIAL: 4 of 8 planned case-runs ran, all passed; *by a hook or plugin of pytest, which removed 4 *"]
    )


@pytest.mark.parametrize(
    ("args", "by"),
    [
        (("-k", "eager"), "-k 'eager'"),
        (("--attn-execution=eager",), "execution eager"),
        (("--attn-case=*-k0",), "case '[*]-k0'"),
    ],
)
def test_what_an_argument_of_pytest_selects_is_named_and_the_session_is_green(suite, args, by):
    found = suite("none", *args)
    assert found.ret == 0
    found.stdout.fnmatch_lines([f"PARTIAL: 4 of 8 planned case-runs ran, all passed; *selected by {by};*"])


def test_a_session_of_everything_is_conformant(suite):
    assert suite("none").ret == 0
