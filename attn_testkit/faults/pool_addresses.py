"""Rows of a pool by their addresses, for bugs of kernels that compute addresses with 32 bits."""

from __future__ import annotations

import torch

__all__ = ["LOWER", "addresses_of", "reached", "without_carry"]

LOWER = (1 << 32) - 1
"""The lower word of an address."""


def addresses_of(view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Addresses [...] int64 of ``rows`` [...] int64 of ``view`` [n, ...]."""
    return view.data_ptr() + rows * (view.stride(0) * view.element_size())


def reached(view: torch.Tensor, addresses: torch.Tensor) -> torch.Tensor:
    """Rows [...] int64 of ``view`` at ``addresses`` [...]; what leaves it is taken modulo its rows."""
    return (addresses - view.data_ptr()) // (view.stride(0) * view.element_size()) % len(view)


def without_carry(view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows [...] that are used for ``rows`` if an offset is added to the lower word of an address only."""
    upper = view.data_ptr() & ~LOWER
    return reached(view, upper + (addresses_of(view, rows) & LOWER))
