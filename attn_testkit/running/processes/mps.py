"""NVIDIA's MPS, with which several lanes use a GPU at the same time instead of in turn. The run has its own daemon.

A fatal fault of one client may end all clients of a GPU; that depends on GPU and driver. ``case_runs/lane.py`` repeats
their case-runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...registry import UsageError
from . import mps_guard
from .gpus import NO_DAEMON, Gpu, visible_gpus

PROGRAM = "nvidia-cuda-mps-control"
_SECONDS = 10.0
"""Time for the daemon to start, and for the daemon and its servers to end."""
_USUAL = "/tmp/nvidia-mps"
"""Folder of a daemon that was started without ``CUDA_MPS_PIPE_DIRECTORY``."""


class DaemonError(Exception):
    """The daemon did not start. The text says why."""


class Daemon:
    """A daemon of MPS with its own folders. It ends with ``close``, and also with this process, however this process
    ends."""

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        """Start it. ``program``: path of ``nvidia-cuda-mps-control``. Raises ``DaemonError``."""
        self._folder = tempfile.mkdtemp(prefix="attn-testkit-mps-")
        self.pipe = f"{self._folder}/pipe"
        log = f"{self._folder}/log"
        os.mkdir(self.pipe)
        os.mkdir(log)
        given = {**environment, "CUDA_MPS_PIPE_DIRECTORY": self.pipe, "CUDA_MPS_LOG_DIRECTORY": log}
        # Before the daemon: nothing can come between the two.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", mps_guard.__file__, program, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=given,
            start_new_session=True,  # what ends the judge must not end it
        )
        try:
            # A file and no pipe: the daemon keeps it open.
            with open(f"{self._folder}/said", "w+b") as said:
                code = subprocess.run(
                    [program, "-d"], env=given, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=_SECONDS
                ).returncode
                said.seek(0)
                words = said.read().decode(errors="replace").strip().partition("\n")[0]
        except (OSError, subprocess.TimeoutExpired) as error:
            self.close()
            raise DaemonError(str(error)) from error
        if code:
            self.close()
            raise DaemonError(f"{PROGRAM} -d ended with exit code {code}" + (f": {words}" if words else ""))

    def close(self) -> None:
        """End the daemon and its servers, and remove its folders. Call it after its clients have ended."""
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_SECONDS)


@dataclass
class Sharing:
    """The GPUs of a run, and the daemon by which its lanes share them."""

    words: str = ""
    """A sentence for the header of the run; empty if no GPU is shared."""
    pipe: str = ""
    """Folder of the daemon whose clients the workers are, or ``NO_DAEMON``; empty: the environment is used
    unchanged."""
    remaps: tuple[str, ...] = ()
    """GPUs as the caller lists them, if the daemon gives them other numbers."""
    daemon: Daemon | None = None

    def gpu(self, visible: str) -> Gpu:
        """The GPU of a lane, from the value of ``CUDA_VISIBLE_DEVICES`` that the lane was assigned; empty: all GPUs."""
        if not self.remaps:
            return Gpu(visible, self.pipe)
        numbers = [str(self.remaps.index(visible))] if visible else map(str, range(len(self.remaps)))
        return Gpu(visible, self.pipe, ",".join(numbers))

    def close(self) -> None:
        """End the daemon, if the run has its own."""
        if self.daemon is not None:
            self.daemon.close()
            self.daemon = None


def begin_sharing(mps: str, jobs: int, gpus: tuple[str, ...], device: str, environment: Mapping[str, str]) -> Sharing:
    """Start a daemon if several lanes share a GPU. Raises ``UsageError`` if ``mps`` is ``on`` and no daemon can be
    used. ``gpus``: as in ``Options.gpus``. ``device``: the requested device.
    """
    visible = visible_gpus(environment)
    if device == "cpu" or not visible:
        if mps == "on":
            raise UsageError("--mps on: no GPU is used here; leave it out")
        return Sharing()
    several = jobs > max(1, len(gpus))
    lanes = f"{jobs} lane{'s share' if jobs > 1 else ' uses'} {'the GPU' if len(gpus) < 2 else f'{len(gpus)} GPUs'}"
    if mps == "off":
        return Sharing(f"{lanes} without MPS" if several else "", NO_DAEMON)
    if folder := _running(environment):
        return Sharing(f"{lanes} by NVIDIA's MPS, of a daemon that runs here already", folder)
    if not several and mps == "auto":
        return Sharing()
    program = shutil.which(PROGRAM, path=environment.get("PATH"))
    if program is None:
        return _without(mps, f"{PROGRAM} is not installed here", lanes)
    try:
        daemon = Daemon(program, environment)
    except (DaemonError, OSError) as error:
        return _without(mps, str(error), lanes)
    listed = visible if "CUDA_VISIBLE_DEVICES" in environment and all(map(str.isdecimal, visible)) else ()
    return Sharing(f"{lanes} by NVIDIA's MPS", daemon.pipe, listed, daemon)


def without_daemon(sharing: Sharing, reason: str, mps: str) -> Sharing:
    """End the daemon if no worker can be its client, and continue without MPS. Raises ``UsageError`` with ``on``."""
    sharing.close()
    lanes = sharing.words.partition(" by ")[0]
    return _without(mps, reason, lanes)


def _without(mps: str, reason: str, lanes: str) -> Sharing:
    if mps == "on":
        raise UsageError(f"--mps on: {reason}; with --mps auto the run goes on without it")
    return Sharing(f"{lanes} without MPS: {reason}", NO_DAEMON)


def _running(environment: Mapping[str, str]) -> str:
    """Return the folder of the daemon that processes with this environment would use; empty if there is none."""
    if named := environment.get("CUDA_MPS_PIPE_DIRECTORY", ""):
        # It may run outside this container, where its process cannot be seen.
        return named if Path(named, "control").exists() else ""
    try:
        pid = int(Path(_USUAL, mps_guard.PID_FILE).read_text())
    except (OSError, ValueError):
        return ""
    return _USUAL if mps_guard.is_of_mps(pid) else ""
