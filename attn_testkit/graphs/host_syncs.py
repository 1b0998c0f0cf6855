"""Watching the host while a backend prepares a replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["host_syncs_forbidden"]


@contextmanager
def host_syncs_forbidden(forbidden: bool = True) -> Iterator[None]:
    """Inside, any operation that makes the host wait for the device raises ``RuntimeError``."""
    if not forbidden:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
