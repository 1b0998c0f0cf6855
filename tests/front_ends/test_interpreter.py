"""``attn-testkit --python``: the same command by another interpreter, and what is said where that cannot be."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import attn_testkit
from attn_testkit.cli import main
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import PYTHON_VARIABLE, program, repro_command

CASE = "decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod"


def _interpreter(folder: Path, body: str) -> str:
    """An executable that answers as an interpreter would."""
    path = folder / "python with a space"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def _said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["--python", *arguments]) == 4
    return capsys.readouterr().err


def test_the_command_is_carried_out_by_it(tmp_path: Path) -> None:
    """With its arguments, output and exit code; and commands that are printed begin alike."""
    link = tmp_path / "other python"
    link.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    link.chmod(0o755)
    words = ["-m", "attn_testkit", "--python", str(link), "run", "--backend", "nowhere:Backend", "--tier", "smoke"]
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 4
    assert "attn-testkit: backend 'nowhere:Backend'" in ran.stderr
    assert subprocess.run(
        [sys.executable, "-m", "attn_testkit", "--python", str(link), "known", "--help"],
        capture_output=True,
        check=False,
    ).stdout.startswith(b"Usage: attn-testkit known")


def test_one_on_the_path_may_be_named_without_its_folder(tmp_path: Path) -> None:
    python = tmp_path / "python-of-servers"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    words = [sys.executable, "-m", "attn_testkit", "--python", python.name, "known", "--help"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(words, env={**os.environ, "PATH": path}, capture_output=True, check=False)
    assert ran.returncode == 0
    assert ran.stdout.startswith(b"Usage: attn-testkit known")


def test_commands_to_repeat_a_result_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CaseResult("sglang:triton", "decode", "eager", CASE, Status.FAILED, device="cuda")
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    assert repro_command(result).startswith("attn-testkit repro --backend sglang:triton ")
    assert program() == ("attn-testkit",)
    monkeypatch.setenv(PYTHON_VARIABLE, "my servers/bin/python")
    assert repro_command(result).startswith("attn-testkit --python 'my servers/bin/python' repro --backend sglang")


def test_one_that_is_not_there_is_answered_with_how_to_make_one(capsys: pytest.CaptureFixture[str]) -> None:
    said = _said(capsys, "/nowhere/python", "list")
    assert "--python /nowhere/python: cannot be run: No such file or directory" in said
    assert "bash ci/servers.sh" in said


def test_one_without_the_kit_is_answered_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = _interpreter(tmp_path, "echo \"ModuleNotFoundError: No module named 'attn_testkit'\" >&2; exit 1")
    assert "cannot be imported there (ModuleNotFoundError: No module named 'attn_testkit')" in _said(
        capsys, python, "list"
    )
    silent = _interpreter(tmp_path, "exit 3")
    assert "cannot be imported there (exit code 3)" in _said(capsys, silent, "list")


def test_another_version_of_the_kit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = _interpreter(tmp_path, "echo 0.0.7")
    assert f"it has attn-testkit 0.0.7, this Python has {attn_testkit.__version__}" in _said(capsys, python, "list")
