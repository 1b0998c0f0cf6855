"""The nightly job: its page and its summary are of this night, and red unless everything is as it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from signed import signed

from attn_testkit.reports.record import Record
from attn_testkit.reports.verdict import conclude

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "front_ends"
INSTALL_FAKE = "from attn_testkit.running.processes import judge_process\njudge_process.RUNNER = 'fake_runner'\n"


@pytest.fixture
def night(tmp_path: Path):
    """Run the job on the fake judge into ``out``: (exit code, what it printed)."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(INSTALL_FAKE)
    out = tmp_path / "out"
    out.mkdir()

    def _run(*args: str, **more: str) -> tuple[int, str]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{site}:{FAKES}",
            "ATTN_PYTHON": sys.executable,
            "ATTN_TIER": "smoke",
            "ATTN_WORKERS": "0",
            "GITHUB_STEP_SUMMARY": "",
            **more,
        }
        command = ["bash", str(ROOT / "ci" / "nightly.sh"), str(out), *args]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        return done.returncode, done.stdout + done.stderr

    _run.out = out  # type: ignore[attr-defined]
    return _run


def files(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


def test_a_good_night_is_green_and_nothing_of_an_earlier_one_is_left(night):
    for name in ("compare.txt", "audit.html", "audit.json", "audit.txt", "report.html"):
        (night.out / name).write_text("of a night before")
    (night.out / "mine.txt").write_text("not ours")
    code, printed = night(ATTN_BACKENDS="fake:ok", ATTN_WORKERS="2")
    assert code == 0, printed
    assert files(night.out) == {"report.json", "report.html", "summary.md", "junit.xml", "mine.txt"}
    assert (night.out / "summary.md").read_text().startswith("### ✅ CONFORMANT (smoke): 4 of 4")
    assert "of a night before" not in (night.out / "report.html").read_text()


def test_the_night_before_may_be_the_file_that_is_overwritten(night):
    assert night(ATTN_BACKENDS="fake:ok fake:full")[0] == 0
    code, printed = night(str(night.out / "report.json"), ATTN_BACKENDS="fake:ok")
    assert code == 1, printed
    assert "WORSE: 0 newly failing, 4 vanished" in (night.out / "compare.txt").read_text()


def test_a_backend_that_cannot_be_imported_any_more_is_a_failing_row_and_the_others_run(night):
    code, printed = night(ATTN_BACKENDS="fake:ok gone")
    assert code == 1, printed
    summary = (night.out / "summary.md").read_text()
    assert summary.startswith("### ❌ NOT CONFORMANT: 1 failed of 5 planned case-runs")
    assert "unknown backend 'gone'" in summary
    assert "unknown backend &#39;gone&#39;" in (night.out / "report.html").read_text()


def test_every_registered_backend_is_taken_also_one_that_does_not_load(night):
    code, printed = night()
    assert code == 1, printed
    assert "unknown backend 'torch_native'" in (night.out / "summary.md").read_text()


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (
            {"ATTN_BACKENDS": "fake:"},
            5,
            "NOTHING RAN: of 12 pairs of mode and execution 1 not declared, 1 not runnable",
        ),
        ({"ATTN_BACKENDS": "fake:ok", "ATTN_TIER": "smok"}, 4, "pytest ended with exit code 4 before it had a record"),
        ({"ATTN_PYTHON": "PYTHON_THAT_LISTS_NOTHING"}, 5, "no backend is registered, or attn-testkit list failed"),
    ],
)
def test_a_night_in_which_nothing_ran_has_a_red_page_and_a_red_summary(night, tmp_path, more, code, said):
    """Yesterday's green page in today's place is the worst that a nightly job can show."""
    (night.out / "report.html").write_text("yesterday, green")
    (night.out / "report.json").write_text("{}")
    if "ATTN_PYTHON" in more:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\ncase "$*" in *list*) exit 3;; esac\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        more = {"ATTN_PYTHON": str(python)}
    found, printed = night(**more, GITHUB_STEP_SUMMARY=str(tmp_path / "step.md"))
    assert found == code, printed
    summary, page = ((night.out / name).read_text() for name in ("summary.md", "report.html"))
    assert summary.startswith("### ❌ NOTHING RAN")
    assert said in summary
    assert said in page
    assert "<title>✗" in page
    assert (tmp_path / "step.md").read_text() == summary


def test_a_record_that_is_not_complete_is_no_green(night, tmp_path):
    """As where the disk was full."""
    (tmp_path / "site" / "sitecustomize.py").write_text(
        INSTALL_FAKE + "from attn_testkit.reports import record\n"
        "record.Record.finish = lambda self, *args, **more: self.close()\n"
    )
    code, printed = night(ATTN_BACKENDS="fake:ok")
    assert code == 1, printed
    assert (night.out / "summary.md").read_text().startswith("### ❌ INCOMPLETE")


def test_a_first_night_makes_the_folder_and_puts_its_record_there(night, tmp_path):
    code, printed = night("nights/of/h200", ATTN_BACKENDS="fake:ok")
    assert code == 0, printed
    (kept,) = (tmp_path / "nights" / "of" / "h200").iterdir()
    assert kept.name.startswith("night-20")
    assert kept.read_bytes() == (night.out / "report.json").read_bytes()
    assert files(night.out) == {"report.json", "report.html", "summary.md", "junit.xml"}
    assert "nothing to compare with" in printed


