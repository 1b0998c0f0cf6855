"""Watching the host while a backend prepares a replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

__all__ = ["host_syncs_forbidden"]


@contextmanager
def host_syncs_forbidden(forbidden: bool = True) -> Iterator[None]:
    """Inside, any operation that makes the host wait for the device raises ``RuntimeError``.

    So does switching that off: whoever plans could wait unseen, and switch it on again.
    """
    if not forbidden:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    with ExitStack() as stack:
        stack.callback(torch.cuda.set_sync_debug_mode, before)
        for owner, name in _SETTERS:
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, _refuse)
        yield


_SETTERS: tuple[tuple[Any, str], ...] = (
    (torch.cuda, "set_sync_debug_mode"),
    (torch._C, "_cuda_set_sync_debug_mode"),
)


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError("set_sync_debug_mode() was called: synchronizing operations would go unseen")
