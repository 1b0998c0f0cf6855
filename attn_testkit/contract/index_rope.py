"""The rotation of index queries and keys, for backends that do it themselves (``Indexer.rotates``)."""

from __future__ import annotations

import torch

__all__ = ["INDEX_ROPE", "rotated_index"]

INDEX_ROPE = 64
"""Numbers of an index query or key that are rotated: the first ones."""


def rotated_index(rows: torch.Tensor, cos_sin: torch.Tensor, style: str) -> torch.Tensor:
    """Index queries or keys after their rotation, [T, ..., 128] float32.

    ``rows`` [T, ..., 128]: before it. ``cos_sin`` [T, 64] float32: cosines and sines of each row's position, rows of
    ``BackendContext.index_rope``. ``style``: ``neox`` or ``interleaved``.
    """
    rows, half = rows.float(), INDEX_ROPE // 2
    cos, sin = torch.split(cos_sin.view(len(rows), *[1] * (rows.dim() - 2), INDEX_ROPE), half, -1)
    turned, rest = rows[..., :INDEX_ROPE], rows[..., INDEX_ROPE:]
    if style == "neox":
        x, y = torch.split(turned, half, -1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin, rest], -1)
    x, y = turned[..., ::2], turned[..., 1::2]
    both = torch.stack([x * cos - y * sin, y * cos + x * sin], -1).flatten(-2)
    return torch.cat([both, rest], -1)
