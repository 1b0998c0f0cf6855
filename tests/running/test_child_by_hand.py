"""A process that is asked one thing at a time: what it answers, how long is waited, and how its end is told."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest
from alive import alive

from attn_testkit.results.case_result import Status
from attn_testkit.running.processes import child
from attn_testkit.running.processes.child import Child, ChildLost

AMPLE = 120.0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make children that serve ``quick_jobs``. They are spawned: what workers are forked from imports torch first."""
    monkeypatch.setattr(child, "fork_context", lambda: multiprocessing.get_context("spawn"))
    made: list[Child] = []

    def start(*arguments: Any, **fields: Any) -> Child:
        made.append(Child("quick_jobs", *arguments, **fields))
        made[-1].wait_until_started()
        return made[-1]

    yield start
    for each in made:
        each.close()


def lost(one: Child, message: object, seconds: float = AMPLE) -> ChildLost:
    with pytest.raises(ChildLost) as caught:
        one.ask(message, seconds)
    assert one.ended
    assert str(caught.value) == caught.value.reason
    return caught.value


def test_it_answers_one_question_after_the_other_in_a_group_of_its_own(started: Any) -> None:
    one = started("m:A", 3)
    assert not one.ended
    assert one.ask(("echo", {"a": [1, 2.5]}), AMPLE) == {"a": [1, 2.5]}
    assert one.ask(("arguments",), AMPLE) == ("m:A", 3)
    assert one.ask(("pid",), AMPLE) == (one.pid, one.pid)
    assert one.pid not in (0, os.getpid())


def test_the_time_to_answer_counts_from_the_question_and_what_came_in_time_is_taken_however_late(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, clock, waited = started(), [100.0], list[float]()

    def poll(seconds: float) -> bool:
        waited.append(seconds)
        return True

    pipe = Of(send=lambda _: None, poll=poll, recv_bytes=lambda: pickle.dumps(7), close=one._connection.close)
    monkeypatch.setattr(child, "time", Of(monotonic=lambda: clock[0]))
    monkeypatch.setattr(one, "_connection", pipe)
    one.tell("", 5.0)
    for now in (100.0, 103.0, 105.5):
        clock[0] = now
        assert one.answer() == 7
    assert one.hear(4.0) == 7
    assert waited == [5.0, 2.0, 0.0, 4.0]


def test_one_that_hangs_is_given_up_when_its_time_is_over_with_its_last_words(started: Any) -> None:
    one = started()
    one.tell(("late", 600.0, None), AMPLE)
    while not one.printed():
        time.sleep(0.02)
    begun = time.monotonic()
    one.wait_for(0.5)
    with pytest.raises(ChildLost) as caught:
        one.answer()
    assert 0.5 <= time.monotonic() - begun < 60
    error = caught.value
    assert (error.status, error.reason) == (Status.TIMED_OUT, "no result after 0.5 s\n  asleep for 600 s")
    assert not alive(one.pid)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (("exit", 3), "the process ended itself with exit code 3\n  about to end"),
        (("exit", 0), "the process ended itself with exit code 0\n  about to end"),
        (("kill", signal.SIGKILL), "the process was killed by SIGKILL"),
    ],
)
def test_how_it_ended_is_said(started: Any, message: object, reason: str) -> None:
    error = lost(started(), message)
    assert (error.status, error.reason) == (Status.CRASHED, reason)


def test_one_that_is_gone_already_is_lost_when_it_is_reported_something(started: Any) -> None:
    one = started()
    os.kill(one.pid, signal.SIGKILL)
    one._process.join()
    error = lost(one, ("echo", 1))
    assert (error.status, error.reason) == (Status.CRASHED, "the process was killed by SIGKILL")


def test_why_it_did_not_start_is_said_where_it_had_ended_before_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "fork_context", lambda: multiprocessing.get_context("spawn"))
    one = Child("no_such_module")
    one._process.join()
    assert "No module named 'no_such_module'" in lost(one, ("echo", 1)).reason


def test_what_is_no_message_is_read_as_a_crash(started: Any) -> None:
    error = lost(started(), ("bytes", b"junk"))
    assert error.status is Status.CRASHED
    assert error.reason.startswith("the process spoke for itself: it sent 4 bytes that are not a message")
    error = lost(started(), ("bytes", pickle.dumps(os.getcwd)))
    assert error.reason == "the process spoke for itself: it sent posix.getcwd, which is not allowed in a message"


