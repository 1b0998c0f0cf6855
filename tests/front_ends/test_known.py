"""Known failures: what an entry may excuse, for how long, and what is said about one that is wrong."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace

import fake_runner
import pytest

from attn_testkit.registry import UsageError
from attn_testkit.reports.verdict import conclude
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.results.run_header import Selection, exit_code
from attn_testkit.running.planning import known_failures
from attn_testkit.running.planning.known_failures import KnownFailure, Ledger, load_known
from attn_testkit.running.planning.request import kit_error

TODAY = datetime.date(2026, 11, 21)
GOOD = {
    "cases": '"decode-*-w4-*"',
    "kind": '"tolerated"',
    "check": '"matches-oracle"',
    "issue": '"https://example.org/12"',
    "until": "2027-01-31",
}


def written(tmp_path, **changes):
    fields = {**GOOD, **changes}
    path = tmp_path / "known.toml"
    path.write_text("[[known]]\n" + "".join(f"{k} = {v}\n" for k, v in fields.items() if v is not None))
    return path


def entry(**changes) -> KnownFailure:
    values = {
        "number": 1,
        "cases": "decode-*",
        "kind": "tolerated",
        "checks": ("matches-oracle",),
        "issue": "#12",
        "until": datetime.date(2027, 1, 31),
        **changes,
    }
    return KnownFailure(**values)


def ledger(*entries: KnownFailure, **header) -> Ledger:
    plan = fake_runner.plan_run(backends=["fake:ok"])
    values = {**vars(plan.header), **header}
    return Ledger(entries, type(plan.header)(**values), TODAY)


def failed(*checks: str, status: Status = Status.FAILED, execution: str = "graph") -> CaseResult:
    findings = tuple(Finding(check, "wrong") for check in checks)
    return CaseResult("fake:ok", "decode", execution, "decode-a", status, findings)


def test_a_complete_entry_is_read(tmp_path):
    (found,) = load_known(written(tmp_path, backend='"my_*"', execution='"graph"', when='"sm90 and torch>=2"'))
    assert found == KnownFailure(
        1,
        "decode-*-w4-*",
        "tolerated",
        ("matches-oracle",),
        "https://example.org/12",
        datetime.date(2027, 1, 31),
        "my_*",
        "graph",
        "sm90 and torch>=2",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"issue": None}, "entry 1: issue is missing"),
        ({"until": None}, "entry 1: until is missing"),
        ({"cases": '""'}, "entry 1: cases is missing"),
        ({"check": None}, "entry 1: check is missing: name the check that may fail"),
        ({"kind": '"tolerate"'}, "entry 1: kind = 'tolerate'; did you mean 'tolerated'?"),
        ({"until": '"2027-01-31"'}, "until must be a date without quotes, like 2027-03-31"),
        ({"until": "2027-01-31T00:00:00"}, "until must be a date"),
        ({"case": '"x"'}, "unknown key 'case'; did you mean 'cases'?"),
        ({"check": "3"}, "check must be a check id or a list of them"),
        ({"check": '"matchs-oracle"'}, "no check 'matchs-oracle'; did you mean 'matches-oracle'?"),
        ({"cases": "3"}, "cases must be text, a glob on case ids, or a list of them"),
        ({"cases": "['decode-*', 3]"}, "cases must be text, a glob on case ids, or a list of them"),
        ({"cases": "['decode-*', '']"}, "cases must be text"),
        ({"cases": "[]"}, "entry 1: cases is missing"),
        ({"execution": '"graphs"'}, "execution = 'graphs'; did you mean 'graph'?"),
        ({"issue": '"#12"'}, "entry 1: issue = '#12' is not an address; write where it is followed up: https://..."),
        ({"issue": '"see https://example.org/12"'}, "is not an address"),
        ({"issue": '"https://"'}, "is not an address"),
        ({"until": "2999-01-01"}, "entry 1: until = 2999-01-01 is more than a year ahead; write 2"),
        ({"kind": '"flaky"'}, "is more than two weeks ahead, the longest time of what is flaky; write 2"),
        ({"kind": '"flaky"', "until": "2026-11-01", "check": None}, "entry 1: check is missing"),
        ({"when": '"on hopper"'}, "when: 'on hopper' is not one of smNN, cuda, emulated, PACKAGE<version"),
    ],
)
def test_a_malformed_entry_is_named_with_its_field(tmp_path, changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load_known(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[known]\n", "is not TOML"),
        ("[[knwon]]\ncases='x'\n", "unknown table 'knwon'; entries are written [[known]]"),
        ("version = 2\n", "has version 2; this kit reads version 1: update the kit"),
        ("[known]\ncases='x'\n", "entries are written [[known]], with two brackets"),
    ],
)
def test_a_malformed_file_is_one_clear_line(tmp_path, text, message):
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        load_known(tmp_path / "known.toml")


def test_another_check_than_the_named_one_is_still_a_failure():
    """A tolerated rounding error must not hide a write outside the batch's slots."""
    book = ledger(entry())
    assert book.judge(failed("matches-oracle")).status is Status.KNOWN_FAILURE
    assert book.judge(failed("writes-own-kv")).status is Status.FAILED
    assert book.judge(failed("matches-oracle", "writes-own-kv")).status is Status.FAILED


