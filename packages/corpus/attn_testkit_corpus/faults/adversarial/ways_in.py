"""Ways in which code in a worker finds objects that it was not given: frames, and the garbage collector."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any


def in_frames(name: str) -> Any:
    """The innermost local variable of this name of any caller; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get(name) is not None:
            return frame.f_locals[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def of_kind(name: str) -> Iterator[Any]:
    """Every object of the garbage collector whose class has this name."""
    return (found for found in gc.get_objects() if type(found).__name__ == name)
