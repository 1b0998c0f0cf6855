"""Formats of a pool's rows that hold more than numbers of one dtype: numbers, their scales and unscaled parts.

``ROW_FORMATS`` is their table. A format lists the planes of a row in the order of their bytes, and all else follows:
the bytes of a row, views of its planes, how a row is packed and what it means.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .head_layout import HeadLayout
from .layer import AttentionLayer

__all__ = ["ALL_NAN", "LARGEST", "ROW_FORMATS", "PackedRows", "Plane", "RowFormat", "in_tiles", "next_power_of_two"]

ALL_NAN = 0xFF
"""Byte that is NaN in every plane: e4m3, bfloat16 and float32 numbers of such bytes are NaN."""
LARGEST = {torch.float8_e4m3fn: 448.0}
"""Largest number of a dtype that has scales."""
_SMALLEST_SCALE = {"amax": torch.finfo(torch.float32).tiny, "power_of_two": 1e-4}


def next_power_of_two(numbers: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below each positive float32 number: a carry out of the mantissa."""
    return ((numbers.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def in_tiles(numbers: torch.Tensor, tile: int) -> torch.Tensor:
    """``numbers`` [..., width] as [..., tiles, tile]."""
    return numbers.reshape(*numbers.shape[:-1], -1, tile)


@dataclass(frozen=True)
class Plane:
    """One part of a packed row."""

    name: str
    dtype: torch.dtype
    of: str
    """Part of the key that it holds: ``latent`` or ``rope`` of MLA, or ``row`` for all of it."""
    tile: int = 1
    """1: numbers of the key. N: one scale for N numbers each."""
    rule: str = "amax"
    """Scale of a tile. ``amax``: its largest magnitude over the largest number of their dtype. ``power_of_two``: the
    next power of two from there on."""


@dataclass(frozen=True)
class RowFormat:
    """A row of the table."""

    name: str
    """Value of ``Capabilities.kv_dtypes``."""
    planes: tuple[Plane, ...]
    """Planes in the order of their bytes, without gaps."""
    latent: bool
    """True: rows that are key and value at once, as those of MLA."""
    dtypes: Set[str]
    """Dtypes of the model in which such rows exist."""

    def of(self, layer: AttentionLayer) -> PackedRows:
        """The rows of a layer."""
        return PackedRows(self, layer.kv_lora_rank or layer.head_dim, layer.head_dim)

    def fits(self, layout: HeadLayout, dtype: str, width: int) -> bool:
        """True if there are such rows for values of ``width`` numbers, which are whole tiles."""
        tiles = all(width % plane.tile == 0 for plane in self.planes)
        return layout.values_in_keys == self.latent and dtype in self.dtypes and tiles

    @property
    def needs(self) -> str:
        """Layers that have such rows, in words."""
        kind = "a latent row per token" if self.latent else "keys and values of each KV head"
        widest = max(plane.tile for plane in self.planes)
        return f"{kind}, in {' or '.join(sorted(self.dtypes))}, in whole tiles of {widest} numbers"


_DS_MLA = (
    Plane("numbers", torch.float8_e4m3fn, "latent"),
    Plane("scales", torch.float32, "latent", tile=128),
    Plane("rope", torch.bfloat16, "rope"),
)
ROW_FORMATS: Mapping[str, RowFormat] = {
    each.name: each
    for each in (
        RowFormat("fp8_ds_mla", _DS_MLA, latent=True, dtypes=frozenset({"bf16"})),
        RowFormat(
            "fp8_ds_mla_pow2",
            tuple(replace(plane, rule="power_of_two") for plane in _DS_MLA),
            latent=True,
            dtypes=frozenset({"bf16"}),
        ),
    )
}
"""``fp8_ds_mla``: FP8 rows of FlashMLA with scales, as SGLang has them for DeepSeek V3.2. With a latent part of 512 and
a rope part of 64 a row has 656 bytes: 512 of e4m3, 16 of scales, 128 of bfloat16. ``fp8_ds_mla_pow2``: the same with
scales that are powers of two, and 2^-13 at least, as vLLM has them (vLLM #49435)."""


@dataclass(frozen=True)
class PackedRows:
    """The rows of a format for one width of a key. All methods are device work only."""

    format: RowFormat
    latent: int
    """Numbers of the latent part, from the first one on; all of a row outside of MLA."""
    width: int
    """Numbers of a key."""

    def part(self, plane: Plane) -> slice:
        """Numbers of a key that a plane is for."""
        return {"latent": slice(0, self.latent), "rope": slice(self.latent, self.width)}.get(
            plane.of, slice(0, self.width)
        )

    @cached_property
    def offsets(self) -> Mapping[str, tuple[int, int]]:
        """Plane -> its first byte in a row, and the one behind its last."""
        found, end = dict[str, tuple[int, int]](), 0
        for plane in self.format.planes:
            part = self.part(plane)
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

    def scales_of(self, plane: Plane) -> Plane | None:
        """The plane of scales of a plane of numbers; None if it has none."""
        return next((each for each in self.format.planes if each.tile > 1 and each.of == plane.of), None)

    def scales(self, plane: Plane, keys: torch.Tensor) -> torch.Tensor:
        """[..., tiles] float32: scales of the numbers of ``keys`` [..., width] that a plane of scales is for."""
        of = next(each.dtype for each in self.format.planes if each.tile == 1 and each.of == plane.of)
        tiles = in_tiles(keys[..., self.part(plane)].float(), plane.tile)
        exact = (tiles.abs().amax(-1) / LARGEST[of]).clamp(min=_SMALLEST_SCALE[plane.rule])
        return next_power_of_two(exact) if plane.rule == "power_of_two" else exact

    def pack(self, keys: torch.Tensor) -> torch.Tensor:
        """[..., bytes] uint8: ``keys`` [..., width] as rows of the format."""
        found = []
        for plane in self.format.planes:
            part = keys[..., self.part(plane)]
            scales = self.scales_of(plane)
            if plane.tile > 1:
                part = self.scales(plane, keys)
            elif scales is not None:
                largest = LARGEST[plane.dtype]
                tiles = in_tiles(part.float(), scales.tile) / self.scales(scales, keys)[..., None]
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
            numbers, scales = planes[plane.name].float().to(dtype), self.scales_of(plane)
            if scales is not None:
                tiles = in_tiles(numbers, scales.tile) * planes[scales.name].to(dtype)[..., None]
                numbers = tiles.flatten(-2)
            keys[..., self.part(plane)] = numbers
        return keys
