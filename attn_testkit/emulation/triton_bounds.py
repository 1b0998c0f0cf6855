"""Addresses of a Triton kernel under the interpreter, compared with the memory that its launch was given.

A device writes to every address of the process: a tile that is stored without a mask ends in another tensor, and
nothing is raised. Loads may be a little off: kernels read a few numbers behind a table and mask them later. A load that
is far off has an offset that overflowed, and would end this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_testkit.emulation.errors import StrayAccessError
from attn_testkit.emulation.sites import author_site

__all__ = [
    "atomics_looked_at",
    "exchanges_looked_at",
    "look_at_load",
    "look_at_store",
    "looking_at_accesses",
    "pointers_of_its_own",
]

Array = npt.NDArray[Any]


@dataclass
class _Launch:
    kernel: str
    given: Mapping[str, Tensor]
    """Tensors by the names of their arguments."""
    spans: list[tuple[int, int]]
    """First address of their memory, and the one behind its last."""
    touched: Callable[[int, int, int, bool], None] | None = None
    """Called with the start of a tensor's memory, the addresses that are used, and True if they are written."""
    makes_pointers: bool = False
    """True if an address came from a number, as in a table of pointers: it may point anywhere."""


class _Local(threading.local):
    launch: _Launch | None = None


_local = _Local()


@contextmanager
def looking_at_accesses(
    kernel: str, given: Mapping[str, Tensor], touched: Callable[[int, int, int, bool], None] | None = None
) -> Iterator[None]:
    """Make ``look_at_load`` and ``look_at_store`` raise, inside the block, for memory of no tensor in ``given``.

    ``touched`` is called with the start of a tensor's memory, the first address and the one after the last of a load or
    a store, of which at least one element in between is used, and True for a store.
    """
    storages = [tensor.untyped_storage() for tensor in given.values()]
    spans = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
    outer, _local.launch = _local.launch, _Launch(kernel, given, spans, touched)
    try:
        yield
    finally:
        _local.launch = outer


_NEAR = 1 << 20
"""Bytes that a load may be off."""


def look_at_load(parts: Sequence[Array], size: int, base: int | None = None) -> None:
    """Check a load like ``look_at_store``, with a margin on both sides."""
    _look(parts, size, base, _NEAR, "load", "read")


def look_at_store(parts: Sequence[Array], size: int, base: int | None = None) -> None:
    """The addresses of a store: every sum of one element of each of ``parts``, int64. ``size``: bytes of an element.

    ``base``: the pointer that the kernel was given and computed them from, as far as it is known. Raises
    ``StrayAccessError``.
    """
    _look(parts, size, base, 0, "store", "write")


def _look(parts: Sequence[Array], size: int, base: int | None, near: int, what: str, does: str) -> None:
    launch = _local.launch
    if launch is None or not all(part.size for part in parts):
        return
    first = sum(int(part.min()) for part in parts)
    end = sum(int(part.max()) for part in parts) + size
    if launch.touched is not None:
        for start, stop in launch.spans:
            if start <= first and end <= stop:
                launch.touched(start, first, end, what == "store")
                break
    if launch.makes_pointers or any(start - near <= first and end <= stop + near for start, stop in launch.spans):
        return
    raise StrayAccessError(
        f"a {what} of triton kernel {launch.kernel}",
        author_site(),
        f"a device would {does} {_where(launch, first, end, base)}: other memory of the process, or none",
        "mask what lies behind the last row, and look at strides and offsets: a slot or a page times a stride takes "
        "64 bits",
    )


def _where(launch: _Launch, first: int, end: int, base: int | None) -> str:
    """The tensor whose pointer was used, or else the nearest one, and how far the access is from it."""
    apart = [max(start - first, end - stop) for start, stop in launch.spans]
    if not apart:
        return "memory that it was not given"
    pointers = [tensor.data_ptr() for tensor in launch.given.values()]
    # What lies nearest may be any tensor: an offset that is wrong leads past several.
    nearest = pointers.index(base) if base in pointers else min(range(len(apart)), key=apart.__getitem__)
    (name, tensor), (start, stop) = list(launch.given.items())[nearest], launch.spans[nearest]
    side = "before" if first < start and start - first >= end - stop else "behind"
    shape, dtype = ", ".join(map(str, tensor.shape)), str(tensor.dtype).removeprefix("torch.")
    guess = "" if base in pointers else ", the nearest tensor"
    return f"up to {apart[nearest]} bytes {side} the memory of {name}, {dtype} [{shape}]{guess}"


def pointers_of_its_own(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The builder's ``create_int_to_ptr``: whatever is stored there, nobody here knows whose it is."""

    def create_int_to_ptr(self: Any, src: Any, *rest: Any, **named: Any) -> Any:
        if _local.launch is not None:
            _local.launch.makes_pointers = True
        return stock(self, src, *rest, **named)

    return create_int_to_ptr


def atomics_looked_at(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The builder's ``create_atomic_rmw``, which stores where its mask is set."""

    def create_atomic_rmw(self: Any, rmwOp: Any, ptr: Any, val: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        addresses = np.asarray(ptr.data).view(np.int64)
        chosen = np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)
        look_at_store((addresses[chosen],), np.asarray(val.data).itemsize, getattr(ptr, "base", None))
        return stock(self, rmwOp, ptr, val, mask, *rest, **named)

    return create_atomic_rmw


def exchanges_looked_at(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The builder's ``create_atomic_cas``, which may store at any of its addresses."""

    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, *rest: Any, **named: Any) -> Any:
        look_at_store((np.asarray(ptr.data).view(np.int64),), np.asarray(val.data).itemsize, getattr(ptr, "base", None))
        return stock(self, ptr, cmp, val, *rest, **named)

    return create_atomic_cas
