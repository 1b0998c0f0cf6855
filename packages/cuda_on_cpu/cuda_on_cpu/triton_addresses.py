"""All memory of the process as one array that starts near address 0: a pointer is an index into it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_ADDRESS_BITS = 48
_FIRST = 4096
"""Element at index 0: NumPy treats an array at address 0 as none."""


@functools.cache
def memory(dtype: np.dtype[Any]) -> Array:
    """All memory as elements of ``dtype``."""
    size = dtype.itemsize
    interface = {
        "shape": ((1 << _ADDRESS_BITS) // size - _FIRST,),
        "typestr": dtype.str,
        "data": (_FIRST * size, False),
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def places_of(parts: Sequence[Array], itemsize: int) -> Array | None:
    """Indices into `memory`; None if one of them may not be an aligned address."""
    shift, low = itemsize.bit_length() - 1, 0
    for part in parts:
        if part.size == 0:
            return part
        bits = part.item() if part.size == 1 else int(np.bitwise_or.reduce(part, axis=None))
        if bits & (itemsize - 1):
            return None
        low += bits if part.size == 1 or bits >= 0 else int(part.min())
    if low < 0:
        return None
    first, *others = parts
    return functools.reduce(np.add, [(first >> shift) - _FIRST, *[part >> shift for part in others]])


def read(places: Array | None, dtype: np.dtype[Any]) -> Array | None:
    """Elements of ``memory``; None without places, or if one of them is not an address."""
    if places is None:
        return None
    try:
        return memory(dtype).take(places)
    except IndexError:  # no address
        return None


def contents(addresses: Array, size: int) -> Array | None:
    """The bits at each address, as unsigned integers of ``size`` bytes; None if one may not be an aligned address."""
    return read(places_of((addresses,), size), np.dtype(f"u{size}"))
