"""What goes wrong in a drive, and whose mistake it is: everything raised inside ``blame`` is the backend's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attn_testkit.checks.failures import is_ctrl_c

__all__ = ["ContractError", "DriveError", "NoRoomError", "ShapeError", "blame", "no_mode_left", "out_of_memory"]


class DriveError(Exception):
    """A hook or a forward raised; ``__cause__`` is what it raised."""

    def __init__(self, phase: str, label: str) -> None:
        super().__init__(phase)
        self.phase = phase
        """``constructor``, ``KV pool``, ``plan``, ``forward``, ``graph state``, ``plan for capture``, ``warm-up``,
        ``capture``, ``plan for replay``, ``replay``, ``read back``, ``verify mask``, ``fill value`` or ``kernels``."""
        self.label = label
        """The step or bucket, in words; empty where there is none."""


class ContractError(Exception):
    """A hook or a property answered what the contract does not allow."""

    site = ""
    """The line at which it was noticed is the kit's, and of no use to an author."""

    def __init__(self, message: str, cure: str) -> None:
        super().__init__(message)
        self.cure = cure
        """What the author of the backend can do about it."""


class NoRoomError(Exception):
    """A case takes more memory than the machine has. Nobody's mistake: it is not run here."""


class ShapeError(Exception):
    """An output has the wrong shape, dtype or device; the model cannot go on."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator said no, of a device or of a host, for which torch has no type of its own."""
    words = "out of memory", "can't allocate memory", "Cannot allocate memory"
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in words))


@contextmanager
def no_mode_left() -> Iterator[None]:
    """Raises ``ContractError`` where a function or dispatch mode is left entered: it would see the caller's calls."""
    before = _modes()
    yield
    left = [mode for was, now in zip(before, _modes(), strict=True) for mode in now[len(was) :]]
    if left:
        names = ", ".join(type(mode).__qualname__ for mode in left)
        raise ContractError(f"a mode of torch was left entered: {names}", "enter it in a `with` block")


def _modes() -> tuple[Sequence[object], Sequence[object]]:
    """Function and dispatch modes that are entered, the outermost first."""
    functions: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return functions, _get_current_dispatch_mode_stack()


@contextmanager
def blame(phase: str, label: str = "") -> Iterator[None]:
    """Whatever is raised inside, the backend raised it.

    ``SystemExit`` and the like too: a kernel wrapper that exits would end the caller's program. In the caller's own
    process a ``KeyboardInterrupt`` may be the user's, and passes. Raises ``DriveError`` from it, and from what
    ``no_mode_left`` raises; one from an inner ``blame`` passes as it is.
    """
    try:
        with no_mode_left():
            yield
    except (DriveError, NoRoomError):
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise DriveError(phase, label) from error
