"""Lists of "cuda" tensors and of pinned host tensors.

A device tensor is an ordinary CPU tensor whose storage is listed here. The list is by storage, not by tensor, so views,
temporaries made in C++ and `param.data = ...` need no care. An entry holds the storage weakly: the memory can be freed,
but no other storage gets its identity while the entry exists.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cuda_on_cpu.private import (
    disable_functions,
    keep_identity,
    release_identity,
    storage_at,
    unwrapped,
    use_count,
)
from cuda_on_cpu.sites import UNKNOWN, Site, Spot, author_spot, site_of

_YOUNG = 128
"""Number of storages entered between two purges."""
_AT_ONCE = 64
"""Number of storages that a look at the peak asks at once, the youngest first."""
_LOOKS = 8
"""Number of looks at the peak of which one measures all storages, so that one that was resized is seen."""
_STRIDED = torch.strided


class Registry:
    """Storages of one kind: place of allocation by identity.

    `peak_bytes` is the most that was live since the program last reset the peak; before the first reset, the most at
    any query of the program. `made` counts all storages ever entered.
    """

    __slots__ = (
        "_full_at", "_lock", "_looks", "_most", "_sizes", "_unseen", "_walking", "_young", "entries", "made",
        "peak_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.entries: dict[int, Spot | Site] = {}
        self._young: list[int] = []
        self._full_at = _YOUNG
        self._lock = threading.RLock()
        self._walking = False
        self._unseen: int | None = None
        self._sizes: dict[int, int] = {}
        self._most = self._looks = 0
        self.made = self.peak_bytes = 0

    def add(self, storage: torch.UntypedStorage, skip: int = 0) -> None:
        """Enter a storage that is not known, allocated at the author's line that runs now.

        `skip`: number of callers that are functions of this package.
        """
        key = keep_identity(storage)
        self.entries[key] = author_spot(skip + 1)
        self.made += 1
        if self._unseen is not None:
            # The peak can only be passed once this many more bytes are allocated: only then is it worth a look.
            size = self._sizes[key] = storage.nbytes()
            self._most += size
            self._unseen -= size
            if self._unseen < 0:
                self._look_at_peak()
        young = self._young
        young.append(key)
        if len(young) >= _YOUNG:
            self.purge()

    def purge(self) -> None:
        """Forget storages that are gone, old ones when they have doubled: most storages die young. Nothing is purged
        while the entries are iterated, because the iteration would read freed memory.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._walking:
                self._walking = True
                full = len(self.entries) > self._full_at
                asked, self._young = list(self.entries) if full else self._young, []
                # A walk over the entries may have forgotten a young one already.
                self._forget([key for key in asked if key in self.entries and not use_count(key)])
                if full:
                    self._full_at = 2 * len(self.entries) + _YOUNG
                self._walking = False
        finally:
            self._lock.release()

    def _forget(self, gone: Iterable[int]) -> None:
        """Forget storages that are gone. Only while nothing else iterates the entries."""
        for key in gone:
            if self.entries.pop(key, None) is not None:  # of equal young identities, the first has been released
                release_identity(key)

    def live(self) -> list[tuple[int, torch.UntypedStorage]]:
        """Every storage that still exists, by its identity. The others are forgotten: programs ask for the live ones
        thousands of times, while most entries are of storages that are gone."""
        with self._lock:
            # A finalizer that runs in here may add, and purge.
            outer, self._walking = self._walking, True
            keys = list(self.entries)
            storages = list(map(storage_at, keys))
            found = [(key, storage) for key, storage in zip(keys, storages, strict=True) if storage is not None]
            if not outer and len(found) < len(keys):
                self._forget([key for key, storage in zip(keys, storages, strict=True) if storage is None])
            self._walking = outer
            return found

    def live_bytes(self) -> int:
        """Bytes in storages that still exist."""
        return self.bytes_in(self.live())

    def bytes_in(self, live: list[tuple[int, torch.UntypedStorage]]) -> int:
        """Bytes in the storages that exist now, which `live` has returned."""
        sizes = [storage.nbytes() for _, storage in live]
        now = sum(sizes)
        self.peak_bytes = max(self.peak_bytes, now)
        if self._unseen is not None:
            self._unseen = self.peak_bytes - now + (self.peak_bytes >> 8)
            self._sizes = {key: size for (key, _), size in zip(live, sizes, strict=True)}
            self._most = now
        return now

    def _look_at_peak(self) -> None:
        """Raise the peak, if it is passed. Storages that are gone are looked for among the youngest first, and only
        until the others are no more than the peak."""
        self._looks += 1
        if not self._looks % _LOOKS:
            self.live_bytes()
            return
        with self._lock:
            outer, self._walking = self._walking, True
            youngest = list(reversed(self._sizes))
            for first in range(0, len(youngest), _AT_ONCE):
                for key in youngest[first : first + _AT_ONCE]:
                    if key not in self.entries or not use_count(key):
                        self._most -= self._sizes.pop(key)
                if self._most <= self.peak_bytes:
                    break
            self._walking = outer
        if self._most > self.peak_bytes:
            self.live_bytes()
        elif self._unseen is not None:
            self._unseen = self.peak_bytes - self._most + (self.peak_bytes >> 8)

    def reset_peak(self) -> None:
        """Begin a new peak at the bytes that are live now, and follow it with every allocation, within a 256th."""
        self.peak_bytes = self._unseen = 0
        self.live_bytes()

    @contextmanager
    def peak_above(self) -> Iterator[Callable[[], int]]:
        """Follow the peak inside the block. The yielded function returns the peak of live bytes above those at the
        beginning."""
        outer, was = self._unseen, self.peak_bytes
        self.reset_peak()
        first = self.peak_bytes
        try:
            yield lambda: max(self.peak_bytes, self.live_bytes()) - first
        finally:
            self._unseen, self.peak_bytes = outer, max(was, self.peak_bytes)

    def sites(self, keys: Iterable[int]) -> list[Site]:
        """The lines that allocated these storages. Lookups are cached, because programs ask more than once."""
        known: dict[tuple[int, int], Site] = {}
        found = []
        for key in keys:
            place = self.entries[key]
            if not isinstance(place, Site):
                spot = id(place[0]), place[1]
                place = known[spot] if spot in known else known.setdefault(spot, site_of(place))
                self.entries[key] = place
            found.append(place)
        return found


