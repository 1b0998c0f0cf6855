"""A call of the backend in which nothing may wait for the device, but for compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from attn_testkit.graphs.compilers import at_work_in, forget_compiled
from attn_testkit.graphs.host_syncs import host_syncs_forbidden

from .errors import DriveError, blame
from .harness import ServerHarness

__all__ = ["looked_at"]

T = TypeVar("T")


def looked_at(harness: ServerHarness, phase: str, label: str, no_waits: bool, call: Callable[[], T]) -> T:
    """What ``call`` returns; it may not wait where ``no_waits``. Raises ``DriveError`` for whatever it raises.

    What was compiled or tuned in it is noted in ``harness.compiled``.

    A compiler or tuner that was imported only in the call, or that nothing announces, is refused where it waits. So
    what was raised inside of one is called again: first without a look, which lets it compile, and then with one.
    """
    worked = harness.compiled.append
    try:
        with blame(phase, label), host_syncs_forbidden(no_waits, worked):
            return call()
    except DriveError as error:
        if not no_waits or error.__cause__ is None or not at_work_in(error.__cause__):
            raise
    forget_compiled()
    with blame(phase, label), host_syncs_forbidden(False, worked):
        call()
    with blame(phase, label), host_syncs_forbidden(True, worked):
        return call()