def test_a_later_night_is_compared_with_the_last_one_and_its_page_knows_all(night, tmp_path):
    assert night(ATTN_BACKENDS="fake:ok fake:full")[0] == 0
    record = json.loads((night.out / "report.json").read_text())
    (tmp_path / "nights").mkdir()
    for name, day, backends in (("a", 19, ("fake:ok",)), ("b", 18, ("fake:ok", "fake:full"))):
        results = [result for result in record["results"] if result["backend"] in backends]
        ran = sum(bool(result["case"]) for result in results)
        header = {**record["header"], "started": f"2026-11-{day}T04:00:00+00:00", "planned": ran}
        night_before = {**record, "header": header, "results": results, "counts": {"passed": ran}}
        (tmp_path / "nights" / f"{name}.json").write_text(json.dumps(signed(night_before)))
    code, printed = night("nights", ATTN_BACKENDS="fake:ok fake:wrong")
    assert code == 1, printed
    # b.json knows of fake:full, which is not there any more; the last night is a.json, whatever its name.
    assert "WORSE: 4 newly failing, 0 vanished" in (night.out / "compare.txt").read_text()
    page = (night.out / "report.html").read_text()
    assert "Over 3 nights" in page
    assert "4 newly failing" in page
    assert len(list((tmp_path / "nights").iterdir())) == 3


def test_of_too_many_records_the_oldest_that_the_job_put_there_go_and_no_other(night, tmp_path):
    folder = tmp_path / "nights"
    folder.mkdir()
    for day in (1, 2, 3):
        (folder / f"night-2026110{day}T020000Z.json").write_text("{}")
    (folder / "mine.json").write_text("{}")
    code, printed = night("nights", ATTN_BACKENDS="fake:ok", ATTN_NIGHTS="3")
    assert code == 0, printed
    names = sorted(path.name for path in folder.iterdir())
    assert names[:3] == ["mine.json", "night-20261102T020000Z.json", "night-20261103T020000Z.json"]
    assert len(names) == 4


def test_an_earlier_record_that_cannot_be_read_costs_no_page(night, tmp_path):
    """And the night is not green: what it would have told is not known."""
    (tmp_path / "before.json").write_text("{")
    code, printed = night("before.json", ATTN_BACKENDS="fake:ok")
    assert code == 4, printed
    assert "previous.json is not JSON" in printed
    assert (night.out / "summary.md").read_text().startswith("### ✅ CONFORMANT (smoke): 4 of 4")
    assert "CONFORMANT (smoke): 4 of 4" in (night.out / "report.html").read_text()


def test_a_red_night_without_news_has_an_exit_code_of_its_own_and_knows_the_last_green_one(night, tmp_path):
    """8: what fails failed the night before, too."""
    sys.path.insert(0, str(FAKES))
    import fake_runner

    (tmp_path / "nights").mkdir()
    for day, backends in ((18, ["fake:ok"]), (19, ["fake:ok", "fake:inf"])):
        plan = fake_runner.plan_run(backends=backends)
        header = replace(plan.header, started=f"2026-11-{day}T04:00:00+00:00")
        record = Record(tmp_path / "nights" / f"{day}.json", header)
        results = (*plan.preset, *map(fake_runner.run_item, plan.items))
        for result in results:
            record.add(result)
        record.finish(conclude(header, results).code)
    code, printed = night("nights", ATTN_BACKENDS="fake:ok fake:inf")
    assert code == 8, printed
    last, green = (night.out / "compare.txt").read_text().split("== since the last green night\n")
    assert "not worse: 0 newly failing" in last
    assert "WORSE: 4 newly failing" in green


def test_several_machines_share_a_night_and_one_gathers_it(night, tmp_path):
    for number in (1, 2):
        code, printed = night(ATTN_BACKENDS="fake:ok fake:full", ATTN_SHARD=f"{number}/2")
        assert code == 0, printed
        assert (night.out / "summary.md").read_text().startswith(f"### ✅ SHARD {number}/2")
        place = tmp_path / "shards" / str(number)
        place.mkdir(parents=True)
        (night.out / "report.json").rename(place / "report.json")
    code, printed = night(str(tmp_path / "nights"), ATTN_SHARDS="shards/*/report.json")
    assert code == 0, printed
    assert (night.out / "summary.md").read_text().startswith("### ✅ CONFORMANT (smoke): 8 of 8")
    assert len([*(tmp_path / "nights").iterdir()]) == 1, "the merged night is kept"
    (tmp_path / "shards" / "2" / "report.json").unlink()
    code, printed = night(str(tmp_path / "nights"), ATTN_SHARDS="shards/*/report.json")
    assert code == 4, printed
    assert "shard 2/2 is missing" in (night.out / "summary.md").read_text()
    assert "<title>✗" in (night.out / "report.html").read_text()
    assert len([*(tmp_path / "nights").iterdir()]) == 1
