"""Which tensors are "cuda" and which host tensors are pinned.

A device tensor is a plain CPU tensor whose storage is listed here. The list is by storage, not by tensor, so views,
temporaries made in C++ and `param.data = ...` need no care. An entry holds the storage weakly: the memory can go, its
identity is not given to another storage while the entry stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attn_testkit.emulation.private import StorageWeakRef, disable_functions, is_gone, storage_from_weak, weak_reference
from attn_testkit.emulation.sites import UNKNOWN, Site, author_site

_FIRST_PURGE = 128


class Registry:
    """Storages of one kind: (weak reference, allocating line, bytes when it was added) by the storage's identity.

    `peak_bytes` is the most that was live whenever the program asked, since it last reset the peak.
    """

    __slots__ = ("_purge_at", "entries", "peak_bytes")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[StorageWeakRef, Site, int]] = {}
        self._purge_at = _FIRST_PURGE
        self.peak_bytes = 0

    def add(self, tensor: Tensor) -> None:
        """Enter the storage of `tensor`, allocated by the author's line that runs now; nothing if it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.entries:
            self.entries[key] = (weak_reference(storage), author_site(), storage.nbytes())
            if len(self.entries) > self._purge_at:
                self.purge()

    def purge(self) -> None:
        """Forget storages that are gone."""
        for key, (weak, _, _) in list(self.entries.items()):
            if is_gone(weak):
                self.entries.pop(key, None)
        self._purge_at = max(_FIRST_PURGE, 2 * len(self.entries))

    def live(self) -> Iterator[tuple[Site, int, int]]:
        """(allocating line, address, bytes) of every storage that still exists."""
        for weak, site, _ in list(self.entries.values()):
            storage = storage_from_weak(weak)
            if storage is not None:
                yield site, storage.data_ptr(), storage.nbytes()

    def live_bytes(self) -> int:
        """Bytes in storages that still exist."""
        return sum(size for _, _, size in self.live())


DEVICE = Registry()
PINNED = Registry()
_device = DEVICE.entries
_pinned = PINNED.entries


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
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


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
    """Make the memory of `tensor` device memory."""
    if storage_key(tensor) not in _device and tensor.layout is torch.strided and not tensor.is_meta:
        DEVICE.add(tensor)
    return tensor


def tag_pinned(tensor: Tensor) -> Tensor:
    """Make the memory of `tensor` pinned host memory."""
    PINNED.add(tensor)
    return tensor


def allocation_site(key: int) -> Site:
    """The line that allocated a storage."""
    entry = _device.get(key) or _pinned.get(key)
    return entry[1] if entry else UNKNOWN
