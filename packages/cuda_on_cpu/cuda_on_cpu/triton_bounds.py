"""Addresses of a Triton kernel under the interpreter, compared with the memory that its launch was given.

A device reads and writes every address of the process: a tile that is stored without a mask overwrites another tensor,
and nothing is raised. An access belongs to the tensor from whose pointer its address was computed, and must stay in
that tensor's memory. An address that was made from an integer, as in a table of pointers, may be anywhere in the memory
of the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cuda_on_cpu import session
from cuda_on_cpu.chosen_places import Places
from cuda_on_cpu.errors import EmulationError, StrayAccessError
from cuda_on_cpu.policy import Policy
from cuda_on_cpu.private import StorageWeakRef, disable_functions, is_gone, weak_reference
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.tags import DEVICE, PINNED
from cuda_on_cpu.triton_addresses import contents
from cuda_on_cpu.triton_races import Races, Used, acquiring, semantics_of

Array = npt.NDArray[Any]
_DEFAULT = Policy()
_MOST_PLACES = 1 << 16
WAITS, LETS_NEXT_BEGIN = "gdc_wait", "gdc_launch_dependents"
_MOST_STORAGES = 1 << 12
_FAR = 1 << 24
"""Bytes, or rounds of a loop, that an integer which no load defined leads to, and hardly any other."""
Span = tuple[int, int]
"""First address, and the address after the last."""
Touched = Callable[[int, int, int, bool, Callable[[], Places | None]], None]
"""Function that is called with the start of a tensor's memory, the used addresses, True if they are written, and a
function that returns which of them."""


@dataclass
class _Launch:
    kernel: str
    given: Mapping[str, Tensor]
    """Tensors by the names of their arguments."""
    spans: list[Span]
    """The memory that belongs to each."""
    storages: list[Span]
    owners: dict[int, Span]
    """The memory that belongs to each pointer of an argument."""
    touched: Touched | None = None
    poisons: bool = False
    """True if undefined elements of a masked load become NaN, or a large integer."""
    poisoned: bool = False
    """True once a masked load has left such an element."""
    races: Races | None = None
    atomic: bool = False
    """True while an atomic operation is done by loads and stores."""
    everywhere: Array | None = None
    """All memory of the device, int64 [n, 2], in order. It is computed once an address was made from an integer."""


class _Local(threading.local):
    launch: _Launch | None = None


_local = _Local()


@contextmanager
def looking_at_accesses(
    kernel: str,
    given: Mapping[str, Tensor],
    touched: Touched | None = None,
    policy: Policy = _DEFAULT,
    before: Used | None = None,
    warps: int = 4,
) -> Iterator[Races | None]:
    """Make ``look_at_load`` and ``look_at_store`` raise, inside the block, for memory of no tensor in ``given``.

    ``policy`` determines the memory of a tensor, and undefined elements of a masked load. ``touched`` is called with
    the memory of each load and store. ``before``: memory that the previous kernel uses, which may still run. ``warps``:
    warps of a program. Yields the detector of races, if there is one.
    """
    storages = [_storage_of(tensor) for tensor in given.values()]
    spans = storages if policy.bounds == "storage" else [_view_of(tensor) for tensor in given.values()]
    spans = _confined(given.values(), spans)
    owners: dict[int, Span] = {}
    for tensor, (start, stop) in zip(given.values(), spans, strict=True):
        known = owners.get(tensor.data_ptr(), (start, stop))  # two arguments may have one pointer
        owners[tensor.data_ptr()] = min(start, known[0]), max(stop, known[1])
    outer = _local.launch
    _local.launch = _Launch(kernel, given, spans, storages, owners, touched, policy.masked_loads == "poison")
    races = _local.launch.races = Races(kernel, given, before, warps) if policy.races else None
    try:
        yield races
    finally:
        _local.launch = outer


def _storage_of(tensor: Tensor) -> Span:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def confine(*tensors: Tensor) -> None:
    """Let a Triton kernel that gets a pointer into one of ``tensors`` use only memory from its first element to its
    last, and not the rest of its storage.

    Call it where a program hands a view over, for example the rows of a batch in a static buffer. A view of the view
    may still use all of it. A later call with the same first element replaces the earlier one. Nothing happens outside
    of ``emulated_cuda()``.
    """
    if not session.is_active():
        return
    extents = session.require().extents
    with disable_functions():
        for tensor in tensors:
            if not tensor.numel():
                continue
            storage = tensor.untyped_storage()
            start, stop = _view_of(tensor)
            known = extents.get(storage.data_ptr())
            if known is None or is_gone(known[0]):
                _forget_gone(extents)
                known = extents[storage.data_ptr()] = weak_reference(storage), {}
            known[1][start] = stop


def _forget_gone(extents: dict[int, tuple[StorageWeakRef, dict[int, int]]]) -> None:
    """Leave room for one more storage: forget those without an owner, or all if each still has one."""
    if len(extents) < _MOST_STORAGES:
        return
    for key in [key for key, (weak, _) in extents.items() if is_gone(weak)]:
        del extents[key]
    if len(extents) >= _MOST_STORAGES:
        extents.clear()


def _confined(given: Iterable[Tensor], spans: list[Span]) -> list[Span]:
    """The spans of a launch, smaller where the program has confined the memory that a tensor lies in."""
    extents = session.require().extents if session.is_active() else {}
    if not extents:
        return spans
    found = []
    for tensor, span in zip(given, spans, strict=True):
        known = extents.get(tensor.untyped_storage().data_ptr())
        if known is not None and not is_gone(known[0]):
            first, end = _view_of(tensor)
            around = [(start, stop) for start, stop in known[1].items() if start <= first < end <= stop]
            if around:
                start, stop = min(start for start, _ in around), max(stop for _, stop in around)
                span = max(start, span[0]), min(stop, span[1])
        found.append(span)
    return found


def _view_of(tensor: Tensor) -> Span:
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def look_at_load(
    parts: Sequence[Array],
    size: int,
    base: int | None = None,
    *,
    volatile: bool = False,
    shape: tuple[int, ...] | None = None,
    where: Any = ...,
) -> None:
    """Check a load like ``look_at_store``. ``volatile``: the load may wait for a write of another program."""
    inside = _look(parts, size, base, "load", "read")
    races = _races()
    if inside is not None and races is not None:
        block = None if shape is None else (parts, shape, where)
        races.read(parts, size, *inside, orders=volatile, block=block)


def look_at_store(
    parts: Sequence[Array],
    size: int,
    base: int | None = None,
    written: Array | None = None,
    *,
    shape: tuple[int, ...] | None = None,
    where: Any = ...,
) -> None:
    """The addresses of a store: every sum of one element of each of ``parts``, int64. ``size``: bytes of an element.

    ``base``: the kernel's argument from which the addresses were computed, if it is known. ``written``: the new values,
    not yet in memory. ``shape``: that of the block, of which only the elements of the index ``where`` are stored.
    Raises ``StrayAccessError``, and ``RaceError`` if another program or thread uses the same memory.
    """
    inside = _look(parts, size, base, "store", "write")
    races = _races()
    if inside is None or races is None:
        return
    addresses = np.asarray(functools.reduce(np.add, parts))
    changed = np.zeros(addresses.shape, bool)
    if written is not None:
        addresses = np.broadcast_to(addresses, written.shape)
        changed = _differs(contents(addresses, size), written)
    block = None if shape is None or written is None else (parts, shape, where)
    races.write(addresses, size, *inside, changed, block)


def _differs(before: Array | None, after: Array) -> Array:
    """True where the bits of two arrays differ, False if they are not known."""
    if before is None:
        return np.zeros(after.shape, bool)
    bits: Array = np.ascontiguousarray(after).view(before.dtype).reshape(before.shape)
    found: Array = before != bits
    return found


def races_at_once() -> Races | None:
    """The detector of races of the launch that runs; None if its programs run one after another: what each of them
    touches is noted, or there is no detector to say that they do not meet."""
    launch, races = _local.launch, _races()
    return races if launch is not None and launch.touched is None and races and races.may_run_together else None


def _races() -> Races | None:
    launch = _local.launch
    return None if launch is None or launch.atomic else launch.races


@contextmanager
def atomically() -> Iterator[None]:
    """Treat the loads and stores inside the block as one atomic operation, which no other program can see in part."""
    launch = _local.launch
    if launch is None:
        yield
        return
    outer, launch.atomic = launch.atomic, True
    try:
        yield
    finally:
        launch.atomic = outer


def undefined(element: Any, dtype: np.dtype[Any]) -> Any:
    """A number for undefined elements of a masked load. ``element``: its Triton type."""
    launch = _local.launch
    if launch is None or not launch.poisons or (element.is_int() and element.primitive_bitwidth < 8):
        return dtype.type(0)
    launch.poisoned = True
    return _poison(element.is_floating(), dtype)


@contextmanager
def padding_with_zeros() -> Iterator[None]:
    """Leave zeros where a load inside the block is masked, as for the tiles of block pointers, which Triton pads with
    zeros on every device unless the kernel asks for NaN."""
    launch = _local.launch
    if launch is None:
        yield
        return
    outer, launch.poisons = launch.poisons, False
    try:
        yield
    finally:
        launch.poisons = outer


def refuse_undefined_rounds(number: int) -> int:
    """``number``, an end of a loop. Raises EmulationError if only an undefined element of a masked load explains it."""
    launch = _local.launch
    if launch is not None and launch.poisoned and number > _FAR:
        raise EmulationError(
            f"a loop of triton kernel {launch.kernel}",
            author_site(),
            f"the loop ends at {number}, which comes from elements that a masked load without `other` leaves undefined",
            "pass `other=0` to the masked load from which the number of rounds is computed",
        )
    return number


@functools.cache
def _poison(is_floating: bool, dtype: np.dtype[Any]) -> Any:
    return np.frombuffer((b"\xff" if is_floating else b"\x5a") * dtype.itemsize, dtype)[0]


def _look(parts: Sequence[Array], size: int, base: int | None, what: str, does: str) -> Span | None:
    """The first address of an access and the address after the last; None if accesses are not checked, or nothing is
    accessed."""
    launch = _local.launch
    if launch is None or not all(part.size for part in parts):
        return None
    first = sum(int(part.min()) for part in parts)
    end = sum(int(part.max()) for part in parts) + size
    if launch.touched is not None:
        for start, stop in launch.storages:
            if start <= first and end <= stop:
                launch.touched(start, first, end, what == "store", functools.partial(_places, parts, size))
                break
    owner = None if base is None else launch.owners.get(base)
    may = launch.spans if owner is None else [owner]
    if any(start <= first and end <= stop for start, stop in may):
        return first, end
    if owner is None and launch.everywhere is not None and _all_in(launch.everywhere, parts, size):
        return first, end
    where, apart = _where(launch, first, end, base)
    rest = ": other memory of the process, or none"
    own = [s for s in launch.storages if owner is None or (s[0] <= owner[0] and owner[1] <= s[1])]
    if any(start <= first and end <= stop for start, stop in own):
        rest = ", in a storage that the launch was given a part of: what is there belongs to other rows"
    cure = (
        "mask what follows the last row, and look at strides and offsets: a slot or page times a stride takes 64 bits"
    )
    if launch.poisoned and apart > _FAR:
        cure = (
            "probably a masked load of this launch needs `other=`: without it the elements that are masked off are "
            "undefined, and one of them became part of the address"
        )
    raise StrayAccessError(
        f"a {what} of triton kernel {launch.kernel}",
        author_site(),
        f"a device would {does} {where}{rest}",
        cure,
    )


def _places(parts: Sequence[Array], size: int) -> Places | None:
    """Every address of an access; None if there are too many."""
    if np.prod([part.size for part in parts]) > _MOST_PLACES:
        return None
    return Places(size, np.unique(np.asarray(functools.reduce(np.add, parts))))


def _all_in(memory: Array, parts: Sequence[Array], size: int) -> bool:
    """True if every element is in one row (first address, address after the last) of ``memory``."""
    addresses = np.asarray(functools.reduce(np.add, parts)).reshape(-1)
    row = np.searchsorted(memory[:, 0], addresses, "right") - 1
    return bool(((row >= 0) & (addresses + size <= memory[row, 1])).all())


def _where(launch: _Launch, first: int, end: int, base: int | None) -> tuple[str, int]:
    """The tensor whose pointer was used, or else the nearest one, and the bytes between it and the access."""
    if base not in launch.owners and launch.everywhere is not None:
        return "an address that comes from a number, as in a table of pointers, and is in no memory of the device", 0
    apart = [max(start - first, end - stop) for start, stop in launch.spans]
    if not apart:
        return "memory that it was not given", 0
    pointers = [tensor.data_ptr() for tensor in launch.given.values()]
    # The nearest memory may be any tensor: an offset that is wrong leads past several.
    nearest = pointers.index(base) if base in launch.owners else min(range(len(apart)), key=apart.__getitem__)
    (name, tensor), (start, stop) = list(launch.given.items())[nearest], launch.spans[nearest]
    side = "before the start of" if first < start and start - first >= end - stop else "past the end of"
    shape, dtype = ", ".join(map(str, tensor.shape)), str(tensor.dtype).removeprefix("torch.")
    guess = "" if base in launch.owners else ", the nearest tensor"
    return f"up to {apart[nearest]} bytes {side} {name}, {dtype} [{shape}]{guess}", apart[nearest]


def pointers_of_its_own(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The builder's ``create_int_to_ptr``: the memory there belongs to no argument of the launch."""

    def create_int_to_ptr(self: Any, src: Any, *rest: Any, **named: Any) -> Any:
        if _local.launch is not None and _local.launch.everywhere is None:
            live = [storage for kind in (DEVICE, PINNED) for _, storage in kind.live()]
            rows = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in live)
            _local.launch.everywhere = np.array([*rows, (np.iinfo(np.int64).max,) * 2], np.int64)
        return stock(self, src, *rest, **named)

    return create_int_to_ptr


