"""The memory layout in which models of servers give q, k and v to their attention layers."""

from __future__ import annotations

import torch

_ALIGNED = 16
"""Bytes: kernels that store new rows load as many at once."""


def as_projected(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` [T, heads, dim] as [T, heads * dim], without a copy, like a result of ``qkv.split``. Rows may be
    strided; heads must be contiguous. Raises ``RuntimeError`` if they are not.
    """
    return rows.view(rows.shape[0], rows.shape[1] * rows.shape[2])


def of_softmax_layer(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a softmax layer between those that keep a state, in place of ``mixed``, ``a`` and ``b``.

    The kit slices them from a row of all layers, whose gates have any width. A server's projection begins at an aligned
    address and has aligned rows, so unaligned rows are copied.
    """
    assert k is not None
    assert v is not None
    return _aligned(q), _aligned(k), _aligned(v)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    apart = rows.data_ptr() % _ALIGNED or rows.stride(0) * rows.element_size() % _ALIGNED
    return rows.clone(memory_format=torch.contiguous_format) if apart else rows
