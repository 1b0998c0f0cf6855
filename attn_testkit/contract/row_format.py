"""Formats of a pool's rows that hold more than numbers of one dtype: numbers, their scales and unscaled parts.

``ROW_FORMATS`` is their table. A format lists the planes of a row in the order of their bytes, and everything else
follows from them: the bytes of a row, views of its planes, how a row is packed and what it means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .head_layout import HeadLayout
from .layer import AttentionLayer

__all__ = [
    "ALL_NAN",
    "FP4",
    "FP4_TIES",
    "HALVES",
    "INT4",
    "LARGEST",
    "LATENT_FORMATS",
    "POWER_OF_TWO",
    "RANGE",
    "ROPE_IN_VALUE",
    "ROW_FORMATS",
    "TIES",
    "UINT4",
    "ZERO",
    "PackedRows",
    "Plane",
    "RowFormat",
    "codes_of",
    "in_tiles",
    "next_power_of_two",
]  # fmt: skip

ALL_NAN = 0xFF
"""Byte that is NaN in every plane of scales or unscaled numbers: e4m3, bfloat16, float32 and UE8M0."""
FP4 = torch.float4_e2m1fn_x2
"""Dtype of a plane of e2m1 numbers: two to a byte, the first in its lower half."""
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
"""Dtype of a plane of signed integers of 4 bits, packed likewise."""
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
"""Dtype of a plane of integers 0 .. 15, packed likewise."""
HALVES = frozenset({FP4, INT4, UINT4})
POWER_OF_TWO = torch.float8_e8m0fnu
"""Dtype of a plane of scales that are bytes: the exponent of a power of two, plus 127."""
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0, FP4: 6.0, INT4: 7.0, torch.uint8: 255.0, UINT4: 15.0}
"""Largest number of a dtype that has scales."""
TIES = ("even", "away", "toward_zero")
"""Rules of ``KVPools.ties``."""
_RULE_DECLARED = frozenset({torch.int8, INT4, FP4})
"""Dtypes whose stores differ in the rule. Every conversion to FP8 rounds to even."""
_SIGNED = frozenset({torch.int8, INT4})
RANGE, ZERO = "range", "zero"
"""Rules of a scale and of a zero of numbers without a sign."""
_UNSIGNED = frozenset({torch.uint8, UINT4})
_AS_BYTES = HALVES | {POWER_OF_TWO}
FP4_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the magnitudes of e2m1 numbers: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
_SMALLEST_E4M3 = 2.0**-9


def next_power_of_two(numbers: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below each positive float32 number: a carry out of the mantissa."""
    return ((numbers.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def in_tiles(numbers: torch.Tensor, tile: int) -> torch.Tensor:
    """``numbers`` [..., width] as [..., tiles, tile]; 0: all of them are one tile."""
    return numbers.reshape(*numbers.shape[:-1], -1, tile or numbers.shape[-1])


def codes_of(numbers: torch.Tensor, dtype: torch.dtype, ties: str = "even") -> torch.Tensor:
    """Bytes of float32 ``numbers`` [...] in ``dtype``, saturated, [...] uint8. Numbers of 4 bits get one byte each.
    ``ties``: of signed integers and FP4, one of ``TIES``."""
    if dtype == FP4:
        # No table: a tensor of constants would be a copy from the host.
        size = numbers.abs()
        up = [ties == "away" or (ties == "even" and below % 2 == 1) for below in range(len(FP4_TIES))]
        above = sum(
            (size >= bound if rounds_up else size > bound).to(torch.uint8)
            for bound, rounds_up in zip(FP4_TIES, up, strict=True)
        )
        return above + (numbers < 0).to(torch.uint8) * 8
    largest = LARGEST[dtype]
    if dtype in _UNSIGNED:
        return numbers.clamp(0, largest).round().to(torch.uint8)
    numbers = numbers.clamp(-largest, largest)
    if dtype in _SIGNED:
        if ties == "away":
            numbers = (numbers + torch.full_like(numbers, 0.5).copysign(numbers)).trunc()
        elif ties == "toward_zero":
            numbers = (numbers.abs() - 0.5).ceil().copysign(numbers)
        else:
            numbers = numbers.round()
        codes = numbers.to(torch.int8).view(torch.uint8)
        return codes & 15 if dtype == INT4 else codes
    return numbers.to(dtype).view(torch.uint8)


def _as_stored(entries: torch.Tensor, plane: Plane, dim: int = -1) -> torch.Tensor:
    """``entries`` of the tiles of a plane, in the order in which they are stored."""
    if plane.stride == 1:
        return entries
    return in_tiles(entries.movedim(dim, -1), plane.stride).mT.flatten(-2).movedim(-1, dim)


def _by_tile(stored: torch.Tensor, plane: Plane, dim: int = -1) -> torch.Tensor:
    """The reverse of ``_as_stored``."""
    if plane.stride == 1:
        return stored
    return in_tiles(stored.movedim(dim, -1), stored.shape[dim] // plane.stride).mT.flatten(-2).movedim(-1, dim)


def _bytes_of(numbers: torch.Tensor, plane: Plane) -> torch.Tensor:
    """[..., bytes] uint8: ``numbers`` [..., n] in the dtype of a plane."""
    dtype, numbers = plane.dtype, _as_stored(numbers, plane)
    if dtype in HALVES:
        codes = codes_of(numbers.float(), dtype, plane.halfway or "even")
        if plane.split:
            first, second = codes.chunk(2, -1)
            return first + second * 16
        return codes[..., 0::2] + codes[..., 1::2] * 16
    if dtype == POWER_OF_TWO:
        return (numbers.float().view(torch.int32) >> 23).to(torch.uint8)
    if dtype in LARGEST:
        return codes_of(numbers.float(), dtype, plane.halfway or "even").contiguous()
    return numbers.to(dtype).contiguous().view(torch.uint8)


def _numbers_of(raw: torch.Tensor, plane: Plane) -> torch.Tensor:
    """[..., n] float32: the numbers of a plane, of its bytes ``raw`` [..., bytes] uint8."""
    dtype = plane.dtype
    if dtype in HALVES:
        halves = raw & 15, raw >> 4
        codes = torch.cat(halves, -1) if plane.split else torch.stack(halves, -1).flatten(-2)
        codes = codes.to(torch.int32)
        if dtype == UINT4:
            return codes.float()
        if dtype == INT4:
            return torch.where(codes > 7, codes - 16, codes).float()
        half, exponent = codes & 1, codes >> 1 & 3
        sizes = torch.where(exponent > 0, (2 + half) << exponent, 2 * half).float() / 4
        return torch.where(codes > 7, -sizes, sizes)
    if dtype == POWER_OF_TWO:
        numbers = (raw.to(torch.int32) << 23).view(torch.float32)
        return numbers.masked_fill(raw == 0, 2.0**-127).masked_fill(raw == ALL_NAN, math.nan)
    return _by_tile(raw.contiguous().view(dtype).float(), plane)


@dataclass(frozen=True)
class Plane:
    """One part of a packed row."""

    name: str
    dtype: torch.dtype
    of: str
    """Part of the key that it holds: ``latent`` or ``rope`` of MLA, or ``row`` for all of it."""
    tile: int = 1
    """1: numbers of the key. N: one scale for N numbers each. 0: one scale for all numbers of the row."""
    rule: str = "amax"
    """Scale of a tile. ``amax``: its largest magnitude over the largest number of the dtype. ``up``: that quotient,
    rounded up to a number of the dtype of scales. ``power_of_two``: rounded up to a power of two. ``range``: the
    difference of its largest and smallest value over the largest number. ``zero``: no scale, but the number that means
    0: minus the smallest value over the scale. It need not be an integer. A value is then (number - zero) * scale."""
    smallest: float = torch.finfo(torch.float32).tiny
    """Smallest scale."""
    halfway: str = ""
    """Number of the plane to which a quotient exactly between two of them is rounded. ``even``: the one whose last bit
    is 0, as every conversion to FP8 does. ``away``: the one farther from zero. ``toward_zero``: the other one. Empty:
    stores differ, so test data have no such quotients unless a backend declares its rule (``KVPools.ties``)."""
    split: bool = False
    """Numbers of 4 bits. True: the lower halves of the bytes hold the first half of the part, and the upper ones the
    second. False: adjacent numbers share a byte."""
    stride: int = 1
    """Scales. N: those of the tiles 0, N, 2 N, ... are stored first, then those of 1, N + 1, ..., so that a thread
    loads all that it needs at once. 1: they are stored in the order of tiles."""
    unused: int = 0
    """Bytes after the plane that mean nothing. Stores write anything there, or nothing."""
    least: float = 2.0**-14
    """Test data: least magnitude of the largest number of a tile, so that its scale is not the smallest one."""

    @property
    def is_scales(self) -> bool:
        """True for scales and zeros, False for numbers of the key."""
        return self.tile != 1

    def nbytes(self, width: int) -> int:
        """Bytes of the plane in a row, for a part of ``width`` numbers."""
        entries = width // (self.tile or width)
        return entries // 2 if self.dtype in HALVES else entries * self.dtype.itemsize

    def rounded(self, exact: torch.Tensor) -> torch.Tensor:
        """Float32 scales ``exact`` [...] as the plane stores them, float32."""
        if self.rule == "power_of_two":
            return next_power_of_two(exact)
        exact = exact.clamp(max=LARGEST.get(self.dtype, math.inf))
        near = exact.to(self.dtype)
        if self.rule != "up":
            return near.float()
        # The codes of positive FP8 numbers ascend.
        return (near.view(torch.uint8) + (near.float() < exact).to(torch.uint8)).view(self.dtype).float()


@dataclass(frozen=True)
class RowFormat:
    """A row of the table."""

    name: str
    """Value of ``KVPools.kv_dtypes``."""
    planes: tuple[Plane, ...]
    """Planes in the order of their bytes, without gaps."""
    latent: bool
    """True: a row is key and value at once, as in MLA."""
    dtypes: Set[str]
    """Dtypes of the model in which such rows exist."""
    apart: bool = False
    """True: scales, the last planes, are not stored in the row: ``KVPool.get_scale_pages``. False: in the row."""
    page_multiple: int = 0
    """N: a page has the other planes of all its rows first, then the scales of all its rows, and a multiple of N bytes.
    0: if scales are stored separately, they have memory of their own."""
    rope_in_value: int | None = None
    """N: the value of a token is its whole key, and the last N numbers are the plane ``rope`` (DeepSeek V4). 0: that
    part is packed like all others. None: in MLA the rope part comes after the value."""
    layer_scale: str = "none"
    """Scale that a row is divided by before it is packed. ``tensor``: ``AttentionLayer.k_scale`` and ``v_scale``.
    ``head``: ``k_head_scales`` and ``v_head_scales``, which change in place between steps. ``none``: there is none."""

    def of(self, layer: AttentionLayer) -> PackedRows:
        """The rows of a layer."""
        latent = layer.kv_lora_rank or layer.head_dim
        return PackedRows(self, latent - (self.rope_in_value or 0), layer.head_dim)

    def page_bytes(self, rows: int) -> int:
        """Bytes of a page that has ``rows`` bytes of numbers and scales, where its scales are after its numbers."""
        return -(-rows // self.page_multiple) * self.page_multiple

    @property
    def own_memory(self) -> bool:
        """True if scales have memory of their own: they are neither in the row nor in its page."""
        return self.apart and not self.page_multiple

    @property
    def lets_declare_ties(self) -> bool:
        """True if stores of its numbers differ in the rule for ties: signed integers and FP4."""
        return any(plane.dtype in _RULE_DECLARED for plane in self.planes)

    def with_ties(self, ties: str) -> RowFormat:
        """The format with a declared rule for its numbers, one of ``TIES``; the same if nothing is declared, or stores
        do not differ."""
        if not ties or not self.lets_declare_ties:
            return self
        ruled = (replace(each, halfway=ties) if each.dtype in _RULE_DECLARED else each for each in self.planes)
        return replace(self, planes=tuple(ruled))

    def fits(self, layout: HeadLayout, dtype: str, width: int, rope: int | None = None) -> bool:
        """True if there are such rows for values of ``width`` numbers, which are whole tiles. ``rope``: numbers of a
        key after its value; None: any."""
        tiled = width - (self.rope_in_value or 0)
        tiles = tiled > 0 and all(tiled % ((plane.tile or 1) * plane.stride) == 0 for plane in self.planes)
        after = rope is None or not self.latent or (rope == 0) == (self.rope_in_value is not None)
        kind = self.latent == (layout.values_in_keys or layout.compresses) and not layout.has_state
        return kind and dtype in self.dtypes and tiles and after

    @property
    def rounds_halfway(self) -> bool:
        """True if the rule for quotients exactly between two numbers is known, for some plane."""
        return any(plane.halfway for plane in self.planes)

    @property
    def needs(self) -> str:
        """Layers that have such rows, in words."""
        kind = "a latent row per token" if self.latent else "keys and values of each KV head"
        if self.rope_in_value is not None:
            kind += " that is the value as a whole (mla_rope_dims={0})"
        widest = max(plane.tile * plane.stride for plane in self.planes)
        tiles = f", in whole tiles of {widest} numbers" if widest > 1 else ""
        but = f" and {self.rope_in_value} more" if self.rope_in_value else ""
        return f"{kind}, in {' or '.join(sorted(self.dtypes))}{tiles}{but}"


_DS_MLA = (
    Plane("numbers", torch.float8_e4m3fn, "latent", halfway="even"),
    Plane("scales", torch.float32, "latent", tile=128),
    Plane("rope", torch.bfloat16, "rope"),
)
_BF16 = frozenset({"bf16"})


# Servers differ in the smallest scale, which no tile of the kit's keys needs: 1e-4 (FlashMLA), or that of a largest
# magnitude of 1e-4 (vLLM) or 1e-8 (SGLang).
_POWERS = Plane(
    "scales", POWER_OF_TWO, "latent", tile=64, rule="power_of_two", smallest=1e-4, least=2.0**-4, unused=1
)  # fmt: skip
_DS_V4 = _DS_MLA[0], _DS_MLA[2], _POWERS
_DS_V41 = _DS_MLA[0], replace(_POWERS, tile=32, unused=0)
_DS_FP4 = (
    Plane("numbers", FP4, "latent"),
    Plane("rope", torch.float8_e4m3fn, "rope", halfway="even"),
    Plane(
        "scales", torch.float8_e4m3fn, "latent", tile=16, rule="up", smallest=_SMALLEST_E4M3, least=2.0**-5, stride=4
    ),
)


def _per_token_head(dtype: torch.dtype, halfway: str = "") -> tuple[Plane, ...]:
    scales = Plane("scales", torch.float32, "row", tile=0, smallest=1e-6, least=2.0**-10)
    return Plane("numbers", dtype, "row", halfway=halfway), scales


def _with_zeros(dtype: torch.dtype, *, split: bool = False) -> tuple[Plane, ...]:
    scales = Plane("scales", torch.float32, "row", tile=0, rule=RANGE, least=2.0**-10)
    return Plane("numbers", dtype, "row", split=split), scales, replace(scales, name="zeros", rule=ZERO)


def _fp4(scales: Plane) -> tuple[Plane, ...]:
    return Plane("numbers", FP4, "row"), scales


ROW_FORMATS: Mapping[str, RowFormat] = {
    each.name: each
    for each in (
        RowFormat("fp8_ds_mla", _DS_MLA, latent=True, dtypes=_BF16),
        RowFormat(
            "fp8_ds_mla_pow2",
            tuple(replace(plane, rule="power_of_two", smallest=1e-4) for plane in _DS_MLA),
            latent=True,
            dtypes=_BF16,
        ),
        RowFormat("nvfp4_ds_mla", _DS_FP4, latent=True, dtypes=_BF16),
        RowFormat(
            "fp8_ds_mla_v4", _DS_V4, latent=True, dtypes=_BF16, apart=True, page_multiple=576, rope_in_value=64
        ),
        RowFormat(
            "fp8_ds_mla_v41", _DS_V41, latent=True, dtypes=_BF16, apart=True, page_multiple=512, rope_in_value=0
        ),
        RowFormat("int8_per_token_head", _per_token_head(torch.int8), latent=False, dtypes=_BF16),
        RowFormat("fp8_per_token_head", _per_token_head(torch.float8_e4m3fn, "even"), latent=False, dtypes=_BF16),
        RowFormat("int8_per_token_head_apart", _per_token_head(torch.int8), latent=False, dtypes=_BF16, apart=True),
        RowFormat(
            "fp8_per_head", (Plane("numbers", torch.float8_e4m3fn, "row", halfway="even"),), latent=False,
            dtypes=_BF16, layer_scale="head",
        ),
        RowFormat(
            "nvfp4", _fp4(Plane("scales", torch.float8_e4m3fn, "row", tile=16, smallest=_SMALLEST_E4M3, least=2.0**-5)),
            latent=False, dtypes=_BF16, apart=True, layer_scale="tensor",
        ),
        RowFormat(
            "fp4_mx_block16", _fp4(Plane("scales", POWER_OF_TWO, "row", tile=16, rule="power_of_two", smallest=1e-10)),
            latent=False, dtypes=_BF16, apart=True,
        ),
        RowFormat(
            "int4_group8", (Plane("numbers", INT4, "row"), Plane("scales", torch.bfloat16, "row", tile=8)),
            latent=False, dtypes=_BF16, apart=True,
        ),
        RowFormat("int8_zeros_per_token_head", _with_zeros(torch.uint8), latent=False, dtypes=_BF16, apart=True),
        RowFormat("int4_zeros_per_token_head", _with_zeros(UINT4, split=True), latent=False, dtypes=_BF16, apart=True),
    )
}  # fmt: skip
"""``fp8_ds_mla``: FP8 rows of FlashMLA with scales, as SGLang has them for DeepSeek V3.2. With a latent part of 512 and
a rope part of 64 a row has 656 bytes: 512 of e4m3, 16 of scales, 128 of bfloat16. ``fp8_ds_mla_pow2``: the same with
scales that are powers of two, and 2^-13 at least, as vLLM has them (vLLM #49435). ``nvfp4_ds_mla``: 352 bytes: 256 of
e2m1, 64 of e4m3 without a scale for the rope part, and 32 scales of e4m3 (vLLM #51724, FlashMLA of vLLM #18).

``fp8_ds_mla_v4``: rows of DeepSeek V4, 584 bytes: 448 of e4m3 and 128 of bfloat16, and after those of a whole page 8 of
scales: 7 and one that is unused (``MODEL1_FP8Sparse`` of FlashMLA, ``DeepSeekV4SingleKVPool`` of SGLang).
``fp8_ds_mla_v41``: of V4.1, 528 bytes: 512 of e4m3, and after those of a whole page 16 of scales (vLLM #56893, SGLang
#39123).

``int8_per_token_head`` and ``fp8_per_token_head``: a float32 scale per token and KV head after the numbers of its row,
as vLLM has them (``TritonAttentionBackend.customize_spec``, ``_reshape_cache_per_token_head``);
``int8_per_token_head_apart``: the same scales in separate memory. ``fp8_per_head``: e4m3 and no scale in the pool, as
vLLM has them for checkpoints of ``strategy: attn_head`` (``use_per_head_quant_scales``). ``nvfp4``: e2m1 with an e4m3
scale for 16 numbers each, and a scale per layer; ``fp4_mx_block16``: with scales of a power of two. Both as SGLang has
them (``NVFP4KVCacheMethod`` with ``needs_linear_scale_buffer``, ``FP4MXBlock16KVQuantizeUtil``). ``int4_group8``:
integers of 4 bits with a scale in the model's dtype for 8 numbers each, as LightLLM has them
(``PPLINT4KVMemoryManager``). ``int8_zeros_per_token_head`` and ``int4_zeros_per_token_head``: numbers without a sign,
with a float32 scale and a float32 zero per token and KV head, as SGLang #15285 has them, and LMDeploy in the model's
dtype (``_quant_int8`` and ``_quant_int4`` of its ``fill_kv_cache``)."""


LATENT_FORMATS = frozenset(name for name, each in ROW_FORMATS.items() if each.latent)
"""Formats of MLA. The others are of K and V."""
ROPE_IN_VALUE = frozenset(name for name, each in ROW_FORMATS.items() if each.rope_in_value is not None)
"""Formats of latent rows that are the value as a whole. In the other ones of MLA the rope part comes after it."""


@dataclass(frozen=True)
class PackedRows:
    """The rows of a format for one width of a key. All methods are device work only."""

    format: RowFormat
    latent: int
    """Numbers of the latent part, from the first one on, without a rope part; all of a row outside of MLA."""
    width: int
    """Numbers of a key."""

    def part(self, plane: Plane) -> slice:
        """Elements of a key that a plane stores."""
        return {"latent": slice(0, self.latent), "rope": slice(self.latent, self.width)}.get(
            plane.of, slice(0, self.width)
        )

    @cached_property
    def offsets(self) -> Mapping[str, tuple[int, int]]:
        """Plane -> its first byte in a row, and the byte after its last, as if no plane were separate."""
        found, first = dict[str, tuple[int, int]](), 0
        for plane in self.format.planes:
            part = self.part(plane)
            last = first + plane.nbytes(part.stop - part.start)
            found[plane.name] = first, last
            first = last + plane.unused
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of a row, separate scales included."""
        last = self.format.planes[-1]
        return self.offsets[last.name][1] + last.unused

    @property
    def nbytes_apart(self) -> int:
        """Bytes of a row that are stored separately: its last ones."""
        if not self.format.apart:
            return 0
        return self.nbytes - min(self.offsets[plane.name][0] for plane in self.scale_planes)

    @property
    def scale_planes(self) -> tuple[Plane, ...]:
        """The planes of scales."""
        return tuple(plane for plane in self.format.planes if plane.is_scales)

    def raw(self, rows: torch.Tensor, plane: Plane) -> torch.Tensor:
        """View of the bytes of a plane of ``rows`` [..., bytes] uint8."""
        return rows[..., slice(*self.offsets[plane.name])]

    def unused(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Views of the bytes of ``rows`` [..., bytes] that mean nothing, one per plane that has any."""
        ends = ((self.offsets[plane.name][1], plane.unused) for plane in self.format.planes if plane.unused)
        return [rows[..., first : first + count] for first, count in ends]

    def by_tile(self, rows: torch.Tensor, plane: Plane, tiles: int) -> torch.Tensor:
        """[..., tiles, bytes] uint8: the bytes that a plane of ``rows`` has for each tile, in the order of tiles."""
        raw = self.raw(rows, plane)
        return _by_tile(in_tiles(raw, raw.shape[-1] // tiles), plane, -2)

    def put_by_tile(self, rows: torch.Tensor, plane: Plane, held: torch.Tensor) -> None:
        """Store ``held`` [..., tiles, bytes], as ``by_tile`` returns them, in a plane of ``rows``."""
        self.raw(rows, plane).copy_(_as_stored(held, plane, -2).flatten(-2))

    def numbers_in(self, rows: torch.Tensor, plane: Plane) -> torch.Tensor:
        """[..., n] float32: the numbers of a plane of ``rows`` [..., bytes] uint8; scales in the order of tiles."""
        return _numbers_of(self.raw(rows, plane), plane)

    def planes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the planes of ``rows`` [..., bytes] uint8: [..., numbers] each, by name. 4-bit ones: bytes."""
        return {
            plane.name: self.raw(rows, plane).view(torch.uint8 if plane.dtype in _AS_BYTES else plane.dtype)
            for plane in self.format.planes
        }

    def planes_of(self, rows: torch.Tensor, apart: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Views of the planes of ``rows``; the scales may be in ``apart`` [..., bytes of scales] uint8."""
        if apart is None:
            return self.planes(rows)
        inside, found = rows.shape[-1], dict[str, torch.Tensor]()
        for plane in self.format.planes:
            first, end = self.offsets[plane.name]
            raw = apart[..., first - inside : end - inside] if plane.is_scales else rows[..., first:end]
            found[plane.name] = raw.view(torch.uint8 if plane.dtype in _AS_BYTES else plane.dtype)
        return found

    def divided(self, rows: torch.Tensor, scale: float, by_head: torch.Tensor | None) -> torch.Tensor:
        """``rows`` [..., Hk, width] divided by the scale of their layer: ``scale``, or one per head, as the format
        says."""
        if self.format.layer_scale == "none":
            return rows
        if self.format.layer_scale == "tensor":
            return rows.float() / scale
        assert by_head is not None
        return rows.float() / by_head[:, None]

    def numbers_of(self, plane: Plane) -> Plane:
        """The plane of numbers that a plane of scales is for."""
        return next(each for each in self.format.planes if not each.is_scales and each.of == plane.of)

    def scales_of(self, plane: Plane) -> Plane | None:
        """The plane of scales of a plane of numbers; None if it has none."""
        return next((each for each in self.scale_planes if each.of == plane.of and each.rule != ZERO), None)

    def zeros_of(self, plane: Plane) -> Plane | None:
        """The plane of zeros of a plane of numbers; None if 0 means 0."""
        return next((each for each in self.scale_planes if each.of == plane.of and each.rule == ZERO), None)

    def scales(self, plane: Plane, keys: torch.Tensor) -> torch.Tensor:
        """[..., tiles] float32: scales of the numbers of ``keys`` [..., width] that a plane of scales is for."""
        return plane.rounded(self.exact_scales(plane, keys))

    def exact_scales(self, plane: Plane, keys: torch.Tensor) -> torch.Tensor:
        """[..., tiles] float32: the same before they are rounded to the dtype of scales."""
        of = self.numbers_of(plane).dtype
        tiles = in_tiles(keys[..., self.part(plane)].float(), plane.tile)
        if plane.rule == ZERO:
            scales = self.scales_of(plane)
            assert scales is not None
            return -tiles.amin(-1) / self.scales(scales, keys)
        if plane.rule == RANGE:
            return ((tiles.amax(-1) - tiles.amin(-1)) / LARGEST[of]).clamp(min=plane.smallest)
        return (tiles.abs().amax(-1) / LARGEST[of]).clamp(min=plane.smallest)

    def pack(self, keys: torch.Tensor) -> torch.Tensor:
        """[..., bytes] uint8: ``keys`` [..., width] as rows of the format."""
        found = []
        for plane in self.format.planes:
            part = keys[..., self.part(plane)]
            if plane.is_scales:
                part = self.scales(plane, keys)
            elif self.scales_of(plane) is not None:
                part = self.quotients(plane, keys).flatten(-2)
            found.append(_bytes_of(part, plane))
            if plane.unused:
                # Poison: a kernel that reads it as a scale gets NaN.
                found.append(torch.full_like(found[-1][..., : plane.unused], ALL_NAN))
        return torch.cat(found, -1)

    def quotients(self, plane: Plane, keys: torch.Tensor) -> torch.Tensor:
        """[..., tiles, tile] float32: what the numbers of a plane that has scales are, before they are rounded."""
        scales, zeros = self.scales_of(plane), self.zeros_of(plane)
        assert scales is not None
        found = in_tiles(keys[..., self.part(plane)].float(), scales.tile) / self.scales(scales, keys)[..., None]
        return found if zeros is None else found + self.scales(zeros, keys)[..., None]

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[..., width] of ``dtype``: the keys that ``rows`` [..., bytes] uint8 mean."""
        keys = torch.empty(*rows.shape[:-1], self.width, dtype=dtype, device=rows.device)
        for plane in self.format.planes:
            if plane.is_scales:
                continue
            numbers, scales = self.numbers_in(rows, plane).to(dtype), self.scales_of(plane)
            if (zeros := self.zeros_of(plane)) is not None:
                held = self.numbers_in(rows, zeros).to(dtype)
                numbers = (in_tiles(numbers, zeros.tile) - held[..., None]).flatten(-2)
            if scales is not None:
                held = self.numbers_in(rows, scales).to(dtype)
                numbers = (in_tiles(numbers, scales.tile) * held[..., None]).flatten(-2)
            keys[..., self.part(plane)] = numbers
        return keys
