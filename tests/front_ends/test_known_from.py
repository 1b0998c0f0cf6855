"""``results known`` writes entries that cover every failure of a results file, and nothing that passed."""

from __future__ import annotations

import datetime
import random
from dataclasses import replace

import fake_runner
import pytest

from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit.reports.record import read_report
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.running.planning.known_failures import Ledger, parse_known
from attn_testkit.running.planning.known_from import entries_from
from attn_testkit.running.planning.request import kit_error

TODAY = datetime.date(2026, 11, 21)
UNTIL = datetime.date(2027, 1, 31)
ISSUE = "https://example.org/issues/12"


def row(case: str, *checks: str, execution: str = "eager", backend: str = "fake:a", status: Status | None = None):
    status = status or (Status.FAILED if checks else Status.PASSED)
    findings = tuple(Finding(check, "wrong") for check in checks)
    return CaseResult(backend, case.split("-")[0], execution, case, status, findings)


def entries(*rows: CaseResult):
    made = entries_from(rows, ISSUE, UNTIL, TODAY)
    found = parse_known("made", made.text, TODAY)
    assert made.count == len({entry.number for entry in found})
    return found


def excuses_exactly_what_failed(rows: list[CaseResult]) -> None:
    header = fake_runner.plan_run(backends=["fake:a"]).header
    ledger = Ledger(entries(*rows), header, TODAY)
    for each in rows:
        wanted = Status.PASSED if each.status is Status.PASSED else Status.KNOWN_FAILURE
        assert ledger.judge(each).status is wanted, each.case


def test_what_failures_share_and_nothing_that_passed_has_is_the_glob():
    (entry,) = entries(
        row("decode-gqa4x2-d64-p64-b2", "finite"), row("decode-mha8-d64-p64-b4prod", "finite"),
        row("decode-gqa4x2-d64-p16-b2"), row("decode-mha8-d128-p64-b2"),
    )  # fmt: skip
    assert (entry.cases, entry.checks, entry.execution, entry.until) == (
        "decode-*d64-*p64*",
        ("finite",),
        "eager",
        UNTIL,
    )


def test_a_glob_that_would_cover_what_passed_is_not_written():
    found = entries(row("decode-a-p64", "finite"), row("decode-b-p64", "finite"), row("decode-c-p64"))
    assert [(entry.cases, entry.number) for entry in found] == [("decode-a-p64", 1), ("decode-b-p64", 1)]


def test_a_list_of_cases_is_as_narrow_as_an_entry_for_each_of_them():
    """The same verdict on what failed, and a new failure of the same check, mode and words stays one."""
    failures = [row(f"decode-{name}-p64", "finite") for name in "abcd"]
    others = [row("decode-e-p64"), row("extend-a-p64", "finite"), row("extend-b-p16")]
    header = fake_runner.plan_run(backends=["fake:a"]).header
    folded = entries(*failures, *others)
    each = [entry for failure in failures for entry in entries(failure)] + [*entries(others[1])]
    assert [entry.number for entry in folded] == [1, 1, 1, 1, 2], "a mode has its own entry"
    new = [
        row("decode-e-p64", "finite"), row("decode-a-p64", "finite", execution="graph"),
        row("decode-a-p64", "finite", "matches-oracle"), row("extend-b-p64", "finite"),
    ]  # fmt: skip
    for book in (Ledger(folded, header, TODAY), Ledger(tuple(each), header, TODAY)):
        excused = [Status.KNOWN_FAILURE] * 4 + [Status.PASSED, Status.KNOWN_FAILURE, Status.PASSED]
        assert [book.judge(result).status for result in (*failures, *others)] == excused
        assert {book.judge(result).status for result in new} == {Status.FAILED}
        assert book.judge(row("decode-d-p64")).status is Status.UNEXPECTEDLY_PASSED


def test_the_causes_stand_above_their_entry_in_one_line_each():
    rows = [
        replace(row(f"decode-{n}-b2", "finite"), findings=(Finding("finite", text, hint=text),))
        for n, text in enumerate(("lengths\nof capture", "x " * 99, "rows are\x1b swapped", "scale", "cap"))
    ]
    text = entries_from([*rows, row("decode-5-b2")], ISSUE, UNTIL, TODAY).text
    above = text.partition("[[known]]")[0].splitlines()
    assert above[0] == "# lengths of capture"
    assert above[1].startswith("# x x x")
    assert above[1].endswith(" ...")
    assert (len(above), above[3]) == (4, "# and 2 other causes")


