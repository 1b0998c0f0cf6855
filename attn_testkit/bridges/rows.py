"""The memory layout in which models of servers give q, k and v to their attention layers."""

from __future__ import annotations

import torch

__all__ = ["as_projected", "of_softmax_layer"]

_ALIGNED = 16
"""Bytes: kernels that store new rows load as many at once."""


def as_projected(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` [T, heads, dim] as [T, heads * dim], without a copy: what ``qkv.split`` leaves of a projection.

    Rows may be strided, heads lie one behind the other. Raises ``RuntimeError`` if they do not.
    """
    return rows.view(rows.shape[0], rows.shape[1] * rows.shape[2])


def of_softmax_layer(*given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """q, k and v of a softmax layer between those that keep a state, in place of ``mixed``, ``a`` and ``b``.

    The kit cuts a row of all layers, whose gates have any width. A server's projection begins at an aligned address and
    has aligned rows, so others are copied.
    """
    rows = tuple(each for each in given if each is not None)
    assert len(rows) == len(given), "a softmax layer has q, k and v"
    return tuple(each if _is_aligned(each) else each.clone(memory_format=torch.contiguous_format) for each in rows)


def _is_aligned(rows: torch.Tensor) -> bool:
    return not (rows.data_ptr() % _ALIGNED or rows.stride(0) * rows.element_size() % _ALIGNED)
