"""A call of the backend in which only compilers may wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from attn_testkit.graphs.compilers import at_work_in, forget_compiled
from attn_testkit.graphs.host_syncs import host_syncs_forbidden

from .errors import RunError, blame
from .harness import ServerHarness

T = TypeVar("T")


def looked_at(harness: ServerHarness, phase: str, label: str, no_waits: bool, call: Callable[[], T]) -> T:
    """Return the result of ``call``, which may not wait if ``no_waits``. Raises ``RunError`` for whatever it raises.

    Compilations and tunings in it are noted in ``harness.compiled``.

    A compiler or tuner that was first imported in the call, or that the kit does not know, is refused if it waits. A
    call that raised inside of one is therefore repeated: first unwatched, so that it can compile, and then watched.
    """
    worked = harness.compiled.append
    try:
        with blame(phase, label), host_syncs_forbidden(no_waits, worked):
            return call()
    except RunError as error:
        if not no_waits or error.__cause__ is None or not at_work_in(error.__cause__):
            raise
    forget_compiled()
    with blame(phase, label), host_syncs_forbidden(False, worked):
        call()
    with blame(phase, label), host_syncs_forbidden(True, worked):
        return call()