DEVICE = Registry()
PINNED = Registry()
_device = DEVICE.entries
_pinned = PINNED.entries


@functools.cache
def wants_cuda(device: Any) -> bool:
    """True if a `device=` argument names the device. Raises RuntimeError for cuda:1 and above: there is one."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({device}: the emulation has one device, cuda:0)")
    return bool(device.type == "cuda")


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory behind `tensor`; 0 for layouts that have no single storage. Call it with function modes
    off."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        inner = unwrapped(tensor)
        return 0 if inner is None else storage_key(inner)
    return key


def is_device(tensor: Tensor) -> bool:
    """True if `tensor` is "cuda" memory. Call it with function modes off; otherwise `looks_device`."""
    return storage_key(tensor) in _device


def is_pinned(tensor: Tensor) -> bool:
    """True if `tensor` is pinned host memory."""
    return storage_key(tensor) in _pinned


def looks_device(tensor: Tensor) -> bool:
    """`is_device` for code that may run under a function mode."""
    with disable_functions():
        return storage_key(tensor) in _device


def tag_device(tensor: Tensor) -> Tensor:
    """Make the memory of `tensor` device memory. Call it with function modes off."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        inner = unwrapped(tensor)
        if inner is not None:
            tag_device(inner)
        return tensor
    if storage._cdata not in _device and not tensor.is_meta and (type(tensor) is Tensor or tensor.layout is _STRIDED):
        DEVICE.add(storage, 2)
    return tensor


def tag_pinned(tensor: Tensor) -> Tensor:
    """Make the memory of `tensor` pinned host memory."""
    storage = tensor.untyped_storage()
    if storage._cdata not in _pinned:
        PINNED.add(storage)
    return tensor


def allocations_made() -> int:
    """Number of allocations of device memory so far, by all threads."""
    return DEVICE.made


def allocated_at(key: int) -> Spot | Site:
    """Place where a storage was allocated."""
    return _device.get(key) or _pinned.get(key) or UNKNOWN
