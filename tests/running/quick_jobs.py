"""What a child of ``test_child_by_hand`` serves: it does what it is asked, in a word, and imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection, *arguments: Any) -> None:
    while True:
        word, *values = connection.recv()
        JOBS[word](connection, arguments, *values)


def _echo(connection: Connection, arguments: Any, value: object) -> None:
    connection.send(value)


def _print(connection: Connection, arguments: Any, *lines: str) -> None:
    print(*lines, sep="\n", flush=True)
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    connection.send(None)


def _late(connection: Connection, arguments: Any, seconds: float, value: object) -> None:
    print(f"asleep for {seconds:g} s", flush=True)
    time.sleep(seconds)
    connection.send(value)


def _exit(connection: Connection, arguments: Any, code: int) -> None:
    print("about to end", flush=True)
    os._exit(code)


def _kill(connection: Connection, arguments: Any, number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)


def _bytes(connection: Connection, arguments: Any, data: bytes) -> None:
    connection.send_bytes(data)


def _start(connection: Connection, arguments: Any) -> None:
    connection.send(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)


JOBS = {
    "echo": _echo,
    "arguments": lambda connection, arguments: connection.send(arguments),
    "pid": lambda connection, arguments: connection.send((os.getpid(), os.getpgid(0))),
    "print": _print,
    "late": _late,
    "exit": _exit,
    "kill": _kill,
    "bytes": _bytes,
    "start": _start,
}
