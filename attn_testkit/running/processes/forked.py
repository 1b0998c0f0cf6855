"""A process that is not a child of this one, such as one that the process of ``forking.py`` has forked."""

from __future__ import annotations

import os
import select
import signal
import subprocess


class Forked:
    """A process that is not a child, with the interface of ``subprocess.Popen``. Its exit code is unknown."""

    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        """Raises ``OSError`` for a process that has ended."""
        self.pid = pid
        # An id may be that of another process later, and this cannot.
        self._file = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 if the process has ended, else None."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return when the process has ended. Raises ``subprocess.TimeoutExpired``."""
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return 0

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._file, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        poll = select.poll()
        poll.register(self._file, select.POLLIN)
        return 0 if poll.poll(None if timeout is None else timeout * 1000.0) else None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)
