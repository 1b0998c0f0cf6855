"""Threads and child processes that a case-run started and that outlive the instance they were started for.

A package may keep threads for itself: a pool that compiles kernels, a helper of a vendor's library, an idle executor.
So a thread counts only if it runs code of the backend's own package, and a child process only if it is not a known
helper.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_GRACE = 0.5
"""Seconds to wait for threads and processes that are about to end."""
_POOLS = (
    "torch/_inductor/",
    "torch._inductor",
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "compile_worker",
    "ptxas",
    "nvcc",
    "cicc",
    "ninja",
    "sccache",
    "ccache",
)
"""Parts of the command lines of child processes that kernel compilers and Python keep."""


class Running:
    """The threads and child processes at one moment, with which later ones are compared."""

    def __init__(self, package: str) -> None:
        """``package``: top-level package or module of the backend."""
        self._package = package
        self._threads = set(map(id, threading.enumerate()))
        self._children = set(_children())

    def left(self) -> list[str]:
        """Sentences about threads and processes that should have ended. Costs two microseconds if nothing is new."""
        if not (self._new_threads() or self._new_children()):
            return []
        # An instance may hang in a circle, and end its threads where it is collected.
        gc.collect()
        deadline = time.monotonic() + _GRACE
        for thread in self._new_threads():
            thread.join(max(0.0, deadline - time.monotonic()))
        while self._new_children() and time.monotonic() < deadline:
            time.sleep(0.01)
        threads, children = self._new_threads(), self._new_children()
        self._threads |= set(map(id, threads))
        self._children |= set(children)
        return [
            *(f"threads left running: none -> {thread.name!r}{_code_of(thread)}" for thread in threads),
            *(f"child processes left running: none -> {command}" for command in children.values()),
        ]

    def accept(self) -> None:
        """Accept everything that runs now: a package was imported meanwhile."""
        self._threads, self._children = set(map(id, threading.enumerate())), set(_children())

    def _new_threads(self) -> list[threading.Thread]:
        new = [thread for thread in threading.enumerate() if id(thread) not in self._threads]
        return [thread for thread in new if _module_of(thread).partition(".")[0] == self._package]

    def _new_children(self) -> dict[int, str]:
        return {pid: command for pid, command in _children().items() if pid not in self._children}


def _target(thread: threading.Thread) -> object:
    """The function that a thread runs. Python forgets it when the thread ends."""
    target = getattr(thread, "_target", None)
    if isinstance(thread, threading.Timer):
        target = thread.function
    return type(thread) if target is None else target


def _module_of(thread: threading.Thread) -> str:
    return str(getattr(_target(thread), "__module__", "") or "")


def _code_of(thread: threading.Thread) -> str:
    return f" ({_module_of(thread)}.{getattr(_target(thread), '__qualname__', '?')})"


def _children() -> dict[int, str]:
    """Pid -> command line of every living child that is not a known pool."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):
        return {}
    return dict(_living())


def _living() -> Iterator[tuple[int, str]]:
    for listed in Path("/proc/self/task").glob("*/children"):
        pids = ""
        with contextlib.suppress(OSError):
            pids = listed.read_text()
        for pid in map(int, pids.split()):
            # One that has ended and was not waited for has no command line.
            command = _command_line(pid)
            if command and not any(part in command for part in _POOLS):
                yield pid, command


def _command_line(pid: int) -> str:
    """The command line of a process; empty if the process ends meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