def test_crashes_are_quarantined_with_their_part_of_the_results_as_the_record(call, tmp_path):
    words = ("run", "--backend", "fake:ok,wrong,segfault,ok,late")
    call(*words, "--json", "red.json")
    made = ("results", "known", "red.json", "--quarantine", "crash.json", "--issue", ISSUE, "--until", soon())
    code, out, err = call(*made)
    assert (code, out.count('record = "crash.json"'), out.count("tolerated")) == (0, 2 * out.count("tolerated"), 2)
    assert "wrote crash.json: 8 case-runs that crashed or timed out; keep it by the entries" in err
    (tmp_path / "known.toml").write_text(out)
    assert call("results", "report", "crash.json", "--html", "page.html")[0] == 0, "a results file as any other"
    code, out, _ = call(*words, "--known-failures", "known.toml")
    assert code == 0
    assert "8 quarantined" in out
    assert "no record shows" not in out
    report = read_report("crash.json")
    (tmp_path / "crash.json").unlink()
    assert call("known", "known.toml")[0] == 4
    assert {result.status for result in report.results} == {Status.CRASHED, Status.TIMED_OUT}


def test_without_a_crash_there_is_nothing_to_quarantine(call, tmp_path):
    call("run", "--backend", "fake:wrong,ok", "--json", "red.json", "--mode", "decode")
    made = ("results", "known", "red.json", "--quarantine", "crash.json", "--issue", ISSUE, "--until", soon())
    code, out, err = call(*made)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "nothing crashed or timed out, so there is nothing to quarantine; leave out --quarantine" in err
    assert not (tmp_path / "crash.json").exists()


def test_other_checks_other_executions_and_other_backends_have_entries_of_their_own():
    rows = [
        row("decode-a", "finite"), row("decode-a", "finite", execution="graph"),
        row("decode-b", "finite", "matches-oracle", execution="graph"), row("decode-b"),
        row("decode-a", backend="fake:b"), row("decode-c", "finite", backend="fake:b"),
        row("decode-d", status=Status.CRASHED), row("decode-e", status=Status.TIMED_OUT),
    ]  # fmt: skip
    found = {(entry.cases, entry.backend, entry.execution): entry.checks for entry in entries(*rows)}
    assert found == {
        ("decode-a", "fake:a", ""): ("finite",),
        ("decode-b", "fake:a", "graph"): ("finite", "matches-oracle"),
        ("decode-c", "fake:b", "eager"): ("finite",),
        ("decode-d", "fake:a", "eager"): ("crashed",),
        ("decode-e", "fake:a", "eager"): ("timed out",),
    }


@pytest.mark.parametrize("seed", range(20))
def test_entries_excuse_exactly_what_failed(seed):
    lot = random.Random(seed)
    words = [("decode", "extend"), ("gqa4x2", "mha8"), ("d64", "d128"), ("p16", "p64"), ("", "w4"), ("b2", "b4prod")]
    rows = {}
    for _ in range(60):
        case = "-".join(filter(None, (lot.choice(choice) for choice in words)))
        execution = lot.choice(("eager", "graph"))
        wrong = ("p64" in case and "w4" in case) or lot.random() < 0.1
        checks = lot.choice((("finite",), ("matches-oracle", "finite"))) if wrong else ()
        rows[case, execution] = row(case, *checks, execution=execution)
    excuses_exactly_what_failed(list(rows.values()))


def test_errors_of_the_kit_and_what_has_entries_already_get_none():
    rows = [
        row("decode-a", "finite"), kit_error(fake_runner.Item("fake:a", "decode", "eager", "decode-b"), "a bug"),
        row("decode-c", "finite", status=Status.KNOWN_FAILURE), row("decode-d", status=Status.UNEXPECTEDLY_PASSED),
    ]  # fmt: skip
    made = entries_from(rows, ISSUE, UNTIL, TODAY)
    assert made.count == 1
    assert len(made.remarks) == 3


