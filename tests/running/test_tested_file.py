"""What was tested is the file that the author looks at: its hash is in the record, and stale byte code is refused."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import py_compile
from pathlib import Path

import pytest

from attn_testkit import check_backend
from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import Status
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.hygiene.tested_file import tested_file as source_of
from attn_testkit.running.planning.request import Options, Request

SOURCE = """
from attn_testkit.examples import MinimalBackend

class Mine(MinimalBackend):
    number = {}
"""
CASES = ["decode-mha2-d64-bf16-p16-k33-shuffled-gauss-b1prod"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """A backend's file in a folder that the processes import from, and its spec."""
    name = f"mine_{abs(hash(request.node.name))}"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE.format(1))
    return path, f"{name}:Mine"


def run(spec: str):
    return check_backend(spec, device="cpu", cases=CASES, executions=["eager"])


def stale(path: Path, mode: py_compile.PycInvalidationMode) -> Path:
    """Byte code of an earlier text of the file, which Python trusts."""
    made = path.stat()
    cached = Path(importlib.util.cache_from_source(str(path)))
    py_compile.compile(str(path), invalidation_mode=mode)
    path.write_text(SOURCE.format(2))
    os.utime(path, ns=(made.st_atime_ns, made.st_mtime_ns))
    return cached


def test_the_record_has_path_and_hash_of_the_tested_file(mine):
    path, spec = mine
    source = run(spec).header.sources[spec]
    assert source["file"] == str(path)
    assert source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source["kernels"] == ""


@pytest.mark.parametrize(
    "mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH]
)
def test_stale_byte_code_is_refused_and_names_both_files(mine, mode):
    path, spec = mine
    cached = stale(path, mode)
    with pytest.raises(UsageError, match="made of another text") as refused:
        run(spec)
    assert str(path) in str(refused.value)
    assert str(cached) in str(refused.value)


def test_byte_code_that_python_would_not_trust_is_no_alarm(mine):
    path, spec = mine
    cached = stale(path, py_compile.PycInvalidationMode.CHECKED_HASH)
    assert cached.exists()
    assert run(spec).ok
    # Of another time: Python makes it anew.
    stale(path, py_compile.PycInvalidationMode.TIMESTAMP)
    os.utime(path, (1, 1))
    assert run(spec).ok


def test_fresh_byte_code_is_no_alarm(mine):
    path, spec = mine
    py_compile.compile(str(path))
    assert run(spec).ok
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert run(spec).ok


def test_byte_code_without_a_source_is_noted(mine):
    path, spec = mine
    py_compile.compile(str(path), cfile=str(path.with_suffix(".pyc")))
    path.unlink()
    results = run(spec)
    assert results.ok
    (note,) = results.header.notes[spec]
    assert note == f"{path.with_suffix('.pyc')} is byte code without source code, so nobody can read what was tested"


def test_a_file_that_is_edited_while_the_run_goes_on_fails_what_its_new_text_runs(mine):
    path, spec = mine
    with contextlib.closing(Runner(Options())) as runner:
        plan = runner.plan(Request((spec,), device="cpu", cases=tuple(CASES)))
        eager, graph = plan.items
        (before,) = runner.run(plan, [eager])
        # Of another length: of the same second and length, Python would take the byte code of the earlier text.
        path.write_text(SOURCE.format(22))
        (by_the_same_process,) = runner.run(plan, [graph])
    assert {before.status, by_the_same_process.status} == {Status.PASSED}, "it has the text that was planned"
    with contextlib.closing(Runner(Options())) as runner:
        (after,) = runner.run(plan, [eager])
    assert after.status is Status.CRASHED
    assert after.reason.startswith(f"{path} or a module that it uses has changed since the run was planned")


def test_the_hash_of_the_code_holds_the_modules_that_a_backend_uses(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kernels_of_mine.py").write_text("def attend(): pass\n")
    (tmp_path / "uses_kernels.py").write_text("from kernels_of_mine import attend\nclass Mine: pass\n")
    found = importlib.import_module("uses_kernels").Mine
    before = source_of(found)
    (tmp_path / "kernels_of_mine.py").write_text("def attend(): return 1\n")
    after = source_of(found)
    assert before["sha256"] == after["sha256"]
    assert before["code"] != after["code"]
    assert after == source_of(found)