def test_two_entries_together_excuse_two_checks():
    book = ledger(entry(), entry(number=2, checks=("writes-own-kv",), issue="#13"))
    result = book.judge(failed("matches-oracle", "writes-own-kv"))
    assert result.status is Status.KNOWN_FAILURE
    assert result.reason == "#12, #13"


@pytest.mark.parametrize(("days", "fine"), [(0, True), (366, True), (367, False)])
def test_an_entry_is_looked_at_once_a_year(tmp_path, days, fine):
    path = written(tmp_path, until=TODAY + datetime.timedelta(days=days))
    if fine:
        assert load_known(path, TODAY)
    else:
        with pytest.raises(UsageError, match="write 2027-11-22 at the latest, and look again then"):
            load_known(path, TODAY)


def test_an_entry_wider_than_what_fails_is_an_error(tmp_path):
    """It would hide the next bug in the cases that it covers and that pass."""
    book = ledger(entry(cases="decode-*"))
    evaluated = [book.judge(each) for each in (failed("matches-oracle"), failed(status=Status.PASSED))]
    assert [each.status for each in evaluated] == [Status.KNOWN_FAILURE, Status.UNEXPECTEDLY_PASSED]
    assert exit_code(2, evaluated) == 1


@pytest.mark.parametrize("check", ["crashed", "matches-oracle"])
def test_no_entry_excuses_the_kits_own_errors(check):
    """A worker that cannot start says nothing about the backend; excused, it would be a green of nothing."""
    item = fake_runner.plan_run(backends=["fake:bug"]).items[0]
    ours = kit_error(item, "WorkerStartError: a worker could not start")
    book = ledger(entry(checks=(check,)))
    assert book.judge(ours) is ours
    assert exit_code(2, [book.judge(ours), book.judge(failed(status=Status.PASSED))]) == 3


def test_a_crash_is_excused_only_by_its_own_word():
    assert ledger(entry()).judge(failed(status=Status.CRASHED)).status is Status.CRASHED
    assert ledger(entry(checks=("crashed",))).judge(failed(status=Status.CRASHED)).status is Status.KNOWN_FAILURE
    assert ledger(entry(checks=("crashed",))).judge(failed(status=Status.TIMED_OUT)).status is Status.TIMED_OUT


def test_a_pass_under_an_entry_is_a_failure():
    """Otherwise entries outlive their bugs, and hide the next one."""
    result = ledger(entry()).judge(failed(status=Status.PASSED))
    assert result.status is Status.UNEXPECTEDLY_PASSED
    assert "narrow or remove the entry" in result.reason


def test_a_flaky_case_run_may_fail_as_it_says_or_pass_while_its_entry_holds():
    flaky = ledger(entry(kind="flaky"))
    assert flaky.judge(failed("matches-oracle")).status is Status.KNOWN_FAILURE
    assert flaky.judge(failed("finite")).status is Status.FAILED
    assert flaky.judge(failed(status=Status.PASSED)).status is Status.PASSED
    both = ledger(entry(kind="flaky"), entry(number=2, cases="*"))
    assert "known failure 2" in both.judge(failed(status=Status.PASSED)).reason
    assert flaky.tolerates("fake:ok", "graph", "decode-a")


