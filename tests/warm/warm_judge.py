"""A judge's process that is a fork of one that has imported torch and the kit, in place of a fresh interpreter.

Tests start hundreds of judges, and two thirds of a small run's time is the import of torch. A pytest session starts one
process, which imports on the first request and forks for each judge (``warm_judges.py``). What a judge does is the same
from ``_serve`` on; how a fresh interpreter comes to it is held by tests that are marked ``cold``.

A judge starts fresh wherever a fork of that process would differ: another runner, another interpreter, or another value
of a variable that Python or torch reads when it starts.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from attn_testkit.running.processes import judge_of_worker

PLACE = "ATTN_WARM_JUDGES"
"""Variable with the path of the socket."""
_GIVEN = ("PYTHONPATH", "PYTHONWARNINGS")
"""Read at the start, and carried out by a fork."""


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that must be the same in a fork: its interpreter and its libraries have read them."""
    return judge_of_worker.settings(environment, _GIVEN)


class Forked:
    """What ``JudgeProcess`` uses of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a forked judge", timeout)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            said = self._connection.recv(64)
            self.returncode = int(said) if said else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def popen(command: Sequence[str], **more: Any) -> Any:
    """``subprocess.Popen``, or a fork that does the same."""
    executable, *_, path, number, runner = command
    place = os.environ.get(PLACE, "")
    environment = more["env"]
    if not place or executable != sys.executable or not runner.startswith("attn_testkit."):
        return subprocess.Popen(command, **more)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(place)
        asked = {"path": json.loads(path), "environment": environment, "folder": os.getcwd(), "runner": runner}
        files = array.array("i", [1, 2, int(number)])
        message = json.dumps(asked).encode()
        connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        said = connection.recv(64)
    except OSError:
        said = b""
    if not said or said == b"no":
        connection.close()
        return subprocess.Popen(command, **more)
    return Forked(connection, int(said))


def namespace() -> SimpleNamespace:
    """What ``judge_process`` uses of ``subprocess``."""
    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
