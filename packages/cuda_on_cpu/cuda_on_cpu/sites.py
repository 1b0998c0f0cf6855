"""Places in the author's own code: the first frame that is not torch, triton, numpy or this package.

Every allocation and every recorded operation notes its place, but few are ever read: a `Spot` is quickly made from a
running frame, and becomes a `Site` when it is read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import CodeType
from typing import NamedTuple

import numpy as np
import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_NUMPY = os.path.dirname(os.path.abspath(np.__file__)) + os.sep
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
        name.startswith((_TORCH, _NUMPY, "<frozen", "<eval_with_key>", "<__array_function__"))
        or f"{os.sep}torchinductor_" in name
        or os.path.dirname(name) == _HERE
        or f"{os.sep}triton{os.sep}" in name
        or name in _STDLIB_GLUE
    )


Spot = tuple[CodeType, int]
"""A piece of code and the offset of an instruction in it."""


def author_spot(skip: int = 0) -> Spot | Site:
    """The innermost frame that belongs to the program under test; `UNKNOWN` if there is none.

    `skip`: number of callers that are functions of this package and need no check.
    """
    frame = sys._getframe(1 + skip)
    while frame is not None:
        code = frame.f_code
        # A wrapper around the author's calls hides itself as it does from pytest's tracebacks.
        if not _is_machinery(code.co_filename) and "__tracebackhide__" not in code.co_varnames:
            return code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return UNKNOWN


def site_of(place: Spot | Site) -> Site:
    """The line of a spot; a site is returned unchanged."""
    if isinstance(place, Site):
        return place
    code, offset = place
    for start, end, line in code.co_lines():
        if start <= offset < end:
            return Site(code.co_filename, line or code.co_firstlineno, code.co_name)
    return Site(code.co_filename, code.co_firstlineno, code.co_name)


def author_site() -> Site:
    """The line of the program under test that runs now."""
    return site_of(author_spot())
