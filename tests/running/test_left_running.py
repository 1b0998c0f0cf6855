"""What a drive started and left running is said; what ends, and what others keep, is not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attn_testkit.running.hygiene import left_running
from attn_testkit.running.hygiene.left_running import Running

OWN = __name__.partition(".")[0]


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that end are waited for as long as a busy machine needs."""
    monkeypatch.setattr(left_running, "_GRACE", 60.0)


@pytest.fixture
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_running, "_GRACE", 0.1)


def wait_for(event: threading.Event) -> None:
    event.wait(60)


class Waiter(threading.Thread):
    """A thread by its class."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__(name="waiter")
        self.event = event

    def run(self) -> None:
        self.event.wait(60)


@pytest.mark.usefixtures("impatient")
def test_a_thread_of_the_backends_own_code_is_said_once(stop: threading.Event) -> None:
    running = Running(OWN)
    assert running.left() == []
    threading.Thread(target=wait_for, args=(stop,), name="prefetcher").start()
    Waiter(stop).start()
    timer = threading.Timer(60, wait_for, (stop,))
    timer.start()
    found = running.left()
    timer.cancel()
    assert found[0] == f"threads left running: none -> 'prefetcher' ({__name__}.wait_for)"
    assert found[1] == f"threads left running: none -> 'waiter' ({__name__}.Waiter)"
    assert f"({__name__}.wait_for)" in found[2]
    assert running.left() == [], "the next drive did not start it"


def test_threads_of_others_and_those_that_end_are_nobodys_fault(stop: threading.Event) -> None:
    running = Running(OWN)
    ends = threading.Thread(target=time.sleep, args=(0.02,))
    ends.start()
    own = threading.Thread(target=lambda: time.sleep(0.02))
    own.start()
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    foreign = Running("some_package")
    threading.Thread(target=wait_for, args=(stop,)).start()
    assert foreign.left() == []
    stop.set()
    assert running.left() == []
    pool.shutdown()


def test_a_thread_that_ends_with_its_instance_is_waited_for() -> None:
    class Instance:
        def __init__(self) -> None:
            self.stop = threading.Event()
            threading.Thread(target=wait_for, args=(self.stop,)).start()
            self.circle = self

        def __del__(self) -> None:
            self.stop.set()

    running = Running(OWN)
    Instance()
    assert running.left() == []


@pytest.mark.usefixtures("impatient")
def test_a_child_is_said_with_its_command_line_and_pools_of_compilers_are_not() -> None:
    running = Running(OWN)
    sleep = "import sys, time; time.sleep(60)"
    children = [
        subprocess.Popen([sys.executable, "-c", sleep, name])
        for name in ("my-helper", "torch/_inductor/compile_worker", "nvcc")
    ]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected it
    try:
        (found,) = running.left()
        assert found.startswith("child processes left running: none -> ")
        assert found.endswith("my-helper")
        assert running.left() == []
    finally:
        for child in (*children, ended):
            child.kill()
            child.wait()


def test_a_child_that_ends_while_it_is_looked_at_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not seen at first would be said as left running later."""
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in "12"]
    read = Path.read_bytes

    def gone(file: Path) -> bytes:
        if file == Path(f"/proc/{children[0].pid}/cmdline"):
            raise ProcessLookupError
        return read(file)

    try:
        while not all(Path(f"/proc/{child.pid}/cmdline").read_bytes() for child in children):
            time.sleep(0.01)  # a process has its command line a moment after it has begun
        monkeypatch.setattr(Path, "read_bytes", gone)
        assert children[1].pid in left_running._children()
        assert children[0].pid not in left_running._children()
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_what_runs_once_a_package_was_imported_may_run(stop: threading.Event) -> None:
    running = Running(OWN)
    threading.Thread(target=wait_for, args=(stop,)).start()
    running.accept()
    assert running.left() == []