@pytest.mark.parametrize(("days", "fine"), [(14, True), (15, False)])
def test_a_flaky_entry_is_looked_at_every_two_weeks(tmp_path, days, fine):
    until = TODAY + datetime.timedelta(days=days)
    path = written(tmp_path, kind='"flaky"', until=str(until))
    if fine:
        assert load_known(path, TODAY)[0].kind == "flaky"
    else:
        with pytest.raises(UsageError, match="write 2026-12-05 at the latest"):
            load_known(path, TODAY)


def test_an_expired_entry_excuses_nothing_and_fails_the_run():
    book = ledger(entry(until=datetime.date(2026, 11, 20)))
    assert book.judge(failed("matches-oracle")).status is Status.FAILED
    assert book.problems([("fake:ok", "graph", "decode-a")], lambda _: True) == [
        "known failure 1 (cases = 'decode-*', #12) expired on 2026-11-20"
    ]
    assert ledger(entry(until=TODAY)).judge(failed("matches-oracle")).status is Status.KNOWN_FAILURE


def test_an_expired_quarantine_still_keeps_the_device_alive():
    book = ledger(entry(kind="quarantine", until=datetime.date(2026, 1, 1)))
    assert book.quarantined("fake:ok", "decode", "graph", "decode-a").status is Status.QUARANTINED
    assert book.problems([("fake:ok", "graph", "decode-a")], lambda _: True)


def test_an_entry_holds_only_where_it_says():
    assert ledger(entry(execution="eager")).judge(failed("matches-oracle")).status is Status.FAILED
    assert ledger(entry(backend="other*")).judge(failed("matches-oracle")).status is Status.FAILED
    assert ledger(entry(when="sm90")).judge(failed("matches-oracle")).status is Status.FAILED
    assert ledger(entry(when="emulated and pytest>=9")).judge(failed("matches-oracle")).status is Status.KNOWN_FAILURE
    hopper = {"device": "cuda", "device_name": "NVIDIA H200 sm90"}
    assert ledger(entry(when="sm90 and cuda"), **hopper).judge(failed("matches-oracle")).status is Status.KNOWN_FAILURE
    assert ledger(entry(when="no-such-package<1")).judge(failed("matches-oracle")).status is Status.FAILED


def test_each_glob_of_a_list_must_match_a_case(tmp_path):
    found = load_known(written(tmp_path, cases="['decode-a*', 'decode-b*']"), TODAY)
    assert [(entry.number, entry.cases) for entry in found] == [(1, "decode-a*"), (1, "decode-b*")]
    (problem,) = ledger(*found).problems([("fake:ok", "eager", "decode-a1")], lambda _: False)
    assert problem == "known failure 1 (cases = 'decode-b*', https://example.org/12) matches no case"


def test_an_entry_that_matches_nothing_is_a_problem_unless_it_exists_beyond_this_run():
    book = ledger(entry(cases="gone-*"))
    runs = [("fake:ok", "graph", "decode-a")]
    assert book.problems(runs, lambda _: False) == ["known failure 1 (cases = 'gone-*', #12) matches no case"]
    assert book.problems(runs, lambda _: True) == []
    assert ledger(entry(cases="gone-*", backend="other*")).problems(runs, lambda _: False) == []


def test_one_is_warned_two_weeks_before():
    assert ledger(entry(until=datetime.date(2026, 12, 4))).warnings()
    assert not ledger(entry(until=datetime.date(2026, 12, 6))).warnings()


@pytest.mark.parametrize(("days", "warned"), [(-1, False), (0, True), (14, True), (15, False)])
def test_the_warning_begins_fourteen_days_before_and_ends_with_the_last_day(days, warned):
    until = TODAY + datetime.timedelta(days=days)
    found = ledger(entry(until=until)).warnings()
    assert found == ([f"known failure 1 (cases = 'decode-*', #12) expires on {until}"] if warned else [])


@pytest.mark.parametrize(
    ("backend", "execution", "case", "covered"),
    [
        ("my:A", "graph", "decode-a", True),
        ("my:A", "eager", "decode-a", False),
        ("other:A", "graph", "decode-a", False),
        ("my:A", "graph", "verify-a", False),
        ("my:A", "graph", "Decode-a", False),
    ],
)
def test_an_entry_covers_what_it_names(backend, execution, case, covered):
    assert entry(backend="my:*", execution="graph").covers(backend, execution, case) is covered


