"""``attn-testkit fuzz`` for real: a planted fault is found and made small, and whatever ends it leaves a record.

One test is of a command in its own process, with a judge and workers in theirs; the others judge here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("hypothesis")

from judge_here import interrupting, sent_here

from attn_testkit.cases.case import parse_case
from attn_testkit.cli import main
from attn_testkit.reports.record import read_report, schema
from attn_testkit.reports.render import html_page
from attn_testkit.results.case_result import Status

FAULT = "attn_testkit_corpus.faults.d_kv_extent:PartialLastPageDropped"
FEW = ("--mode", "decode", "--execution", "eager", "--device", "cpu", "--minutes", "5")


@pytest.fixture
def fuzz(evaluated_here, in_folder):
    """The command with a judge in this process."""
    return in_folder


@pytest.fixture
def in_folder(capfd, tmp_path, monkeypatch):
    """Runs the command in a folder of the test: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def _in_folder(*argv: str) -> tuple[int, str, str]:
        code = main(["fuzz", *argv])
        return code, *capfd.readouterr()

    return _in_folder


def test_a_planted_fault_is_found_made_small_and_tried_first_the_next_time(fuzz, tmp_path: Path) -> None:
    # With the oldest Hypothesis that is taken it is small after 68.
    code, out, err = fuzz("--backend", FAULT, *FEW, "--runs", "90", "--json", "a.json")
    assert code == 1, out + err
    assert out.splitlines()[-1].startswith("found 1 kind of failure in ")
    assert "  needs    page_size\n" in out
    (line,) = (tmp_path / ".attn-testkit-fuzz" / "failures.tsv").read_text().splitlines()
    backend, execution, case, check = line.split("\t")
    assert (backend, execution, check) == (FAULT, "eager", "matches-oracle")
    assert parse_case(case).page_size > 1
    jsonschema.validate(json.loads((tmp_path / "a.json").read_text()), schema())
    report = read_report(tmp_path / "a.json")
    assert (report.header.tier, report.finished, report.exit_code) == ("fuzz", True, 1)
    assert report.results[-1].case == case
    assert "CONFORMANT" not in html_page(report)
    again, out, _ = fuzz("--backend", FAULT, *FEW, "--runs", "1")
    assert again == 1
    assert out.startswith(f"{case}: ")


def test_a_healthy_backend_gives_nothing_and_what_passes_now_is_no_longer_kept(fuzz, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    case = "decode-mha2-d32-bf16-p2-k0-contiguous-gauss-b1prod"
    (folder / "failures.tsv").write_text(f"torch_native\teager\t{case}\tmatches-oracle\n")
    code, out, err = fuzz("--backend", "torch_native", *FEW, "--runs", "25", "--database", "db", "--json", "a.json")
    assert code == 0, out + err
    assert (
        out.splitlines()[-1]
        == "found no failure in 25 random case-runs; `attn-testkit run` says whether the backend conforms"
    )
    assert f"no longer fails: {case} (eager)" in err
    assert (folder / "failures.tsv").read_text() == ""
    report = read_report(tmp_path / "a.json")
    assert [r.status for r in report.results] == [Status.PASSED] * 25
    assert html_page(report).count("of 25 random case-runs 25 passed") >= 1


ENDLESS = ("--backend", "torch_native", *FEW, "--json", "a.json")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_whatever_ends_it_leaves_a_record_that_can_be_read(
    in_folder, how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_testkit.cli.one_by_one.JudgeProcess", interrupting(how, before=4))
    with sent_here():
        code, out, _ = in_folder(*ENDLESS)
    report = read_report(tmp_path / "a.json")
    assert report.results
    assert not report.finished
    assert (code, report.exit_code, report.interrupted) == (2, 2, True)
    assert out.splitlines()[-1].startswith("found no failure in ")


def test_a_command_in_a_process_of_its_own_leaves_the_same_and_a_record_at_every_moment(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        [sys.executable, "-m", "attn_testkit", "fuzz", *ENDLESS],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    until = time.monotonic() + 120
    while time.monotonic() < until and not _results(tmp_path / "a.json"):
        time.sleep(0.1)
    # Stopped wherever it is, it has left what SIGKILL would leave.
    running.send_signal(signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, running.pid, os.WSTOPPED | os.WNOWAIT)
        killed = read_report(tmp_path / "a.json")
    finally:
        running.send_signal(signal.SIGTERM)
        running.send_signal(signal.SIGCONT)
    out, _ = running.communicate(timeout=60)
    assert killed.results
    assert not killed.finished
    report = read_report(tmp_path / "a.json")
    assert report.results
    assert not report.finished
    assert (running.returncode, report.exit_code, report.interrupted) == (2, 2, True)
    assert out.splitlines()[-1].startswith("found no failure in ")


def _results(path: Path) -> int:
    return len(read_report(path).results) if path.exists() and path.stat().st_size else 0


@pytest.fixture
def call(fake, in_folder):
    """The command with the fake judge."""
    return in_folder


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Missing option '--backend'"),
        (["-b", "nofake"], "unknown backend 'nofake'; did you mean 'fake:ok'?"),
        (["-b", "fake:ok", "--minutes", "nan"], "minutes is nan; expected minutes above 0"),
        (["-b", "fake:ok", "--minutes", "0"], "minutes is 0; expected minutes above 0"),
        (["-b", "fake:ok", "--minutes", "1e9"], "minutes is 1e+09; expected minutes above 0, and at most 10080"),
        (["-b", "fake:ok", "--minutes", "ten"], "minutes is 'ten'; expected minutes, such as 60"),
        (["-b", "fake:ok", "--runs", "0"], "Invalid value for '--runs'"),
        (["-b", "fake:ok", "--mode", "decod"], "unknown mode 'decod'; did you mean 'decode'?"),
        (["-b", "fake:ok", "--timeout", "-1"], "timeout is -1"),
        (["-b", "fake:ok", "--database", "/proc/nope"], "cannot use /proc/nope for failures: No such file"),
        (["-b", "fake:ok", "--json", "no/x.json"], "cannot write no/x.json: there is no directory no"),
    ],
)
def test_wrong_usage_is_one_line_and_four(call, argv, message):
    code, out, err = call(*argv)
    assert (code, out) == (4, ""), err
    assert message in err
    assert err.count("\n") == 1


def test_without_hypothesis_it_says_what_to_install(call, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = call("-b", "fake:ok")
    assert code == 4
    (wanted,) = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["fuzz"]
    assert err == f"attn-testkit: fuzz needs Hypothesis: pip install '{wanted}'\n"
