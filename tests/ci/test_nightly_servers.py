"""The nightly of the servers on several machines: each runs a shard of every environment, and one of them gathers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from signed import signed

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "front_ends"
INSTALL_FAKE = "from attn_testkit.running.processes import judge_process\njudge_process.RUNNER = 'fake_runner'\n"
SERVERS = ("sglang-0.5.12.post1", "vllm-0.33.0")
# An environment's interpreter: its names of a server are a backend of the fake judge.
PYTHON = """#!/bin/sh
for word do
  shift
  case "$word" in --attn-backend=*) word="--attn-backend=fake:$FAKE_WORDS";; esac
  set -- "$@" "$word"
done
exec {python} "$@"
"""


@pytest.fixture
def nightly(tmp_path: Path):
    """Run ``ci/nightly_servers.sh`` of a copy whose environments have a fake of their server."""
    ci, site = tmp_path / "checkout" / "ci", tmp_path / "site"
    for folder in (ci, site):
        folder.mkdir(parents=True)
    for name in ("nightly_servers.sh", "nightly.sh", "common.sh"):
        shutil.copy(ROOT / "ci" / name, ci)
    shutil.copytree(ROOT / "ci" / "servers", ci / "servers")
    (site / "sitecustomize.py").write_text(INSTALL_FAKE)
    for name in ("setup.sh", "servers.sh"):
        (ci / name).write_text("exit 0\n")
    for server in SERVERS:
        python = tmp_path / "checkout" / "build" / "servers" / server / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON.format(python=sys.executable))
        python.chmod(0o755)

    def _run(*args: str, **more: str) -> tuple[int, str]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{site}:{FAKES}",
            "ATTN_PYTHON": sys.executable,
            "ATTN_WORKERS": "0",
            "ATTN_SERVERS": " ".join(SERVERS),
            "FAKE_WORDS": "ok,ok,ok",
            "GITHUB_STEP_SUMMARY": "",
            **more,
        }
        done = subprocess.run(
            ["bash", str(ci / "nightly_servers.sh"), *args],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return _run


def summaries(out: Path) -> list[str]:
    return [(out / server / "summary.md").read_text().splitlines()[0] for server in SERVERS]


def test_shards_of_every_environment_are_gathered_into_a_verdict_for_each_and_a_lost_machine_is_named(
    nightly, tmp_path: Path
):
    machines, out, nights = (tmp_path / name for name in ("machines", "out", "nights"))
    for number in (1, 2):
        code, printed = nightly(str(machines / str(number)), ATTN_SHARD=f"{number}/2")
        assert code == 0, printed
        assert all(line.startswith(f"### ✅ SHARD {number}/2") for line in summaries(machines / str(number)))
    code, printed = nightly(str(out), str(nights), ATTN_SHARDS=str(machines))
    assert code == 0, printed
    assert all(line.startswith("### ✅ CONFORMANT (smoke): 12 of 12") for line in summaries(out))
    assert [len([*(nights / server).iterdir()]) for server in SERVERS] == [1, 1]
    # What one environment of one machine did not write makes that environment red, and the other one green.
    (machines / "2" / SERVERS[0] / "report.json").unlink()
    code, printed = nightly(str(out), str(nights), ATTN_SHARDS=str(machines))
    assert code == 4, printed
    lost, there = summaries(out)
    assert "shard 2/2 is missing" in lost
    assert there.startswith("### ✅ CONFORMANT (smoke): 12 of 12")
    assert [len([*(nights / server).iterdir()]) for server in SERVERS] == [1, 2]


def test_a_gathered_night_that_is_as_red_as_the_one_before_has_an_exit_code_of_its_own(nightly, tmp_path: Path):
    machines, out, nights = (tmp_path / name for name in ("machines", "out", "nights"))
    one = {"ATTN_SERVERS": SERVERS[0], "FAKE_WORDS": "ok,wrong"}
    for number in (1, 2):
        nightly(str(machines / str(number)), ATTN_SHARD=f"{number}/2", **one)
    assert nightly(str(out), str(nights), ATTN_SHARDS=str(machines), **one)[0] == 1, "nothing to compare with"
    (record,) = (nights / SERVERS[0]).iterdir()
    night_before = json.loads(record.read_text())
    night_before["header"]["started"] = "2026-11-20T04:00:00+00:00"
    record.write_text(json.dumps(signed(night_before)))
    assert nightly(str(out), str(nights), ATTN_SHARDS=str(machines), **one)[0] == 8
    assert "not worse: 0 newly failing" in (out / SERVERS[0] / "compare.txt").read_text()
