"""Plans of decorated tests: the first worker of xdist that needs one makes it, and the others read it.

The controller collects nothing, so it cannot plan them. Its workers share a folder that exists as long as the session,
so its plans belong to the present code. The name of a plan's file follows from the request.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

from ..running.planning.request import Plan, Request


class SharedPlans:
    """The plans of one session. Without a folder on this machine, each worker makes every plan itself."""

    def __init__(self, folder: str = "") -> None:
        self._folder = Path(folder) if folder else None

    def plan(self, request: Request, make: Callable[[], Plan]) -> Plan:
        """Return the plan of a request: the plan of another worker, else ``make()``. Raises what ``make`` raises."""
        if self._folder is None or not self._folder.is_dir():
            return make()
        place = self._folder / hashlib.sha256(repr(request).encode()).hexdigest()
        with place.with_suffix(".lock").open("w") as lock:
            # It is free again when its process ends, however that ends.
            fcntl.flock(lock, fcntl.LOCK_EX)
            plan = _read(place)
            if plan is None:
                plan = make()
                unfinished = place.with_suffix(".part")
                unfinished.write_bytes(pickle.dumps(plan))
                os.replace(unfinished, place)
        return plan


def _read(place: Path) -> Plan | None:
    """Return the plan in a file; None if there is no file, or if it holds something else."""
    try:
        found = pickle.loads(place.read_bytes())
    except Exception:
        return None
    return found if isinstance(found, Plan) else None
