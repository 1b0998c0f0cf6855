"""NumPy arrays of pinned memory, whose functions and methods first look for copies to it that may not have been made.

``tensor.numpy()`` shares the memory of a pinned tensor. Such an array may be made at any time, but it holds the
elements of a non-blocking copy only once the host has waited. Code that reads the memory through its address (ctypes,
the buffer protocol, an array of ``np.asarray``) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cuda_on_cpu import session
from cuda_on_cpu.accesses import Access, Span

_READS = (
    "all", "any", "argmax", "argmin", "argpartition", "argsort", "astype", "choose", "compress", "copy",
    "cumprod", "cumsum", "dot", "dump", "dumps", "flatten", "item", "max", "mean", "min", "nonzero", "prod",
    "ptp", "repeat", "round", "searchsorted", "std", "sum", "take", "tobytes", "tofile", "tolist", "trace",
    "var", "__bool__", "__complex__", "__contains__", "__copy__", "__deepcopy__", "__float__", "__format__",
    "__index__", "__int__", "__reduce__", "__reduce_ex__", "__repr__", "__str__",
)  # fmt: skip
_WRITES = ("fill", "partition", "put", "sort")
_FUNCTIONS = frozenset({np.array_equal, np.concatenate, np.dot, np.lexsort, np.searchsorted, np.vdot, np.where})
"""Functions of NumPy in C, or with a short way, that read all of their arrays."""


class PinnedArray(np.ndarray[Any, Any]):
    """An array of pinned memory. NumPy makes ordinary arrays of its results."""

    def __getitem__(self, key: Any) -> Any:
        """Elements; a part of the array stays an array of pinned memory, and is not read."""
        found = super().__getitem__(key)
        if isinstance(found, PinnedArray) and np.may_share_memory(found, self):
            return found
        self._touch(key, writes=False)
        return found.view(np.ndarray) if isinstance(found, PinnedArray) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write elements."""
        self._touch(key, writes=True)
        super().__setitem__(key, plain(value))

    def _touch(self, key: Any, writes: bool) -> None:
        """Note the use of the elements that ``key`` names: a part, or elements that indices or a mask choose."""
        keys = key if isinstance(key, tuple) else (key,)
        part = super().__getitem__(keys if any(each is Ellipsis for each in keys) else (*keys, ...))
        if np.may_share_memory(part, self):
            _touch(part, "element", writes=writes)
        elif part.size:
            _touch(self, "elements", writes=writes, partly=True)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **named: Any) -> Any:
        """Compute on ordinary arrays of the same memory."""
        _touch_all(inputs, ufunc.__name__, writes=method == "at")
        _touch_all(out, ufunc.__name__, writes=True)
        named = {name: plain(value) for name, value in named.items()}
        if out:
            named["out"] = plain(out)
        found = getattr(ufunc, method)(*map(plain, inputs), **named)
        return out[0] if len(out) == 1 else out or found

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of NumPy, which ends in methods and universal functions or reads all of its arrays."""
        if func is np.copyto:
            _touch_all(args[:1], "copyto", writes=True)
            _touch_all(args[1:], "copyto", writes=False)
        elif func in _FUNCTIONS:
            _touch_all(args, func.__name__, writes=False)
        else:
            return super().__array_function__(func, types, args, kwargs)
        return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


def plain(value: Any) -> Any:
    """An ordinary array of the same memory; other values unchanged, also inside of lists and tuples."""
    if isinstance(value, PinnedArray):
        return value.view(np.ndarray)
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def is_read(value: Any, what: str) -> None:
    """Note that ``what`` reads a value, if that is an array of pinned memory."""
    _touch_all((value,), what, writes=False)


def _touch_all(values: Iterable[Any], what: str, *, writes: bool) -> None:
    for value in values:
        if isinstance(value, PinnedArray):
            _touch(value, what, writes=writes)
        elif type(value) in (list, tuple):
            _touch_all(value, what, writes=writes)


def _touch(array: np.ndarray[Any, Any], what: str, *, writes: bool, partly: bool = False) -> None:
    """Tell the order of streams that the host uses an array. Raises EmulationError like ``ArrivingCopies.refuse``."""
    current = session.current()
    order = None if current is None else current.keeps_order
    if order is None or not order.arrivals.pending or not array.size:
        return
    steps = [step * (n - 1) for step, n in zip(array.strides, array.shape, strict=True)]
    address = array.ctypes.data
    first, end = address + sum(min(0, step) for step in steps), address + sum(max(0, step) for step in steps)
    span = Span.SOME if partly else Span.ALL if array.flags.forc else Span.ENDS
    order.host_touches(Access(first, end + array.itemsize, span, writes), f"numpy.{what}")


def _asks_first(name: str, writes: bool) -> Callable[..., Any]:
    stock = getattr(np.ndarray, name)

    def method(self: PinnedArray, *args: Any, **named: Any) -> Any:
        _touch(self, name, writes=writes)
        return getattr(plain(self), name)(*map(plain, args), **{key: plain(value) for key, value in named.items()})

    method.__name__, method.__doc__ = name, stock.__doc__
    return method


for _names, _writes in ((_READS, False), (_WRITES, True)):
    for _name in _names:
        if hasattr(np.ndarray, _name):
            setattr(PinnedArray, _name, _asks_first(_name, _writes))
