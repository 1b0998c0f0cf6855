"""Errors of a run and their origin: everything raised inside ``blame`` comes from the backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attn_testkit.checks.failures import is_ctrl_c


class RunError(Exception):
    """Raised if a hook or a forward raised; ``__cause__`` is the original error."""

    def __init__(self, phase: str, label: str) -> None:
        super().__init__(phase)
        self.phase = phase
        """Phase: ``constructor``, ``KV pool``, ``plan``, ``forward``, ``graph state``, ``plan for capture``,
        ``warm-up``, ``capture``, ``receive``, ``offload``, ``reload``, ``plan for replay``, ``replay``,
        ``read back``, ``verify mask``, ``fill value`` or ``kernels``."""
        self.label = label
        """The step or bucket in words; empty if there is none."""


class ContractError(Exception):
    """Raised if a hook or a property returned a value that the contract does not allow."""

    site: str | tuple[str, int, str] = ""
    """File, line and function of the author's code. Usually empty: the line that noticed the error is in the kit and
    does not help an author."""

    def __init__(self, message: str, cure: str) -> None:
        super().__init__(message)
        self.cure = cure
        """Advice to the author of the backend."""


class MissingRankError(ContractError):
    """Raised if ranks wait in a collective to which another rank does not come."""

    def __init__(self, message: str, cure: str, site: tuple[str, int, str] | None) -> None:
        super().__init__(message, cure)
        self.site = site or ""


class NoRoomError(Exception):
    """Raised if a case needs more memory than the machine has, so that it is not run here."""


class ShapeError(Exception):
    """Raised if an output has the wrong shape, dtype or device, so that the model cannot continue."""


def out_of_memory(error: BaseException) -> bool:
    """True if an allocator of a device or of the host failed; torch has no exception type for the latter."""
    words = "out of memory", "can't allocate memory", "Cannot allocate memory"
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in words))


@contextmanager
def no_mode_left() -> Iterator[None]:
    """Raise ``ContractError`` if a function or dispatch mode is left entered: it would intercept the caller's calls."""
    before = _modes()
    yield
    left = [mode for was, now in zip(before, _modes(), strict=True) for mode in now[len(was) :]]
    if left:
        names = ", ".join(type(mode).__qualname__ for mode in left)
        raise ContractError(f"a torch mode was entered and not left: {names}", "enter it in a `with` block")


def _modes() -> tuple[Sequence[object], Sequence[object]]:
    """Function and dispatch modes that are entered, the outermost first."""
    functions: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return functions, _get_current_dispatch_mode_stack()


@contextmanager
def blame(phase: str, label: str = "") -> Iterator[None]:
    """Attribute everything raised inside to the backend.

    This includes ``SystemExit``: a kernel wrapper that exits would end the caller's program. In the caller's own
    process a ``KeyboardInterrupt`` may come from the user, so it is not caught. Raises ``RunError`` from the error, and
    from the error of ``no_mode_left``; a ``RunError`` of an inner ``blame`` passes unchanged.
    """
    try:
        with no_mode_left():
            yield
    except (RunError, NoRoomError):
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise RunError(phase, label) from error
