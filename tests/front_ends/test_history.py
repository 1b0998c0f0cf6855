"""Earlier nights: which of a folder count, since when a failure is red, and what the commands say of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import nights
import pytest

from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit.reports.history import Age, age_of, key_of, last_night, night_of, read_history
from attn_testkit.reports.record import Record, Report
from attn_testkit.results.case_result import CaseResult, Status

CASE = "decode-mha2-d64-bf16-p1-k1-shuffled-gauss-b1prod"
OTHER = CASE.replace("k1", "k2")
KEY = ("b", "decode", "eager", CASE)


def run(status: Status | None, case: str = CASE) -> list[CaseResult]:
    return [] if status is None else [CaseResult("b", "decode", "eager", case, status, device="cuda")]


def report(status: Status | None, day: int, *, finished: bool = True, **header: object) -> Report:
    """A night of November with one case-run, or none, beside one that passed."""
    made = nights.night([*run(status), *run(Status.PASSED, OTHER)], f"2026-11-{day:02d}T02:17:00+00:00")
    return replace(made, header=replace(made.header, **header), finished=finished)  # type: ignore[arg-type]


def write(folder: Path, name: str, made: Report) -> Path:
    record = Record(folder / name, made.header)
    for result in made.results:
        record.add(result)
    if made.finished:
        record.finish(made.exit_code or 0)
    else:
        record.close()
    return folder / name


TONIGHT = report(Status.FAILED, 20)


def test_nights_are_ordered_by_when_they_started_and_not_by_their_names(tmp_path):
    for name, day in (("a.json", 12), ("b.json", 10), ("c.json", 11)):
        write(tmp_path, name, report(Status.PASSED, day))
    found = read_history(tmp_path, TONIGHT)
    assert [night.started[8:10] for night in found.nights] == ["10", "11", "12"]
    assert found.last == tmp_path / "a.json"
    assert found.remarks == ()


def test_only_nights_before_this_one_count(tmp_path):
    for day in (19, 20, 21):
        write(tmp_path, f"{day}.json", report(Status.PASSED, day))
    assert [night.started[8:10] for night in read_history(tmp_path, TONIGHT).nights] == ["19"]


def test_what_cannot_be_compared_or_read_costs_a_remark_and_no_more(tmp_path):
    write(tmp_path, "a.json", report(Status.PASSED, 10))
    write(tmp_path, "smoke.json", report(Status.PASSED, 11, tier="smoke"))
    write(tmp_path, "laptop.json", report(Status.PASSED, 12, device="emulated"))
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "audit.json").write_text('{"format": "attn-testkit-report/1"}')
    (tmp_path / "notes.txt").write_text("no record")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "null.json").write_text('{"format": "attn-testkit-report/1", "header": null}')
    odd = json.loads((tmp_path / "a.json").read_text())
    odd["results"][0]["status"] = "skipped"
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    found = read_history(tmp_path, TONIGHT)
    assert len(found.nights) == 1
    assert found.remarks == (
        "audit.json cannot be read: KeyError",
        "folder.json cannot be read: IsADirectoryError",
        "laptop.json is of another device: emulated",
        "list.json is not a results file that this kit reads",
        "null.json cannot be read: TypeError",
        "odd.json cannot be read: ValueError",
        "smoke.json is of another tier: smoke",
        "torn.json cannot be read: JSONDecodeError",
    )
    with pytest.raises(UsageError, match="is not a folder"):
        read_history(tmp_path / "none", TONIGHT)


def test_the_night_to_compare_with_is_the_newest_that_finished(tmp_path):
    write(tmp_path, "a.json", report(Status.PASSED, 10))
    write(tmp_path, "b.json", report(Status.PASSED, 11, finished=False))
    found = read_history(tmp_path, TONIGHT)
    assert [night.finished for night in found.nights] == [True, False]
    assert found.last == tmp_path / "a.json"
    assert last_night(tmp_path, TONIGHT) == report(Status.PASSED, 10)
    assert last_night(tmp_path, report(Status.PASSED, 10)) is None


def test_a_night_counts_what_passed_what_is_red_and_what_it_has_of_each_backend():
    made = report(Status.FAILED, 1)
    known = replace(made.results[0], status=Status.KNOWN_FAILURE, case=CASE + "-multi_mode")
    row = CaseResult("c", "decode", "graph", "", Status.NOT_RUN_HERE)
    night = night_of(replace(made, results=(*made.results, known, row)))
    assert (dict(night.passed), dict(night.red), dict(night.declared)) == ({"b": 1}, {"b": 1}, {"b": 3})


def test_a_history_has_the_statuses_of_what_is_red_tonight_alone(tmp_path):
    write(tmp_path, "a.json", report(Status.TIMED_OUT, 10))
    (night,) = read_history(tmp_path, TONIGHT).nights
    assert night.statuses == {KEY: Status.TIMED_OUT}
    assert night.declared == {"b": 2}
    (night,) = read_history(tmp_path, report(Status.PASSED, 20)).nights
    assert night.statuses == {}


def day(number: int) -> str:
    return f"2026-11-{number:02d}T02:17:00+00:00"


PASSED, FAILED, KNOWN = Status.PASSED, Status.FAILED, Status.KNOWN_FAILURE


@pytest.mark.parametrize(
    ("before", "age"),
    [
        ([PASSED], Age("", 1, or_earlier=False)),
        ([FAILED, PASSED], Age("", 1, or_earlier=False)),
        ([PASSED, FAILED], Age(day(2), 2, or_earlier=False)),
        ([FAILED, PASSED, FAILED, Status.CRASHED], Age(day(3), 3, or_earlier=False)),
        ([FAILED], Age(day(1), 2, or_earlier=True)),
        ([FAILED, FAILED], Age(day(1), 3, or_earlier=True)),
        # A night that tells nothing is passed over.
        ([PASSED, FAILED, None], Age(day(2), 2, or_earlier=False)),
        ([FAILED, None, FAILED], Age(day(1), 3, or_earlier=True)),
        ([PASSED, FAILED, Status.NOT_RUN_HERE], Age(day(2), 2, or_earlier=False)),
        ([None], Age("", 1, or_earlier=False)),
        # What was tolerated then is red since it is not.
        ([FAILED, KNOWN], Age("", 1, or_earlier=False)),
        ([FAILED, Status.QUARANTINED, FAILED], Age(day(3), 2, or_earlier=False)),
        ([PASSED, Status.UNEXPECTEDLY_PASSED], Age(day(2), 2, or_earlier=False)),
        ([], None),
    ],
)
def test_since_when_a_case_run_has_been_red(before, age):
    found = [night_of(report(status, number)) for number, status in enumerate(before, 1)]
    assert age_of(found, KEY) == age


def test_a_seed_changes_no_case_and_a_case_of_another_seed_is_another():
    result = replace(run(FAILED)[0], case=CASE + "-s7")
    assert key_of(result, 7) == KEY
    assert key_of(result, 0) == ("b", "decode", "eager", CASE + "-s7")
    assert key_of(run(FAILED)[0], 0) == key_of(run(FAILED)[0], 7) == KEY


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Call the command line: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "out.json", TONIGHT)

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        return code, *capsys.readouterr()

    return _call


def test_a_page_with_a_history_says_what_is_new_and_what_is_not(call, tmp_path):
    (tmp_path / "nights").mkdir()
    write(tmp_path / "nights", "a.json", report(PASSED, 10))
    write(tmp_path / "nights", "b.json", report(FAILED, 11))
    code, out, err = call("results", "report", "out.json", "--html", "out.html", "--markdown", "--history", "nights")
    assert (code, err) == (0, "")
    page = (tmp_path / "out.html").read_text()
    assert "red since 2026-11-11, 2 nights" in page
    assert "Over 3 nights" in page
    assert "nothing newly failing, 1 still failing." in page
    assert "Since the previous night (2026-11-11 02:17): 0 newly failing, 0 vanished, 0 newly passing, 1 still" in out
    assert "red since 2026-11-11, 2 nights" in out


def test_the_night_before_can_be_named(call, tmp_path):
    write(tmp_path, "before.json", report(PASSED, 19))
    code, out, _ = call(
        "results", "report", "out.json", "--html", "out.html", "--markdown", "--previous", "before.json"
    )
    assert code == 0
    page = (tmp_path / "out.html").read_text()
    assert '<a href="#failures" class="bad-number">1 newly failing</a>' in page
    assert "new tonight" in page
    assert "<b>new tonight</b>" in out


def test_a_first_night_has_no_history_and_nothing_to_compare_with(call, tmp_path):
    (tmp_path / "nights").mkdir()
    assert call("results", "report", "out.json", "--html", "out.html", "--history", "nights") == (0, "", "")
    page = (tmp_path / "out.html").read_text()
    assert "Over " not in page
    assert 'id="changes"' not in page
    assert "new tonight" not in page
    code, out, err = call("results", "compare", "nights", "out.json")
    assert (code, out) == (1, ""), "it is red by itself"
    assert err.splitlines() == [
        "nothing to compare with: nights has no finished run of this tier and device before NEW",
        "NOT CONFORMANT: 1 failed of 2 planned case-runs",
    ]


def test_comparing_with_a_folder_is_comparing_with_its_last_night(call, tmp_path):
    (tmp_path / "nights").mkdir()
    write(tmp_path / "nights", "a.json", report(FAILED, 10))
    write(tmp_path / "nights", "b.json", report(PASSED, 11))
    code, out, _ = call("results", "compare", "nights", "out.json")
    assert code == 1
    assert out.splitlines()[-1].startswith("WORSE: 1 newly failing")


@pytest.mark.parametrize("option", ["--history", "--previous"])
def test_what_is_not_there_is_one_line(call, option):
    code, out, err = call("results", "report", "out.json", "--markdown", option, "nothing")
    assert (code, out) == (4, "")
    assert err.startswith("attn-testkit: ")
    assert "nothing" in err
    assert err.count("\n") == 1
