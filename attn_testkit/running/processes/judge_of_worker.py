"""The judge of a pytest worker. It is forked from the process from which the controller's judge forks its own workers.

Each worker of xdist has a judge, and a fresh interpreter takes 1.5 s of a core to import torch and the kit. So the
controller's judge lets one be forked for each pytest worker (``start``). This judge has imported no candidate and holds
no expected value, and waits at a socket for its pytest worker (``connect``).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.process
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from .forked import Forked

if TYPE_CHECKING:
    from .child import Child

_SERVE = "attn_testkit.running.processes.judge_process"
"""Module whose ``serve`` the process runs."""
_PATIENCE = 60.0
"""Seconds for a process to be forked and to receive what the worker sends, on a busy machine."""
_GRACE = 5.0
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "TRITON", "ATEN_", "KMP_", "LD_", "MALLOC_")
_GIVEN = ("PYTHONPATH",)
"""A variable that is also read at the start, and is passed on as ``sys.path``."""
_started: list[tuple[Child, str]] = []
"""Processes of this judge, with the folders of their sockets."""


def settings(environment: Mapping[str, str], given: Sequence[str] = _GIVEN) -> dict[str, str]:
    """Variables that must be the same in a fork, because its interpreter and its libraries have read them. ``given``:
    variables that are passed on.
    """
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START) and name not in given}


def start() -> str:
    """Let the controller's judge fork a judge. Returns the path of its socket, or empty text if no judge can be
    forked."""
    if not hasattr(os, "pidfd_open"):
        return ""
    from .child import Child  # not for front ends, which start no process with it

    folder = tempfile.mkdtemp(prefix="attn-testkit-judge-")
    place = f"{folder}/socket"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(place)
            listening.listen(1)
            _started.append((Child(_SERVE, listening, grace=_GRACE), folder))
    except (OSError, EOFError):
        _remove(folder)
        return ""
    return place


def end() -> None:
    """End every process that ``start`` made: xdist workers end before their controller does."""
    for child, _ in _started:
        child.end()
    for child, folder in _started:
        child.close()
        _remove(folder)
    _started.clear()


def _remove(folder: str) -> None:
    for remove, path in ((os.unlink, f"{folder}/socket"), (os.rmdir, folder)):
        with contextlib.suppress(OSError):
            remove(path)


def connect(place: str, path: Sequence[str], environment: Mapping[str, str]) -> tuple[Connection, Forked] | None:
    """Connect to the judge that waits at the socket. Returns a pipe to it, and its process; None if there is none, or
    if a fresh interpreter would differ from it. A judge serves one front end.
    """
    given = json.dumps({"path": [*path], "environment": dict(environment), "folder": os.getcwd()}).encode()
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(_PATIENCE)
        client.connect(place)
        socket.send_fds(client, [len(given).to_bytes(8, "big")], [2])
        client.sendall(given)
        pid = int.from_bytes(_exactly(client, 8), "big")
        process = Forked(pid) if pid else None
    except OSError:
        process = None
    if process is None:
        client.close()
        return None
    client.settimeout(None)
    return Connection(client.detach()), process


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Receive this number of bytes. Raises ``OSError`` if the other end is gone."""
    found = b""
    while len(found) < count:
        some = connection.recv(count - len(found))
        if not some:
            raise ConnectionResetError("the other end is gone")
        found += some
    return found


def accepted(listening: socket.socket) -> Connection | None:
    """Wait for the front end, and become equal to a fresh interpreter of the front end: path, environment, folder,
    output. Returns None if that is not possible, or if the front end is gone.
    """
    # As in lane_process.py: it starts processes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    connection, _ = listening.accept()
    listening.close()
    connection.settimeout(_PATIENCE)
    try:
        length, files, _, _ = socket.recv_fds(connection, 8, 1)
        given = json.loads(_exactly(connection, int.from_bytes(length, "big")))
        if settings(given["environment"]) != settings(os.environ):
            connection.sendall(bytes(8))
            return None
        for number in (1, 2):
            os.dup2(files[0], number)
        os.close(files[0])
        os.environ.clear()
        os.environ.update(given["environment"])
        os.chdir(given["folder"])
        multiprocessing.process.ORIGINAL_DIR = given["folder"]  # type: ignore[attr-defined]
        sys.path[:] = given["path"]
        connection.sendall(os.getpid().to_bytes(8, "big"))
    except OSError:
        return None
    connection.settimeout(None)
    return Connection(connection.detach())
