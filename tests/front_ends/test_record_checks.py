"""A results file that contradicts itself is refused when it is read, whoever changed it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runner import known
from signed import of_an_earlier_version, signed

from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit.reports.record import read_report


@pytest.fixture
def call(fake, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        return code, *capfd.readouterr()

    return _call


@pytest.fixture
def record(call) -> dict[str, Any]:
    call("run", "--backend", "fake:ok,wrong", "--json", "out.json")
    found: dict[str, Any] = json.loads(Path("out.json").read_text())
    return found


def read(data: dict[str, Any]) -> None:
    Path("changed.json").write_text(json.dumps(data))
    read_report("changed.json")


def test_the_layout_of_the_json_may_change_and_nothing_else(record):
    Path("changed.json").write_text(json.dumps(record, indent=3, sort_keys=True))
    assert read_report("changed.json") == read_report("out.json")
    record["header"]["tier"] = "core"
    with pytest.raises(UsageError, match="was changed after it was written: its digest is sha256:"):
        read(record)


def failed_row(record: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in record["results"] if row["status"] == "failed")


@pytest.mark.parametrize("name", ["finished", "exit_code", "problems", "interrupted"])
def test_the_digest_holds_how_the_run_ended(record, name):
    value = {"finished": False, "exit_code": 3, "problems": ["x"], "interrupted": True}[name]
    with pytest.raises(UsageError, match="was changed after it was written"):
        read({**record, name: value})


def test_a_removed_digest_is_missed_and_a_file_of_an_earlier_version_is_read(record):
    del record["digest"]
    with pytest.raises(UsageError, match="has no digest: somebody removed it"):
        read(record)
    read(of_an_earlier_version(record))


def green(record: dict[str, Any]) -> None:
    record |= {"exit_code": 0}


def recounted(record: dict[str, Any]) -> None:
    record["counts"] = {"passed": 8}


def foreign(record: dict[str, Any]) -> None:
    failed_row(record)["backend"] = "other:B"


def passed_with_a_finding(record: dict[str, Any]) -> None:
    failed_row(record)["status"] = "passed"
    record["counts"] = {"failed": 3, "passed": 5}


def passed_beyond_the_limit(record: dict[str, Any]) -> None:
    passed_with_a_finding(record)
    failed = next(row for row in record["results"] if row["findings"])
    failed |= {"findings": [], "status": "passed"}


def twice(record: dict[str, Any]) -> None:
    record["results"].append(failed_row(record))
    record["counts"] = {"failed": 5, "passed": 4}


def unfinished_with_a_code(record: dict[str, Any]) -> None:
    record |= {"exit_code": None}


def too_many_planned(record: dict[str, Any]) -> None:
    record["header"]["planned"] = 0
    record |= {"exit_code": 5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (green, "says exit code 0, but 4 of its case-runs did not pass"),
        (recounted, "says counts {'passed': 8}, but its results give {"),
        (foreign, "has a result of other:B, which is not one of its backends: fake:ok,wrong"),
        (passed_with_a_finding, "passed, with the finding 'request 3 differs from the oracle"),
        (passed_beyond_the_limit, "passed, with an error of 56 times the limit"),
        (twice, "has the result of fake:ok,wrong eager decode-wrong-k1 more than once"),
        (unfinished_with_a_code, "says that the run finished, with exit code None"),
        (too_many_planned, "says exit code 5, but its results give 1"),
    ],
)
def test_what_cannot_be_true_is_named_although_the_digest_is_right(record, change, message):
    read(signed(record))
    change(record)
    with pytest.raises(UsageError) as error:
        read(signed(record))
    assert message in str(error.value)


def test_an_earlier_version_is_believed_in_what_its_rules_may_have_been(record):
    """Only what no version would say is refused: exit code 0 with failures."""
    read(of_an_earlier_version({**record, "exit_code": 5}))
    with pytest.raises(UsageError, match="says exit code 0, but 4 of its case-runs did not pass"):
        read(of_an_earlier_version({**record, "exit_code": 0}))


@pytest.mark.parametrize(
    "argv",
    [
        ("results", "report", "changed.json", "--markdown"),
        ("results", "compare", "out.json", "changed.json"),
        ("results", "compare", "changed.json", "out.json"),
        ("run", "--backend", "fake:ok,wrong", "--rest-of", "changed.json"),
    ],
)
def test_every_command_that_reads_a_file_refuses_an_edited_one(call, record, argv):
    record["header"]["planned"] = 4
    Path("changed.json").write_text(json.dumps(record))
    code, out, err = call(*argv)
    assert (code, out) == (4, "")
    assert "changed.json was changed after it was written" in err


def run(call, name: str, backend: str = "fake:ok", *more: str) -> None:
    call("run", "--backend", backend, "--json", name, *more)


def test_comparing_without_a_base_is_as_red_as_the_new_run(call):
    Path("nights").mkdir()
    for backend, code in (("fake:ok", 0), ("fake:wrong", 1), ("fake:bug", 3), ("fake:", 5)):
        run(call, "new.json", backend)
        found = call("results", "compare", "nights", "new.json")
        assert found[0] == code
        assert found[2].splitlines()[-1] == call("run", "--backend", backend)[1].splitlines()[-1]


def changed(source: str, target: str, **values: object) -> None:
    data = json.loads(Path(source).read_text())
    data["header"]["started"] = values.pop("started", data["header"]["started"])
    data |= values
    Path(target).write_text(json.dumps(signed(data)))


def test_a_new_run_that_did_not_finish_is_worse(call):
    run(call, "old.json")
    changed("old.json", "new.json", finished=False, exit_code=None)
    code, out, _ = call("results", "compare", "old.json", "new.json")
    assert code == 1
    assert "problem: the new run did not finish" in out.splitlines()


def test_a_problem_that_only_the_new_run_has_is_worse(call):
    run(call, "old.json")
    changed("old.json", "new.json", problems=["known failure 1 expired"], exit_code=1)
    code, out, _ = call("results", "compare", "old.json", "new.json")
    assert code == 1
    assert "problem: known failure 1 expired" in out.splitlines()
    changed("old.json", "older.json", problems=["known failure 1 expired"], exit_code=1, started="2026-01-01T00:00:00")
    assert call("results", "compare", "older.json", "new.json")[0] == 0


def test_a_case_run_that_passed_and_is_excused_now_is_listed(call):
    run(call, "old.json", "fake:ok,ok")
    data = json.loads(Path("old.json").read_text())
    data["results"] = [
        {**row, "status": "known failure"} if row["case"] == "decode-ok-k0" else row for row in data["results"]
    ]
    data["counts"] = {"passed": 6, "known failure": 2}
    Path("new.json").write_text(json.dumps(signed(data)))
    code, out, _ = call("results", "compare", "old.json", "new.json")
    assert code == 0
    assert "newly excused as known failures: 2" in out
    assert "newly excused" not in call("results", "compare", "new.json", "old.json")[1]


def test_a_night_of_a_part_is_no_base_for_a_whole_one(call):
    """It lacks what it left out, so nothing of that could newly fail or vanish."""
    Path("nights").mkdir()
    run(call, "whole.json")
    changed("whole.json", "nights/a.json", started="2026-01-01T00:00:00+00:00")
    run(call, "part.json", "fake:ok", "--mode", "decode")
    changed("part.json", "nights/b.json", started="2026-01-02T00:00:00+00:00")
    code, out, _ = call("results", "compare", "nights", "part.json")
    assert (code, out.splitlines()[-1]) == (0, "not worse: 0 newly failing, 0 vanished, 0 margins that shrank, "
        "0 still failing, 0 newly passing, 0 new case-runs")  # fmt: skip
    code, out, _ = call("results", "compare", "nights", "whole.json")
    assert (code, out.splitlines()[-1].rpartition(", ")[2]) == (0, "0 new case-runs"), "compared with a.json"
    Path("nights/a.json").unlink()
    assert "nothing to compare with" in call("results", "compare", "nights", "whole.json")[2]


def test_the_digest_is_made_again_with_every_result(call):
    run(call, "out.json", f"fake:{','.join(['ok', *['dies'] * 5])}")
    report = read_report("out.json")
    assert not report.finished
    assert [row.status.value for row in report.results if row.case] == ["passed", *["crashed"] * 5]


def test_known_failures_are_read_back_as_they_were(call):
    Path("known.toml").write_text(known("*-wrong-*"))
    run(call, "out.json", "fake:ok,wrong", "--known-failures", "known.toml")
    assert read_report("out.json").exit_code == 0