@pytest.mark.parametrize(
    ("issue", "until", "message"),
    [("#12", UNTIL, "is not an address"), (ISSUE, datetime.date(2028, 1, 1), "more than a year ahead")],
)
def test_an_issue_or_a_date_that_no_entry_may_have_is_refused(issue, until, message):
    with pytest.raises(UsageError, match=message):
        entries_from([row("decode-a", "finite")], issue, until, TODAY)


@pytest.fixture
def call(fake, capfd, tmp_path, monkeypatch):
    """Call the command line in this process, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        out, err = capfd.readouterr()
        return code, out, err

    return _call


def soon() -> str:
    return str(datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30))


def test_a_red_run_is_green_with_the_file_that_was_made_of_it(call, tmp_path):
    red = ("run", "--backend", "fake:ok,wrong,segfault,inf", "--json", "red.json")
    assert call(*red)[0] == 1
    code, out, err = call("results", "known", "red.json", "--issue", ISSUE, "--until", soon())
    assert code == 0
    assert err.splitlines()[-1] == f"entries: {out.count('[[known]]')}"
    (tmp_path / "known.toml").write_text(out)
    assert call("known", "known.toml")[0] == 0
    code, out, _ = call("run", "--backend", "fake:ok,wrong,segfault,inf", "--known-failures", "known.toml")
    assert code == 0
    assert "12 known failures" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("red.json",), "Missing option '--issue'"),
        (("red.json", "--issue", ISSUE, "--until", "soon"), "--until is 'soon'; expected a date"),
        (("red.json", "--issue", ISSUE, "--until", "2001-01-01"), "which has passed"),
        (("red.json", "--issue", "here", "--until", "{soon}"), "issue = 'here' is not an address"),
        (("green.json", "--issue", ISSUE, "--until", "{soon}"), "nothing failed that an entry could excuse"),
        (("red.json", "green.json", "--issue", ISSUE, "--until", "{soon}"), "red.json is not a shard of a run"),
    ],
)
def test_a_wrong_use_is_one_line(call, given, message):
    for name, word in (("red", "wrong"), ("green", "ok")):
        call("run", "--backend", f"fake:{word}", "--json", f"{name}.json", "--mode", "decode")
    code, out, err = call("results", "known", *(each.format(soon=soon()) for each in given))
    assert (code, out) == (4, "")
    assert message in err
    assert err.count("\n") == 1


def test_entries_for_the_shards_of_a_run_are_those_for_the_whole_run(call):
    words = "fake:ok,wrong,ok,wrong,ok,segfault"
    call("run", "--backend", words, "--json", "whole.json")
    for number in (1, 2, 3):
        call("run", "--backend", words, "--shard", f"{number}/3", "--json", f"shard-{number}.json")
    rest = ("--issue", ISSUE, "--until", soon())
    _, whole, _ = call("results", "known", "whole.json", *rest)
    shards = [f"shard-{number}.json" for number in (1, 2, 3)]
    code, merged, err = call("results", "known", *shards, *rest)
    assert code == 0
    assert "only shard" not in err
    assert sorted(merged.split("\n\n")) == sorted(whole.split("\n\n"))


def test_entries_for_one_shard_come_with_a_warning(call):
    for number in (1, 2):
        call("run", "--backend", "fake:wrong,wrong,wrong,wrong", "--shard", f"{number}/2", "--json", f"{number}.json")
    code, _, err = call("results", "known", "1.json", "--issue", ISSUE, "--until", soon())
    assert code == 0
    assert "only shard 1/2 was read: an entry may cover a case-run that passed in another shard; give all shards" in err


def test_several_files_of_known_failures_are_checked_and_one_expired_entry_is_red(call, tmp_path):
    for name, until in (("good", soon()), ("old", "2001-01-01")):
        (tmp_path / f"{name}.toml").write_text(
            f'[[known]]\ncases = "decode-*"\nkind = "tolerated"\ncheck = "finite"\nissue = "{ISSUE}"\nuntil = {until}\n'
        )
    assert call("known", "good.toml", "good.toml")[0] == 0
    code, out, _ = call("known", "good.toml", "old.toml")
    assert code == 1
    assert out.count("decode-*") == 3, "both entries, and the problem"
