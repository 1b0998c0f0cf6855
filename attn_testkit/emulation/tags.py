"""Which tensors are "cuda" and which host tensors are pinned.

A device tensor is a plain CPU tensor whose storage is listed here. The list is by storage, not by tensor, so views,
temporaries made in C++ and `param.data = ...` need no care. An entry holds the storage weakly: the memory can go, its
identity is not given to another storage while the entry stands.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from attn_testkit.emulation.private import disable_functions, keep_identity, release_identity, storage_at, use_count
from attn_testkit.emulation.sites import Spot, author_spot

_FIRST_PURGE = 128
_STRIDED = torch.strided


class Registry:
    """Storages of one kind: the spot that allocated each, by its identity.

    `peak_bytes` is the most that was live whenever the program asked, since it last reset the peak.
    """

    __slots__ = ("_lock", "_purge_at", "_walking", "entries", "peak_bytes")

    def __init__(self) -> None:
        self.entries: dict[int, Spot | None] = {}
        self._purge_at = _FIRST_PURGE
        self._lock = threading.RLock()
        self._walking = False
        self.peak_bytes = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        """Enter a storage, allocated at the author's line that runs now; nothing if it is known."""
        key = storage._cdata
        if key not in self.entries:
            keep_identity(storage)
            self.entries[key] = author_spot(2)
            if len(self.entries) > self._purge_at:
                self.purge()

    def purge(self) -> None:
        """Forget storages that are gone; not while somebody walks over the entries, who would read freed memory."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._walking:
                self._walking = True
                for key in [key for key in list(self.entries) if not use_count(key)]:
                    del self.entries[key]
                    release_identity(key)
                self._purge_at = max(_FIRST_PURGE, 2 * len(self.entries))
                self._walking = False
        finally:
            self._lock.release()

    def live(self) -> list[tuple[Spot | None, torch.UntypedStorage]]:
        """Every storage that still exists, and the spot that allocated it."""
        with self._lock:
            # A finalizer that runs in here may add, and purge.
            outer, self._walking = self._walking, True
            found = [
                (spot, storage) for key, spot in list(self.entries.items()) if (storage := storage_at(key)) is not None
            ]
            self._walking = outer
            return found

    def live_bytes(self) -> int:
        """Bytes in storages that still exist."""
        return sum(storage.nbytes() for _, storage in self.live())


DEVICE = Registry()
PINNED = Registry()
_device = DEVICE.entries
_pinned = PINNED.entries


@functools.cache
def wants_cuda(device: Any) -> bool:
    """Whether a `device=` argument names the device. Raises RuntimeError for cuda:1 and above: there is one."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({device}: the emulation has one device, cuda:0)")
    return bool(device.type == "cuda")


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory behind `tensor`; 0 for layouts that have no single storage. Call it with function modes
    off."""
    try:
        key: int = tensor.untyped_storage()._cdata
        return key
    except (NotImplementedError, RuntimeError):
        inner = unwrapped(tensor)
        return 0 if inner is None else storage_key(inner)


def unwrapped(tensor: Tensor) -> Tensor | None:
    """What a tensor is around that vmap, or its like, hands to its function; None for any other tensor.

    The wrapper has no storage.
    """
    functorch: Any = torch._C._functorch
    return functorch.get_unwrapped(tensor) if functorch.is_functorch_wrapped_tensor(tensor) else None


def is_device(tensor: Tensor) -> bool:
    """Whether `tensor` is "cuda" memory. Call it with function modes off; otherwise `looks_device`."""
    return storage_key(tensor) in _device


def is_pinned(tensor: Tensor) -> bool:
    """Whether `tensor` is pinned host memory."""
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
        DEVICE.add(storage)
    return tensor


def tag_pinned(tensor: Tensor) -> Tensor:
    """Make the memory of `tensor` pinned host memory."""
    PINNED.add(tensor.untyped_storage())
    return tensor


def allocation_spot(key: int) -> Spot | None:
    """Where a storage was allocated, if it is known."""
    return _device.get(key) or _pinned.get(key)
