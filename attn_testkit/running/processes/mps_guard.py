"""A process that waits for the end of the one that started it, and then ends a daemon of MPS: run as a script.

``mps_guard.py PROGRAM FOLDER``: the environment names the daemon. It ends the daemon when its own stdin is closed,
which also happens when the other process is killed, and then removes the folder. It imports no module of the kit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

PID_FILE = "nvidia-cuda-mps-control.pid"
"""File in the daemon's folder of pipes with its process id."""
_NAME = "nvidia-cuda-mps"
"""Beginning of the names of the daemon's process and of its servers, of which the system keeps 15 characters."""
_CLIENTS = 2
"""Time limit in seconds for remaining clients to end."""
_SECONDS = 3.0
"""Time for an answer, and for processes to end by themselves."""


def main(program: str, folder: str) -> None:
    """Wait, end the daemon, and remove its folder."""
    sys.stdin.read()
    servers = _ask(program, "get_server_list").split()
    _ask(program, f"quit -t {_CLIENTS}")
    with contextlib.suppress(OSError), open(os.path.join(os.environ["CUDA_MPS_PIPE_DIRECTORY"], PID_FILE)) as file:
        servers.append(file.read().strip())
    _end([int(pid) for pid in servers if pid.isdecimal()])
    shutil.rmtree(folder, ignore_errors=True)


def _ask(program: str, command: str) -> str:
    """Return the daemon's answer to a command; nothing if it does not answer."""
    try:
        done = subprocess.run(
            [program], input=command + "\n", stdout=subprocess.PIPE, text=True, timeout=_CLIENTS + _SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _end(processes: list[int]) -> None:
    """Wait for processes of MPS, and kill the ones that do not end."""
    until = time.monotonic() + _SECONDS
    while any(map(is_of_mps, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in filter(is_of_mps, processes):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def is_of_mps(pid: int) -> bool:
    """Report whether a process is running and is not a later one with the same id."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            name, _, state = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return False
    return name.startswith(_NAME) and state.split()[0] != "Z"


if __name__ == "__main__":
    main(*sys.argv[1:])
