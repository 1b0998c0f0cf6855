"""What a pull request asks of the bridges: one smoke of each server, and never a green where nothing was tested."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FLOWS = ROOT / ".github" / "workflows"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with the script alone; what makes environments makes one whose kit notes its arguments and fails."""
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "pr_servers.sh", tmp_path / "ci")
    write(tmp_path / "ci" / "servers.sh", 'mkdir -p "build/servers/$1/bin"; cp kit "build/servers/$1/bin/attn-testkit"')
    write(tmp_path / "kit", 'echo "$@"; exit "${CODE:-0}"')
    return tmp_path


def write(file: Path, script: str) -> None:
    file.write_text(f"#!/usr/bin/env bash\n{script}\n")
    file.chmod(0o755)


def asked(tree: Path, *arguments: str, code: str = "0") -> subprocess.CompletedProcess[str]:
    command = ["bash", str(tree / "ci" / "pr_servers.sh"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"CODE": code, "PATH": "/usr/bin:/bin"}
    )


def servers_of(flow: str) -> list[str]:
    job = yaml.safe_load((FLOWS / flow).read_text())["jobs"]["servers"]
    found: list[str] = job["strategy"]["matrix"]["server"]
    return found


@pytest.mark.parametrize("server", servers_of("pr.yml"))
def test_each_server_has_a_smoke_of_one_backend_and_its_exit_code_is_that_of_the_step(tree: Path, server: str) -> None:
    assert (ROOT / "ci" / "servers" / f"{server}.txt").exists()
    for code in ("0", "1", "3"):
        done = asked(tree, server, code=code)
        assert done.returncode == int(code)
        words = done.stdout.split()
        assert words[:2] == ["run", "--backend"]
        assert words[2].partition(":")[0] == server.partition("-")[0]
        assert words[3:] == ["--tier", "smoke", "--device", "cpu", "--jobs", "2"]
        assert words[2] in (ROOT / "ci" / "nightly_servers.sh").read_text()


def test_an_environment_that_cannot_be_made_is_a_failure_that_says_that_nothing_was_tested(tree: Path) -> None:
    write(tree / "ci" / "servers.sh", "echo 'no route to host' >&2; exit 1")
    done = asked(tree, "sglang-0.5.23")
    assert done.returncode == 4
    assert "NOTHING of sglang:" in done.stderr
    assert done.stdout == ""


def test_a_server_that_nobody_knows_is_a_failure(tree: Path) -> None:
    done = asked(tree, "sglang-0.1")
    assert done.returncode == 4
    assert "there is no sglang-0.1; there are: " in done.stderr


def test_the_nightly_runs_the_tests_of_the_bridges_in_the_same_environments() -> None:
    assert servers_of("nightly.yml") == servers_of("pr.yml")
    steps = yaml.safe_load((FLOWS / "nightly.yml").read_text())["jobs"]["servers"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert any("pytest packages/servers/tests/bridges" in command for command in commands)
    assert any("ci/nightly_servers.sh" in command for command in commands)


def test_the_cached_environment_is_keyed_by_all_that_it_is_made_from() -> None:
    steps = yaml.safe_load((FLOWS / "pr.yml").read_text())["jobs"]["servers"]["steps"]
    (cache,) = (step for step in steps if step.get("uses", "").startswith("actions/cache@"))
    for part in (
        "ci/servers.sh",
        "ci/constraints.txt",
        "ci/vendor.txt",
        "ci/servers/{0}.txt",
        "'pyproject.toml'",
        "packages/*/pyproject.toml",
        "python-version",
    ):
        assert part in cache["with"]["key"], part
