"""Layers that compress keys, as in DeepSeek V4, and their memory: one row for each group of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from typing_extensions import override

from .head_layout import HEAD_LAYOUTS, HeadLayout
from .layer import AttentionLayer
from .row_format import ROW_FORMATS, PackedRows

__all__ = ["COMPRESSED_ROPE", "CompressorContext", "CompressorLayer", "CompressorPool"]

COMPRESSED_ROPE = 64
"""Numbers of a compressed row that are rotated: the last ones, in interleaved pairs."""


@dataclass(frozen=True)
class CompressorLayer(AttentionLayer):
    """A layer that makes one row of width D (``head_dim``) of each group of r tokens of a request.

    Each token has ``kv`` and ``score``, both [c * D]; c is 2 in overlapping layers and 1 in others. Group g of a
    request has its tokens at positions g * r .. g * r + r - 1. With the last of them its row is computed, in float32:

    * The window is the group's tokens; in overlapping layers also those of the group before it, which the first group
      of a request lacks. A token of the earlier group has columns 0 .. D - 1 of ``kv`` and ``score``, one of the
      group itself columns D .. 2 D - 1.
    * The weights are a softmax over the window, for each channel by itself, of ``score + ape[position % r]``.
    * The row is the weighted sum of ``kv``, divided by the root of the mean of its squares plus ``norm_eps``, times
      ``norm_weight``.
    * Its last 64 numbers are rotated in interleaved pairs, 2 i and 2 i + 1, by cosines and sines of position g * r
      (``CompressorContext.rope``).

    Source: ``vllm/models/deepseek_v4/compressor.py`` and ``Compressor`` of DeepSeek's ``inference/model.py``.
    """

    compress_ratio: int = 4
    """r: tokens of a group. The page size is a multiple of it."""
    overlaps: bool = False
    """True: a row is made of its group and the one before it."""
    ape: torch.Tensor | None = field(default=None, compare=False)
    """[r, c * D] float32: bias of scores by the place of a token in its group."""
    norm_weight: torch.Tensor | None = field(default=None, compare=False)
    """[D] float32."""
    norm_eps: float = 1e-6

    @property
    def width(self) -> int:
        """c * D: numbers of ``kv`` and of ``score``."""
        return self.head_dim * (2 if self.overlaps else 1)

    @property
    @override
    def parts(self) -> tuple[int, int, int]:
        """Elements of ``kv`` and ``score`` of a row, and 0, since a layer has only these two inputs."""
        return self.width, self.width, 0

    @property
    @override
    def head_layout(self) -> HeadLayout:
        """The layout of compressors."""
        return HEAD_LAYOUTS["compressor"]

    @override
    def to(self, device: torch.device) -> CompressorLayer:
        """The layer with its parameters on a device."""
        assert self.ape is not None
        assert self.norm_weight is not None
        return replace(self, ape=self.ape.to(device), norm_weight=self.norm_weight.to(device))


class CompressorPool:
    """Memory of compressors: what a token leaves for the rows that are made of it, and the compressed rows.

    Slots are those of ``req_to_token`` and ``out_cache_loc``. The compressed row of a group is row ``slot // r`` of
    its layer, where ``slot`` is that of any token of the group: a page holds whole groups.

    In a row format a page has the numbers of its rows first, and then the scales of its rows, as the format says.
    """

    def __init__(
        self,
        slots: int,
        layers: Sequence[CompressorLayer],
        dtype: torch.dtype,
        device: torch.device,
        page_size: int,
        row_format: str = "same",
        make: Callable[..., torch.Tensor] = torch.zeros,
    ) -> None:
        """Allocate the memory of ``slots`` slots. ``make``: allocates as ``torch.zeros(shape, dtype=, device=)``."""
        self.layers = tuple(layers)
        self.num_slots, self.dtype, self.device = slots, dtype, device
        self.page_size = page_size
        """Tokens of a page."""
        self.row_format = row_format
        """``same``, or the row format of compressed rows."""
        self._states = {
            layer.layer_id: make((slots, 2, layer.width), dtype=torch.float32, device=device) for layer in layers
        }
        self._rows = {layer.layer_id: self._rows_of(layer, make) for layer in layers}

    def _rows_of(self, layer: CompressorLayer, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        rows = self.num_slots // layer.compress_ratio
        if self.row_format == "same":
            return make((rows, layer.head_dim), dtype=self.dtype, device=self.device)
        pages, form = self.num_slots // self.page_size, ROW_FORMATS[self.row_format]
        size = form.page_bytes(rows // pages * form.of(layer).nbytes)
        return make((pages, size), dtype=torch.uint8, device=self.device)

    def packed(self, layer: CompressorLayer) -> PackedRows | None:
        """Format of the rows of a layer; None for rows in the model's dtype."""
        return None if self.row_format == "same" else ROW_FORMATS[self.row_format].of(layer)

    def get_states(self, layer_id: int) -> torch.Tensor:
        """[slots, 2, c * D] float32: ``kv`` of a token, then ``score + ape[position % r]``. Raises ``KeyError``."""
        return self._states[layer_id]

    def get_rows(self, layer_id: int) -> torch.Tensor:
        """[slots // r, D] in the model's dtype: compressed rows. In a row format [pages, bytes] uint8, whole pages:
        ``get_row_planes`` has their rows. Raises ``KeyError``."""
        return self._rows[layer_id]

    def get_row_planes(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[pages, page_size // r, bytes] uint8 each: numbers and scales of rows in a row format, views of the pages.
        Row i is row ``i % (page_size // r)`` of page ``i // (page_size // r)``. Raises ``KeyError``."""
        layer = next(each for each in self.layers if each.layer_id == layer_id)
        return self.planes_of(layer, self._rows[layer_id])

    def planes_of(self, layer: CompressorLayer, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``get_row_planes`` of other memory of the same shape."""
        packed, rows = self.packed(layer), self.page_size // layer.compress_ratio
        assert packed is not None
        apart = packed.nbytes_apart
        inside = packed.nbytes - apart
        numbers, scales = pages[:, : rows * inside], pages[:, rows * inside : rows * packed.nbytes]
        return numbers.view(len(pages), rows, inside), scales.view(len(pages), rows, apart)

    def page_0(self) -> Iterator[torch.Tensor]:
        """States and rows of page 0 of each layer, which padded rows may write."""
        for layer, (states, rows) in zip(self.layers, self.parts, strict=True):
            yield states[: self.page_size]
            yield rows[0] if self.row_format != "same" else rows[: self.page_size // layer.compress_ratio]

    @property
    def parts(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """States and rows of each layer, in their order."""
        ids = [layer.layer_id for layer in self.layers]
        return tuple((self._states[each], self._rows[each]) for each in ids)


@dataclass(frozen=True, eq=False)
class CompressorContext:
    """``BackendContext.compressor``: what the constructor of a ``CompressorBackend`` is given."""

    layers: tuple[CompressorLayer, ...]
    pool: CompressorPool
    rope: torch.Tensor
    """[positions, 64] float32: 32 cosines and 32 sines of each position, a table as servers keep it."""
