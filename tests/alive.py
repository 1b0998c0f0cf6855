"""Whether a process that a test started still runs."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """False for one that has ended, whether or not its parent has asked for its exit status."""
    # It can be reaped at any moment: after its file was opened too, when reading it fails.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
