"""The workflows for several machines: every job runs here, as a process, and the last one has the verdict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from transcript import ROOT, fences

PAGE = ROOT / "docs" / "how-to" / "several-machines.md"
FAKE = """
import sys
sys.path.insert(0, {here!r})
from attn_testkit.running.processes import judge_process
judge_process.RUNNER = "fake_runner"
"""


def loaded(title: str) -> dict[Any, Any]:
    (body,) = [fence.body for fence in fences(PAGE) if fence.title == title]
    flow = yaml.safe_load(body)
    assert isinstance(flow, dict)
    return flow


@pytest.fixture
def shell(tmp_path: Path):
    """Run a line of a workflow in an empty folder, with a fake of the judge: (exit code, what it prints)."""
    (tmp_path / "sitecustomize.py").write_text(FAKE.format(here=str(ROOT / "tests" / "front_ends")))
    (tmp_path / "work").mkdir()

    def run(line: str, words: str, **variables: str) -> subprocess.Popen[str]:
        line = line.replace("attn-testkit", f"{sys.executable} -m attn_testkit").replace("my_attention", words)
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", **variables}
        return subprocess.Popen(
            ["bash", "-ec", line], cwd=tmp_path / "work", env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return run


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=300)
    return process.returncode, text


GOOD, BAD = "fake:" + ",".join(["ok"] * 6), "fake:" + ",".join(["ok"] * 5 + ["wrong"])


def test_the_eight_jobs_of_github_and_the_one_that_gathers(shell, tmp_path: Path):
    jobs = loaded(".github/workflows/attention.yml")["jobs"]
    shard, verdict = jobs["shard"], jobs["verdict"]
    (line,) = ours(shard)
    numbers = shard["strategy"]["matrix"]["shard"]
    started = [shell(_of_matrix(line, number), BAD) for number in numbers]
    codes = [ended(each)[0] for each in started]
    assert len(codes) == 8
    assert set(codes) == {0, 1}, "only those that ran what is wrong fail"
    uploads = [
        _of_matrix(step["with"]["path"], n)
        for n in numbers
        for step in shard["steps"]
        if "path" in step.get("with", {})
    ]
    assert all((tmp_path / "work" / name).is_file() for name in uploads)
    assert len(set(uploads)) == 8
    merge, report = ours(verdict)
    assert (verdict["needs"], verdict["if"]) == ("shard", "always()")
    found, text = ended(shell(merge, BAD))
    assert found == 1
    assert text.splitlines()[-1].startswith("NOT CONFORMANT: 4")
    summary = tmp_path / "summary.md"
    assert ended(shell(report, BAD, GITHUB_STEP_SUMMARY=str(summary)))[0] == 0
    assert "NOT CONFORMANT" in summary.read_text()
    # A job that left no file is named by the one that gathers.
    (tmp_path / "work" / "shard-7.json").unlink()
    found, text = ended(shell(merge, BAD))
    assert found == 4
    assert "shard 7/8 is missing" in text


def test_the_jobs_of_gitlab_and_the_one_that_gathers(shell):
    flow = loaded(".gitlab-ci.yml")
    count = flow["shard"]["parallel"]
    (line,) = flow["shard"]["script"]
    started = [shell(line, GOOD, CI_NODE_INDEX=str(n), CI_NODE_TOTAL=str(count)) for n in range(1, count + 1)]
    assert [ended(each)[0] for each in started] == [0] * 8
    assert flow["verdict"]["needs"] == ["shard"]
    assert flow["verdict"]["when"] == "always"
    (merge,) = flow["verdict"]["script"]
    found, text = ended(shell(merge, GOOD))
    assert found == 0
    assert text.splitlines()[-1].startswith("CONFORMANT (core): 24 of 24")


def ours(job: Mapping[str, Any]) -> list[str]:
    """Lines of a job that run the kit."""
    return [step["run"] for step in job["steps"] if step.get("run", "").startswith("attn-testkit ")]


def _of_matrix(line: str, number: int) -> str:
    return re.sub(r"\$\{\{ matrix\.shard \}\}", str(number), line)