def programs_named(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The builder's ``set_grid_idx``, which every program of a launch begins with."""

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        stock(self, x, y, z)
        if _local.launch is not None and _local.launch.races is not None:
            _local.launch.races.begin((x, y, z))

    return set_grid_idx


def barriers_looked_at(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The builder's ``create_barrier``. ``kernels``: what the program does about the kernel before or after it."""

    def create_barrier(self: Any, kernels: str = "") -> None:
        races = _races()
        if not kernels:
            threads_meet()
        if races is not None and kernels == WAITS:
            races.waits()
        elif races is not None and kernels == LETS_NEXT_BEGIN:
            races.has_let_next_begin = True
        stock(self)

    return create_barrier


def threads_meet() -> None:
    """The threads of the program that runs wait for each other."""
    launch = _local.launch
    if launch is not None and launch.races is not None:
        launch.races.threads_meet()


def atomics_looked_at(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The builder's ``create_atomic_rmw``, which stores where its mask is set."""

    def create_atomic_rmw(self: Any, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        addresses = np.asarray(ptr.data).view(np.int64)
        chosen = np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)
        return _looked_at(
            lambda: stock(self, rmwOp, ptr, val, mask, sem, scope), ptr, addresses[chosen], val, (sem, scope)
        )

    return create_atomic_rmw


def exchanges_looked_at(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The builder's ``create_atomic_cas``, which may store at any of its addresses."""

    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        addresses = np.asarray(ptr.data).view(np.int64)
        return _looked_at(lambda: stock(self, ptr, cmp, val, sem, scope), ptr, addresses, val, (sem, scope))

    return create_atomic_cas


def _looked_at(run: Callable[[], Any], ptr: Any, addresses: Array, val: Any, semantics: tuple[Any, Any]) -> Any:
    """Do the atomic operation ``run``, and return its answer."""
    threads_meet()
    size = np.asarray(val.data).itemsize
    inside = _look((addresses,), size, getattr(ptr, "base", None), "store", "write")
    races = None if inside is None else _races()
    before = None if races is None else contents(addresses, size)
    answer = run()
    if races is None or before is None:
        return answer
    acquires, releases = semantics_of(*semantics)
    after = contents(addresses, size)
    acquire = races.add(addresses, size, _differs(before, before if after is None else after), releases)
    return acquiring(answer, acquire) if acquires and acquire is not None else answer
