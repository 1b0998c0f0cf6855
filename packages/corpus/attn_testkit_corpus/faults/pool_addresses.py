"""Rows of a pool by their addresses, and a right backend that reads them by address; bugs compute addresses with 32
bits."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer

from .b_empty_batches import LEAN
from .parent import PlannedBackend

LOWER = (1 << 32) - 1
"""The lower word of an address."""


def addresses_of(view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Addresses [...] int64 of ``rows`` [...] int64 of ``view`` [n, ...]."""
    return view.data_ptr() + rows * (view.stride(0) * view.element_size())


def reached(view: torch.Tensor, addresses: torch.Tensor) -> torch.Tensor:
    """Rows [...] int64 of ``view`` at ``addresses`` [...]; rows outside of it are taken modulo its rows."""
    return (addresses - view.data_ptr()) // (view.stride(0) * view.element_size()) % len(view)


def without_carry(view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows [...] that are used for ``rows`` if an offset is added only to the lower word of an address."""
    upper = view.data_ptr() & ~LOWER
    return reached(view, upper + (addresses_of(view, rows) & LOWER))


class ReadsByAddress(PlannedBackend):
    """A right backend that looks up rows of K and of V each by itself."""

    capabilities = LEAN

    def rows(self, view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows of ``view`` [slots, Hk, D] that are read for ``slots``."""
        return reached(view, addresses_of(view, slots))

    @override
    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        return super().gather(layer, self.rows(keys, slots))[0], super().gather(layer, self.rows(values, slots))[1]