def test_another_reader_reads_what_it_sends(started: Any) -> None:
    one = started(reader=lambda data: pickle.loads(data) if data != b"junk" else "read")
    assert one.ask(("bytes", b"junk"), AMPLE) == "read"


def test_last_words_are_what_it_printed_since_it_was_last_reported_something(started: Any) -> None:
    one = started()
    assert one.last_words() == ""
    one.ask(("print", "one", "", "two  "), AMPLE)
    assert one.last_words() == "\n  one\n  two\n  one\n  two"
    one.ask(("echo", 1), AMPLE)
    assert one.last_words() == ""


def test_closing_ends_it_with_everything_it_started(started: Any) -> None:
    one = started()
    pids = [one.pid, one.ask(("start",), AMPLE)]
    assert all(alive(pid) for pid in pids)
    one.close()
    one.close()
    assert one.ended
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def test_what_it_printed_is_removed_with_it(started: Any) -> None:
    one = started()
    words = Path(one._words)
    assert words.exists()
    one.close()
    assert words.exists(), "its last words may still be asked for"
    one.__del__()
    assert not words.exists()
    one.__del__()


def test_closing_waits_where_another_thread_has_begun_to(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that is closed while a thread ends its worker would leave before the process is gone."""
    one = started()
    begun, may_end = threading.Event(), threading.Event()
    join = one._process.join

    def slow_join(timeout: float | None = None) -> None:
        begun.set()
        may_end.wait(AMPLE)
        join(timeout)

    monkeypatch.setattr(one._process, "join", slow_join)
    first = threading.Thread(target=one.close)
    first.start()
    begun.wait(AMPLE)
    second = threading.Thread(target=one.close)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    may_end.set()
    second.join(AMPLE)
    assert not second.is_alive()
    assert not alive(one.pid)
    first.join(AMPLE)


def refusing(times: int, error: Exception) -> tuple[type, list[float]]:
    """In the place of a process: its start fails so often."""
    waits: list[float] = []

    class Process:
        pid = exitcode = None

        def start(self) -> None:
            waits.append(time.monotonic())
            if len(waits) <= times:
                raise error
            self.pid, self.exitcode = 0, 0

    return Process, waits


@pytest.mark.parametrize("error", [ConnectionRefusedError(), EOFError()])
@pytest.mark.parametrize(("times", "starts"), [(0, True), (2, True), (3, False)])
def test_what_it_is_forked_from_may_be_killed_twice_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, error: Exception, times: int, starts: bool
) -> None:
    process, attempts = refusing(times, error)
    monkeypatch.setattr(child, "_AGAIN_AFTER", (0.0, 0.0))
    monkeypatch.setattr(child, "fork_context", lambda: Of(Process=lambda **_: process()))
    if starts:
        Child("quick_jobs").close()
    else:
        with pytest.raises(type(error)):
            Child("quick_jobs")
    assert len(attempts) == min(times + 1, 3)


@pytest.mark.parametrize("grace", [0.0, 0.2])
def test_one_whose_end_nobody_can_tell_is_ended_all_the_same(started: Any, grace: float) -> None:
    """The process that it was forked from was killed, and ``multiprocessing`` takes it for ended."""
    one = started(grace=grace)
    one.tell(("late", 600.0, None), AMPLE)
    one._process = Of(pid=one.pid, exitcode=255, join=lambda *_, **__: None)
    one.close()
    assert not alive(one.pid)


@pytest.mark.parametrize(
    ("code", "killed", "how"),
    [(-9, True, "was killed by SIGKILL"), (-11, False, "was killed by SIGSEGV"), (255, False, "255 or an unknown one")],
)
def test_a_kill_from_outside_is_known_and_an_exit_code_that_nobody_knows_is_not_made_up(
    started: Any, code: int, killed: bool, how: str
) -> None:
    one = started()
    os.kill(one.pid, signal.SIGKILL)
    while alive(one.pid):
        time.sleep(0.001)
    one._process = Of(pid=one.pid, exitcode=code, join=lambda *_, **__: None)
    error = lost(one, ("echo", 1))
    assert error.killed == killed
    assert how in error.reason


def test_where_no_process_can_be_started_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        pid = exitcode = None

        def start(self) -> None:
            raise OSError("out of processes")

    monkeypatch.setattr(child, "fork_context", lambda: Of(Process=lambda **_: Process()))
    with pytest.raises(OSError, match="out of processes"):
        Child("quick_jobs")
