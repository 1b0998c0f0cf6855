"""Known failures: what an entry may excuse, for how long, and what is said about one that is wrong."""

from __future__ import annotations

import datetime
import re

import fake_runner
import pytest

from attn_testkit.registry import UsageError
from attn_testkit.results import CaseResult, Finding, Status
from attn_testkit.running.known_failures import KnownFailure, Ledger, load_known

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
        ({"cases": "3"}, "cases must be text"),
        ({"execution": '"graphs"'}, "execution = 'graphs'; did you mean 'graph'?"),
        ({"when": '"on hopper"'}, "when: 'on hopper' is none of smNN, cuda, emulated, PACKAGE<version"),
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


def test_a_crash_is_excused_only_by_its_own_word():
    assert ledger(entry()).judge(failed(status=Status.CRASHED)).status is Status.CRASHED
    assert ledger(entry(checks=("crashed",))).judge(failed(status=Status.CRASHED)).status is Status.KNOWN_FAILURE
    assert ledger(entry(checks=("crashed",))).judge(failed(status=Status.TIMED_OUT)).status is Status.TIMED_OUT


def test_a_pass_under_an_entry_is_a_failure():
    """Otherwise entries outlive their bugs, and hide the next one."""
    result = ledger(entry()).judge(failed(status=Status.PASSED))
    assert result.status is Status.UNEXPECTEDLY_PASSED
    assert "narrow or remove the entry" in result.reason


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


def test_an_entry_that_matches_nothing_is_a_problem_unless_it_exists_beyond_this_run():
    book = ledger(entry(cases="gone-*"))
    runs = [("fake:ok", "graph", "decode-a")]
    assert book.problems(runs, lambda _: False) == ["known failure 1 (cases = 'gone-*', #12) matches no case"]
    assert book.problems(runs, lambda _: True) == []
    assert ledger(entry(cases="gone-*", backend="other*")).problems(runs, lambda _: False) == []


def test_one_is_warned_two_weeks_before():
    assert ledger(entry(until=datetime.date(2026, 12, 4))).warnings()
    assert not ledger(entry(until=datetime.date(2026, 12, 6))).warnings()
