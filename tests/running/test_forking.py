"""The process that workers are forked from: what each of them needs first is there already."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DRIVE = """
import gc, importlib, sys
from attn_testkit.running import forking
asked = []
server = type(forking.multiprocessing.get_context("forkserver"))
server.set_forkserver_preload = lambda _, names: asked.extend(names)
forking.fork_context()
assert asked[-1] == "attn_testkit.running.ready", asked
for name in asked:
    importlib.import_module(name)
assert gc.get_freeze_count() > 100_000, gc.get_freeze_count()
from attn_testkit.contract import Execution
from attn_testkit.running.candidate import Candidate
from attn_testkit.running.worker import LocalWorker
from attn_testkit.runner_modes.messages import DriveCase
before = set(sys.modules)
worker = LocalWorker(Candidate("torch_native"), "cpu")
for execution in Execution:
    driven = worker.drive(DriveCase("decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4prod", execution))
    assert driven.records and not driven.findings, driven
print(*sorted(set(sys.modules) - before))
"""


def test_a_worker_that_emulates_a_device_imports_next_to_nothing_of_its_own() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", DRIVE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "nothing is printed at the end, either"
    late = [name for name in done.stdout.split() if not name.startswith("attn_testkit.")]
    assert len(late) < 3, late
