"""Formats of a pool's rows that hold more than numbers of one dtype: numbers, their scales and unscaled parts.

``ROW_FORMATS`` is their table. A format lists the planes of a row in the order of their bytes, and all else follows:
the bytes of a row, views of its planes, how a row is packed and what it means.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property

import torch

from .layer import AttentionLayer

__all__ = ["ALL_NAN", "ROW_FORMATS", "PackedRows", "Plane", "RowFormat"]

ALL_NAN = 0xFF
"""Byte that is NaN in every plane: e4m3, bfloat16 and float32 numbers of such bytes are NaN."""
_LARGEST = {torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_NEAR_TIE = 2.0**-14
_ULPS = 4
"""Units in the last place that a scale may be off: division on a GPU may be off by two."""


@dataclass(frozen=True)
class Plane:
    """One part of a packed row."""

    name: str
    dtype: torch.dtype
    of: str
    """Part of the key that it holds: ``latent`` or ``rope`` of MLA, or ``row`` for all of it."""
    tile: int = 1
    """1: numbers of the key. N: one scale for N numbers each, the largest of them over the largest of their dtype."""


@dataclass(frozen=True)
class RowFormat:
    """A row of the table."""

    name: str
    """Value of ``Capabilities.kv_dtypes``."""
    planes: tuple[Plane, ...]
    """In the order of their bytes, without gaps."""
    families: Set[str]
    """Head layouts that have such rows."""
    dtypes: Set[str]
    """Dtypes of the model in which such rows exist."""

    def of(self, layer: AttentionLayer) -> PackedRows:
        """The rows of a layer."""
        return PackedRows(self, layer.kv_lora_rank or layer.head_dim, layer.head_dim)

    def fits(self, family: str, dtype: str, latent: int) -> bool:
        """True if a row of ``latent`` numbers, the value of MLA, has whole tiles and the format exists for it."""
        tiles = all(latent % plane.tile == 0 for plane in self.planes)
        return family in self.families and dtype in self.dtypes and tiles


ROW_FORMATS: Mapping[str, RowFormat] = {
    each.name: each
    for each in (
        RowFormat(
            "fp8_ds_mla",
            (
                Plane("numbers", torch.float8_e4m3fn, "latent"),
                Plane("scales", torch.float32, "latent", tile=128),
                Plane("rope", torch.bfloat16, "rope"),
            ),
            families=frozenset({"mla"}),
            dtypes=frozenset({"bf16"}),
        ),
    )
}
"""``fp8_ds_mla``: FlashMLA's FP8 rows with scales. With a latent part of 512 and a rope part of 64 a row has 656 bytes:
512 of e4m3, 16 of scales, 128 of bfloat16. vLLM and SGLang have it for DeepSeek V3.2."""


@dataclass(frozen=True)
class PackedRows:
    """The rows of a format for one width of a key. All methods are device work only."""

    format: RowFormat
    latent: int
    """Numbers of the latent part, from the first one on; all of a row outside of MLA."""
    width: int
    """Numbers of a key."""

    def _part(self, plane: Plane) -> slice:
        return {"latent": slice(0, self.latent), "rope": slice(self.latent, self.width)}.get(
            plane.of, slice(0, self.width)
        )

    @cached_property
    def offsets(self) -> Mapping[str, tuple[int, int]]:
        """Plane -> its first byte in a row, and the one behind its last."""
        found, end = dict[str, tuple[int, int]](), 0
        for plane in self.format.planes:
            part = self._part(plane)
            first, end = end, end + (part.stop - part.start) // plane.tile * plane.dtype.itemsize
            found[plane.name] = first, end
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return max(end for _, end in self.offsets.values())

    def planes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the planes of ``rows`` [..., bytes] uint8: [..., numbers] each, by name."""
        return {
            plane.name: rows[..., slice(*self.offsets[plane.name])].view(plane.dtype) for plane in self.format.planes
        }

    def _scales(self, plane: Plane) -> Plane | None:
        """The plane of the scales of a plane of numbers."""
        return next((each for each in self.format.planes if each.tile > 1 and each.of == plane.of), None)

    def scales(self, plane: Plane, keys: torch.Tensor) -> torch.Tensor:
        """[..., tiles] float32: scales of the numbers of ``keys`` [..., width] that a plane of scales is for."""
        of = next(each.dtype for each in self.format.planes if each.tile == 1 and each.of == plane.of)
        tiles = keys[..., self._part(plane)].float().unflatten(-1, (-1, plane.tile))
        return (tiles.abs().amax(-1) / _LARGEST[of]).clamp(min=_SMALLEST_SCALE)

    def pack(self, keys: torch.Tensor) -> torch.Tensor:
        """[..., bytes] uint8: ``keys`` [..., width] as rows of the format."""
        found = []
        for plane in self.format.planes:
            part = keys[..., self._part(plane)]
            scales = self._scales(plane)
            if plane.tile > 1:
                part = self.scales(plane, keys)
            elif scales is not None:
                largest = _LARGEST[plane.dtype]
                tiles = part.float().unflatten(-1, (-1, scales.tile)) / self.scales(scales, keys)[..., None]
                part = tiles.clamp(-largest, largest).flatten(-2)
            found.append(part.to(plane.dtype).contiguous().view(torch.uint8))
        return torch.cat(found, -1)

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[..., width] of ``dtype``: the keys that ``rows`` [..., bytes] uint8 mean."""
        planes = self.planes(rows)
        keys = torch.empty(*rows.shape[:-1], self.width, dtype=dtype, device=rows.device)
        for plane in self.format.planes:
            if plane.tile > 1:
                continue
            numbers, scales = planes[plane.name].float().to(dtype), self._scales(plane)
            if scales is not None:
                numbers = (numbers.unflatten(-1, (-1, scales.tile)) * planes[scales.name].to(dtype)[..., None]).flatten(-2)
            keys[..., self._part(plane)] = numbers
        return keys

    def with_one_packing(self, keys: torch.Tensor) -> torch.Tensor:
        """A copy of ``keys`` [..., width] bfloat16 whose numbers are rounded in one way, however a scale is computed.

        Numbers near the middle between two FP8 numbers are one unit smaller, and no tile is all 0: there servers
        differ (SGLang divides by a scale of 0, vLLM has the smallest normal one).
        """
        keys = keys.clone()
        for plane in self.format.planes:
            scales = self._scales(plane)
            if plane.tile > 1 or scales is None:
                continue
            tiles = keys[..., self._part(plane)].unflatten(-1, (-1, scales.tile))
            tiles[..., -1] = torch.where((tiles == 0).all(-1), torch.full_like(tiles[..., -1], _NEAR_TIE), tiles[..., -1])
            exact = tiles.float() / self.scales(scales, keys)[..., None]
            low, high = ((exact * (1 + each)).to(plane.dtype).view(torch.uint8) for each in (-_NEAR_TIE, _NEAR_TIE))
            bits = tiles.view(torch.int16)
            bits.sub_((low != high).to(torch.int16))
        return keys

    def accepted(self, rows: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        """A copy of ``rows`` with the scales of ``want``, where they differ by rounding only. [..., bytes] uint8."""
        rows = rows.clone()
        for plane in self.format.planes:
            if plane.tile > 1:
                got, due = (self.planes(each)[plane.name] for each in (rows, want))
                near = (got.view(torch.int32) - due.view(torch.int32)).abs() <= _ULPS
                got.copy_(torch.where(near, due, got))
        return rows
