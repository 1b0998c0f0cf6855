"""``os._exit(0)`` in a front end's process that a backend shares: it must not end a run as a success."""

from __future__ import annotations

import os
from typing import NoReturn

_end = os._exit
_FAILED = 3
"""The exit code of the kit's own failure: there is no verdict."""


def refuse_success_by_exit() -> None:
    """Make ``os._exit`` refuse code 0 in this process from now on. Any other code still works.

    It is never undone, since code that a backend registered runs after the last line of the front end. Forked children
    are not affected.
    """
    owner = os.getpid()

    def end(status: int) -> NoReturn:
        if status == 0 and os.getpid() == owner:
            os.write(2, b"attn-testkit: os._exit(0) was called in the process that judges: no verdict\n")
            status = _FAILED
        _end(status)

    os._exit = end
