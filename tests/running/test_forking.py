"""The process that workers are forked from: what each of them needs first is there already."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from attn_testkit.running.processes import judge_process

PRELOAD = """
import gc, importlib, sys
from attn_testkit.running.processes import forking
asked = []
server = type(forking.multiprocessing.get_context("forkserver"))
server.set_forkserver_preload = lambda _, names: asked.extend(names)
forking.fork_context()
assert asked[-1] == "attn_testkit.running.processes.ready", asked
for name in asked:
    importlib.import_module(name)
assert gc.get_freeze_count() > 100_000, gc.get_freeze_count()
"""
DRIVE = """
import sys
from attn_testkit.contract import Execution
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.case_runs.worker_main import LocalWorker
from attn_testkit.runner_modes.messages import RunCase
before = set(sys.modules)
worker = LocalWorker(Candidate("torch_native"), "cpu")
constructed = set(sys.modules)
for execution in Execution:
    driven = worker.drive(RunCase("decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4prod", execution))
    assert driven.records and not driven.findings and not driven.changed, driven
print(len(constructed - before), *sorted(set(sys.modules) - constructed))
"""


def imported(code: str) -> tuple[int, list[str]]:
    """How many modules a worker imports in its constructor, and those that it imports in its first drives."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "nothing is printed at the end, either"
    first, *late = done.stdout.split()
    return int(first), late


def test_a_worker_that_emulates_a_device_imports_next_to_nothing_of_its_own() -> None:
    pytest.importorskip("triton")
    first, late = imported(PRELOAD + DRIVE)
    assert first < 10, "its backend, and what that needs"
    assert not any(name.startswith(("torch._dynamo", "sympy", "triton")) for name in late), late
    assert len(late) < 3, late


def test_no_package_is_imported_in_the_middle_of_a_drive_where_nothing_was_preloaded() -> None:
    # Their import changes the filters of warnings, and that would be the backend's finding.
    pytest.importorskip("triton")
    _, late = imported(DRIVE)
    assert {name.partition(".")[0] for name in late} <= {"torch"}, late


FORKED = """
import os, sys
from attn_testkit.running.processes import forking
pipe = os.fstat(os.pipe()[1]).st_ino
forking.fork_off()
assert "torch" in sys.modules
import test_forking
child = forking.fork_context().Process(target=test_forking.says_what_it_has, args=(pipe,))
child.start()
child.join()
print(child.exitcode)
"""


def says_what_it_has(pipe: int) -> None:
    """Whether a file of ``pipe`` is open here, whose command line the process has that this one was forked from, and
    whether processes are started from here as Python starts them.
    """
    links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink() and file.exists()]
    command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    starts = util.spawnv_passfds.__module__ == util.__name__
    print("torch" in sys.modules, f"pipe:[{pipe}]" in links, b"fork_off" in command, starts, flush=True)


def test_what_workers_are_forked_from_is_a_fork_of_the_judge_and_has_none_of_its_files() -> None:
    """Torch is imported once. The judge's pipe to whoever asked it is not the worker's."""
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True False True True", "0"]
    assert not done.stderr


LEFT_ALONE = """
import os, socket
from multiprocessing import forkserver
from attn_testkit.running.processes import forking
forking.fork_off()
server = forkserver._forkserver
# A lane that is closed after -x: it has sent its files, and ends before it has said what to run.
ends, says = forkserver.connect_to_new_process([])
forkserver.read_signed(ends)
os.close(says)
assert forkserver.read_signed(ends) == 1
os.close(ends)
with socket.socket(socket.AF_UNIX) as asks:
    asks.connect(server._forkserver_address)
print(os.waitpid(server._forkserver_pid, 0)[1])
"""


def test_one_who_is_ended_while_it_asks_for_a_worker_leaves_no_traceback_behind() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


UNCOLLECTED = """
import gc
gc.disable()
from attn_testkit.running.processes.child import Child
from attn_testkit.running.processes.forking import fork_off
fork_off()
child = Child("test_forking")
child.wait_until_started()
print(child.ask("is garbage collected?", 60.0))
child.close()
"""


def serve(connection: Connection) -> None:
    connection.recv()
    connection.send(gc.isenabled())


class Runner:
    """In the place of the judge's: its device is whether it collects garbage."""

    def __init__(self, options: object) -> None:
        pass

    def device_name(self, device: str) -> str:
        return str(gc.isenabled())

    def close(self) -> None:
        pass


def test_what_imports_without_the_garbage_collector_has_it_when_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCOLLECTED], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
    monkeypatch.setattr(judge_process, "RUNNER", __name__)
    judge = judge_process.JudgeProcess(device="cpu")
    try:
        assert judge.device_name("cpu") == "True"
    finally:
        judge.close()