@pytest.mark.parametrize(
    ("cases", "exact"), [("decode-a", True), ("decode-*", False), ("decode-?", False), ("[d]a", False)]
)
def test_an_exact_entry_has_no_wildcard(cases, exact):
    assert entry(cases=cases).is_exact is exact


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": None}, "kind is missing"),
        ({"backend": "3"}, "backend must be text"),
        ({"execution": "3"}, "execution must be text"),
        ({"when": "3"}, "when must be text"),
        ({"issue": "3"}, "issue must be text"),
        ({"kind": "3"}, "kind must be text"),
        ({"check": "[3]"}, "check must be a check id or a list of them"),
        ({"check": "[]"}, "check is missing: name the check that may fail"),
        ({"kind": '"sometimes"'}, "kind = 'sometimes' (tolerated or quarantine or flaky)"),
        ({"until": "3"}, "until must be a date"),
    ],
)
def test_every_field_is_looked_at(tmp_path, changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load_known(written(tmp_path, **changes))


def test_several_checks_and_the_ways_a_case_run_ends_may_be_named(tmp_path):
    (found,) = load_known(written(tmp_path, check='["matches-oracle", "crashed", "timed out"]'))
    assert found.checks == ("matches-oracle", "crashed", "timed out")
    (found,) = load_known(written(tmp_path, kind='"quarantine"', check=None))
    assert found.checks == ()


def test_a_file_that_is_not_there_or_has_no_entries(tmp_path):
    with pytest.raises(UsageError, match=r"there is no file of known failures .*nowhere.toml"):
        load_known(tmp_path / "nowhere.toml")
    (tmp_path / "known.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not TOML"):
        load_known(tmp_path / "known.toml")
    (tmp_path / "known.toml").write_text("")
    assert load_known(tmp_path / "known.toml") == ()


def test_rows_of_a_whole_mode_and_other_statuses_are_left_as_they_are():
    book = ledger(entry(cases="*", checks=("matches-oracle", "crashed", "timed out")))
    row = CaseResult("fake:ok", "decode", "graph", "", Status.NOT_RUN_HERE)
    assert book.judge(row) is row
    for status in (Status.QUARANTINED, Status.NOT_RUN_HERE):
        result = failed(status=status)
        assert book.judge(result) is result
    empty = failed(status=Status.FAILED)
    assert book.judge(empty) is empty, "a failure without a finding is not the one that is named"
    assert book.judge(failed(status=Status.TIMED_OUT)).status is Status.KNOWN_FAILURE


def test_a_tolerated_entry_launches_and_a_quarantine_excuses_nothing():
    assert ledger(entry()).quarantined("fake:ok", "decode", "graph", "decode-a") is None
    book = ledger(entry(kind="quarantine"))
    assert book.judge(failed("matches-oracle")).status is Status.FAILED
    assert book.quarantined("fake:ok", "decode", "graph", "verify-a") is None
    row = book.quarantined("fake:ok", "decode", "graph", "decode-a")
    assert (row.backend, row.mode, row.execution, row.case, row.reason) == (
        "fake:ok",
        "decode",
        "graph",
        "decode-a",
        "#12",
    )
    elsewhere = ledger(entry(kind="quarantine", when="cuda"))
    assert elsewhere.quarantined("fake:ok", "decode", "graph", "decode-a") is None


def test_one_issue_is_named_once():
    book = ledger(entry(), entry(number=2))
    assert book.judge(failed("matches-oracle")).reason == "#12"


@pytest.mark.parametrize(
    ("when", "name", "holds"),
    [
        ("sm90", "NVIDIA H200 sm90", True),
        ("sm90", "NVIDIA H200 sm900", False),
        ("sm90 and sm91", "NVIDIA H200 sm90", False),
        ("  ", "CPU", True),
        ("pytest<1", "CPU", False),
        ("cuda", "CPU", False),
    ],
)
def test_every_condition_must_hold(when, name, holds):
    book = ledger(entry(when=when), device_name=name)
    assert (book.judge(failed("matches-oracle")).status is Status.KNOWN_FAILURE) is holds


def test_a_package_before_its_release_has_a_version_too(monkeypatch):
    monkeypatch.setattr(known_failures.metadata, "version", lambda name: "0.4rc1")
    assert ledger(entry(when="my-pkg>=0.3")).judge(failed("matches-oracle")).status is Status.KNOWN_FAILURE
    assert ledger(entry(when="my-pkg<0.4")).judge(failed("matches-oracle")).status is Status.FAILED


def test_a_quarantine_shows_the_crash_of_each_of_its_case_runs(tmp_path):
    """Never launched means never seen to fail: without a record a wrong case could be put out of sight for a year."""
    runs = [("fake:ok", execution, f"decode-ok-k{n}") for execution in ("eager", "graph") for n in (0, 1)]
    until = datetime.date(2027, 1, 31)

    def problems(*crashed: tuple[str, str, str]) -> list[str]:
        book = ledger(entry(kind="quarantine", until=until, crashed=frozenset(crashed)))
        return book.problems(runs, lambda _: True)

    assert problems(*runs) == []
    (problem,) = problems(*runs[1:])
    assert problem.startswith(
        "known failure 1 (cases = 'decode-*', #12) quarantines fake:ok eager decode-ok-k0, and no"
    )
    (problem,) = problems(*runs[:1])
    assert "quarantines fake:ok eager decode-ok-k1 and 2 more, and no record shows that it crashes" in problem
    assert len(problems(("other:B", "eager", "decode-ok-k0"), *runs[1:])) == 1, "the crash of another backend"
    assert ledger(entry()).problems(runs, lambda _: True) == [], "what is tolerated runs"


@pytest.mark.parametrize(("status", "shown"), [(Status.CRASHED, 4), (Status.TIMED_OUT, 4), (Status.FAILED, 0)])
def test_a_record_shows_crashes_and_timeouts_and_no_other_failure(tmp_path, status, shown):
    fake_runner.crash_record(tmp_path / "crash.json", "fake:ok", "*-ok-*", status)
    (found,) = load_known(written(tmp_path, kind='"quarantine"', check=None, record='"crash.json"'), TODAY)
    assert len(found.crashed) == shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": '"quarantine"', "record": '"none.json"'}, "record: cannot read"),
        ({"record": '"crash.json"'}, 'kind = "tolerated" runs the case, and needs none'),
        ({"kind": '"quarantine"', "record": "3"}, "record must be text"),
    ],
)
def test_a_record_that_shows_nothing_is_refused(tmp_path, changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load_known(written(tmp_path, **changes), TODAY)


def rows(*statuses: Status, mode: str = "decode", execution: str = "graph", family: str = "gqa") -> list[CaseResult]:
    return [
        CaseResult("fake:ok", mode, execution, f"{mode}-{family}4x2-k{n}{execution}", status)
        for n, status in enumerate(statuses)
    ]


@pytest.mark.parametrize("excuse", [Status.KNOWN_FAILURE, Status.QUARANTINED])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ({"family": "mla"}, "decode graph mla"),
        ({"execution": "eager"}, "decode eager gqa"),
        ({"mode": "extend"}, "extend graph gqa"),
    ],
)
def test_in_each_mode_execution_and_family_something_has_to_pass(excuse, place, name):
    header = replace(fake_runner.plan_run(backends=["fake:ok"]).header, planned=3)
    good = [*rows(Status.PASSED), *rows(Status.PASSED, excuse, **place)]
    assert conclude(header, good).conforms
    bad = [*rows(Status.PASSED), *rows(excuse, excuse, **place)]
    found = conclude(header, bad)
    assert (found.word, found.code) == ("NOT CONFORMANT", 1)
    assert found.text.endswith(f"; nothing is known to work in {name}")


def test_a_selection_of_cases_may_hold_only_excused_ones_of_a_place_and_one_of_modes_may_not():
    header = replace(fake_runner.plan_run(backends=["fake:ok"]).header, planned=2)
    found = [*rows(Status.PASSED), *rows(Status.KNOWN_FAILURE, execution="eager")]
    for by, code in (("case 'x'", 0), ("shard 1/2", 0), ("mode decode", 1), ("execution eager", 1)):
        assert conclude(replace(header, selection=Selection((by,), 4)), found).code == code
