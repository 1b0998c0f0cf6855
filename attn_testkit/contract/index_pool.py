"""The index pool: FP8 index keys, with a scale per token, in pages of two planes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .row_format import next_power_of_two

__all__ = ["INDEX_PAGE", "INDEX_WIDTH", "IndexPool", "index_scales", "keys_of", "scales_of"]

INDEX_PAGE = 64
"""Tokens of a page of index keys, whatever the page size of the KV pool."""
INDEX_WIDTH = 128
"""Numbers of an index key."""
_SCALE_BYTES = 4
_KEY_BYTES = INDEX_PAGE * INDEX_WIDTH
_PAGE_BYTES = _KEY_BYTES + INDEX_PAGE * _SCALE_BYTES
_LARGEST = 448.0
_LEAST_AMAX = 1e-4
"""Smallest magnitude that determines a scale; keys with smaller values use the scale of this one."""


def index_scales(rows: torch.Tensor, scale: str) -> torch.Tensor:
    """[n] float32: scales of index keys ``rows`` [n, 128], by one of ``INDEX_SCALES``."""
    exact = rows.float().abs().amax(-1).clamp(min=_LEAST_AMAX) / _LARGEST
    if scale == "amax":
        return exact
    return next_power_of_two(exact)


def keys_of(buffer: torch.Tensor) -> torch.Tensor:
    """[pages, 64, 128] e4m3: the keys of ``buffer`` [pages, 64 * 132] uint8, a view."""
    return buffer[:, :_KEY_BYTES].view(torch.float8_e4m3fn).view(len(buffer), INDEX_PAGE, INDEX_WIDTH)


def scales_of(buffer: torch.Tensor) -> torch.Tensor:
    """[pages, 64] float32: the scales of ``buffer`` [pages, 64 * 132] uint8, a view."""
    return buffer[:, _KEY_BYTES:].view(torch.float32)


class IndexPool:
    """Index keys of all layers that select keys.

    A page has 64 tokens: first their keys (64 x 128 bytes of e4m3), then their scales (64 x 4 bytes of float32). A key
    is its 128 numbers times its scale. Slot s is token s % 64 of page s // 64, and slots are those of the KV pool.
    """

    def __init__(
        self,
        slots: int,
        layer_ids: Sequence[int],
        scale: str,
        device: torch.device,
        make: Callable[..., torch.Tensor] = torch.zeros,
    ) -> None:
        """Allocate the pages of ``slots`` slots for each of ``layer_ids``. ``make``: allocates the memory, as
        ``torch.zeros(shape, dtype=, device=)`` does.
        """
        pages = -(-slots // INDEX_PAGE)
        self.scale = scale
        """One of ``INDEX_SCALES``."""
        self.layer_ids = tuple(layer_ids)
        """Layers that have index keys."""
        self.memory = make((len(layer_ids), pages, _PAGE_BYTES), dtype=torch.uint8, device=device)
        """[layers, pages, 64 * 132] uint8, in the order of ``layer_ids``."""

    def get_index_buffer(self, layer_id: int) -> torch.Tensor:
        """[pages, 64 * 132] uint8 of a layer. Raises ``KeyError`` for a layer without index keys."""
        if layer_id not in self.layer_ids:
            raise KeyError(f"layer {layer_id} has no index keys; layers {', '.join(map(str, self.layer_ids))} have")
        return self.memory[self.layer_ids.index(layer_id)]

    def get_keys(self, layer_id: int) -> torch.Tensor:
        """[pages, 64, 128] e4m3: a view. Raises ``KeyError`` for a layer without index keys."""
        return keys_of(self.get_index_buffer(layer_id))

    def get_scales(self, layer_id: int) -> torch.Tensor:
        """[pages, 64] float32: a view. Raises ``KeyError`` for a layer without index keys."""
        return scales_of(self.get_index_buffer(layer_id))

    def store(self, layer_id: int, slots: torch.Tensor, k_index: torch.Tensor) -> None:
        """Quantize keys ``k_index`` [T, 128] and store them in ``slots`` [T]. Device work only."""
        scales = index_scales(k_index, self.scale)
        keys = (k_index.float() / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        slots = slots.long()
        page, place = slots // INDEX_PAGE, slots % INDEX_PAGE
        # index_put is not implemented for FP8 everywhere; the bytes are what is stored.
        self.get_keys(layer_id).view(torch.uint8).index_put_((page, place), keys.view(torch.uint8))
        self.get_scales(layer_id).index_put_((page, place), scales)
