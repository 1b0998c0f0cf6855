"""Functions of CUDA's driver, by the ``cuda-bindings`` package, on which torch's builds for CUDA depend."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any


class Refused(Exception):
    """Raised if the driver refuses a request."""


def value_of(answer: tuple[Any, ...]) -> Any:
    """The value that a function of the driver returned. Raises ``Refused`` for an error."""
    if int(answer[0]):
        raise Refused(answer[0])
    return answer[1] if len(answer) > 1 else None


@lru_cache
def driver_api() -> Any:
    """``cuda.bindings.driver``; None if it is missing."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
