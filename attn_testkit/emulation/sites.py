"""Where in the author's own code something happened: the first frame that is not torch, triton or this package."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import NamedTuple

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB_GLUE = frozenset(os.path.abspath(module.__file__) for module in (contextlib, functools) if module.__file__)


class Site(NamedTuple):
    """One line of the author's code."""

    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        path = os.path.relpath(self.filename) if self.filename.startswith(os.getcwd() + os.sep) else self.filename
        return f"{path}:{self.line} ({self.function})"


UNKNOWN = Site("<unknown>", 0, "?")


@functools.cache
def _is_machinery(name: str) -> bool:
    return (
        name.startswith((_TORCH, "<frozen"))
        or os.path.dirname(name) == _HERE
        or f"{os.sep}triton{os.sep}" in name
        or name in _STDLIB_GLUE
    )


def author_site() -> Site:
    """The innermost frame that belongs to the program under test."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_machinery(code.co_filename):
            return Site(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return UNKNOWN
