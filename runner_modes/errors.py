"""What goes wrong in a drive, and whose mistake it is: everything raised inside ``blame`` is the backend's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attn_testkit.checks.failures import is_ctrl_c

__all__ = ["ContractError", "DriveError", "ShapeError", "blame"]


class DriveError(Exception):
    """A hook or a forward raised; ``__cause__`` is what it raised."""

    def __init__(self, phase: str, label: str) -> None:
        super().__init__(phase)
        self.phase = phase
        """``constructor``, ``plan``, ``forward``, ``graph state``, ``plan for capture``, ``warm-up``, ``capture``,
        ``plan for replay``, ``replay``, ``read back``, ``verify mask``, ``fill value`` or ``kernels``."""
        self.label = label
        """The step or bucket, in words; empty where there is none."""


class ContractError(Exception):
    """A hook or a property answered what the contract does not allow."""

    def __init__(self, message: str, cure: str) -> None:
        super().__init__(message)
        self.cure = cure
        """What the author of the backend can do about it."""


class ShapeError(Exception):
    """An output has the wrong shape, dtype or device; the model cannot go on."""


@contextmanager
def blame(phase: str, label: str = "") -> Iterator[None]:
    """Whatever is raised inside, the backend raised it.

    ``SystemExit`` and the like too: a kernel wrapper that exits would end the caller's program. In the caller's own
    process a ``KeyboardInterrupt`` may be the user's, and passes. Raises ``DriveError``
    from it; one from an inner ``blame`` passes as it is.
    """
    try:
        yield
    except DriveError:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise DriveError(phase, label) from error
