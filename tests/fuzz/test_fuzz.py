"""``attn-testkit fuzz`` for real: a planted fault is found and made small, and whatever ends it leaves a record."""

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

from attn_testkit.cases.case import parse_case
from attn_testkit.cli import main
from attn_testkit.reports.record import read_report, schema
from attn_testkit.reports.render import html_page
from attn_testkit.results import Status

FAULT = "attn_testkit.faults.d_kv_extent:PartialLastPageDropped"
FEW = ("--mode", "decode", "--execution", "eager", "--device", "cpu", "--minutes", "5")


def fuzz(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "attn_testkit", "fuzz", *args]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def test_a_planted_fault_is_found_made_small_and_tried_first_the_next_time(tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--backend", FAULT, *FEW, "--runs", "150", "--json", "a.json")
    assert found.returncode == 1, found.stdout + found.stderr
    assert found.stdout.splitlines()[-1].startswith("FOUND: 1 kind of failure in ")
    assert "  plain    but for page_size\n" in found.stdout
    (line,) = (tmp_path / ".attn-testkit-fuzz" / "failures.tsv").read_text().splitlines()
    backend, execution, case, check = line.split("\t")
    assert (backend, execution, check) == (FAULT, "eager", "matches-oracle")
    assert parse_case(case).page_size > 1
    jsonschema.validate(json.loads((tmp_path / "a.json").read_text()), schema())
    report = read_report(tmp_path / "a.json")
    assert (report.header.tier, report.finished, report.exit_code) == ("fuzz", True, 1)
    assert report.results[-1].case == case
    assert "CONFORMANT" not in html_page(report)
    again = fuzz(tmp_path, "--backend", FAULT, *FEW, "--runs", "1")
    assert again.returncode == 1
    assert again.stdout.startswith(f"{case}: ")


def test_a_healthy_backend_gives_nothing_and_what_passes_now_is_no_longer_kept(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    case = "decode-mha2-d32-bf16-p2-k0-contiguous-gauss-b1prod"
    (folder / "failures.tsv").write_text(f"torch_native\teager\t{case}\tmatches-oracle\n")
    found = fuzz(tmp_path, "--backend", "torch_native", *FEW, "--runs", "25", "--database", "db", "--json", "a.json")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines()[-1] == ("NOTHING FOUND in 25 random case-runs; that is no CONFORMANT: see run")
    assert f"no longer fails: {case} (eager)" in found.stderr
    assert (folder / "failures.tsv").read_text() == ""
    report = read_report(tmp_path / "a.json")
    assert [r.status for r in report.results] == [Status.PASSED] * 25
    assert html_page(report).count("NOTHING FOUND: of 25 random case-runs 25 passed") >= 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_leaves_a_record_that_can_be_read(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "attn_testkit", "fuzz", "--backend", "torch_native", *FEW, "--json", "a.json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup a child would inherit "ignored"
    try:
        running = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    until = time.monotonic() + 120
    while time.monotonic() < until and not _results(tmp_path / "a.json"):
        time.sleep(0.1)
    running.send_signal(how)
    out, _ = running.communicate(timeout=60)
    report = read_report(tmp_path / "a.json")
    assert report.results
    assert not report.finished
    if how is signal.SIGKILL:
        return
    assert (running.returncode, report.exit_code, report.interrupted) == (2, 2, True)
    assert out.splitlines()[-1].startswith("INTERRUPTED; NOTHING FOUND in ")


def _results(path: Path) -> int:
    return len(read_report(path).results) if path.exists() and path.stat().st_size else 0


@pytest.fixture
def call(fake, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(["fuzz", *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return _call


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Missing option '--backend'"),
        (["-b", "nofake"], "unknown backend 'nofake'; did you mean 'fake:ok'?"),
        (["-b", "fake:ok", "--minutes", "nan"], "minutes is nan; expected more than 0"),
        (["-b", "fake:ok", "--minutes", "0"], "minutes is 0; expected more than 0"),
        (["-b", "fake:ok", "--minutes", "1e9"], "minutes is 1e+09; expected more than 0, and at most 10080"),
        (["-b", "fake:ok", "--minutes", "ten"], "minutes is 'ten'; expected a number, such as 10 or 0.5"),
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
