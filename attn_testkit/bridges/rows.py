"""The memory layout in which models of servers give q, k and v to their attention layers."""

from __future__ import annotations

import torch

__all__ = ["as_projected"]


def as_projected(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` [T, heads, dim] as [T, heads * dim], without a copy: what ``qkv.split`` leaves of a projection.

    Rows may be strided, heads lie one behind the other. Raises ``RuntimeError`` if they do not.
    """
    return rows.view(rows.shape[0], rows.shape[1] * rows.shape[2])
