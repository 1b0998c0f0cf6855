"""Packed rows of a KV pool whose scales a backend misreads: it uses scales of other tiles, keys or requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ...contract.row_format import HALVES, LARGEST, POWER_OF_TWO, ZERO, PackedRows, Plane, in_tiles, next_power_of_two
from ...steps.data import StepData


def misread_rows(data: StepData, page_size: int = 1) -> Iterator[tuple[str, StepData]]:
    """Mistakes in reading packed rows, and the data that such a backend uses. Nothing for other rows."""
    packed, keys, values = data.row_format, data.stored_keys, data.stored_values
    if packed is None or keys.dtype != torch.uint8:
        return
    parts = [keys] if values is None else [keys, values]
    for part, name in enumerate(("k_scale", "v_scale") if packed.format.layer_scale != "none" else ()):
        other = data.kv_scales.clone()
        other[part] = 1.0
        if not torch.equal(other, data.kv_scales):
            text = f"{name}, by which packed rows are divided before they are stored, is left out"
            yield f"{text}: the result is right without it", replace(data, kv_scales=other)
    for plane in packed.scale_planes:
        stored = [in_tiles(packed.raw(rows, plane), plane.dtype.itemsize) for rows in parts]
        held = [packed.by_tile(rows, plane, raw.shape[-2]) for rows, raw in zip(parts, stored, strict=True)]
        for text, scales in _scales(plane, held, page_size, LARGEST[packed.numbers_of(plane).dtype]):
            misread = [rows.clone() for rows in parts]
            for rows, raw in zip(misread, scales, strict=True):
                packed.put_by_tile(rows, plane, raw)
            if not all(map(torch.equal, misread, parts)):
                yield f"{text}: the result is right for that", _with(data, misread)
        if plane.stride > 1:
            misread = [rows.clone() for rows in parts]
            for rows, raw in zip(misread, stored, strict=True):
                packed.put_by_tile(rows, plane, raw)
            text = f"scales are used in the order of their bytes, and those of every {plane.stride} tiles are together"
            yield f"in packed rows, {text}: the result is right for that", _with(data, misread)
    yield from _misread_zeros(data, packed, parts)
    for plane in packed.format.planes:
        if plane.of == "rope":
            yield from _misread_rope(data, packed, plane)
    if packed.format.layer_scale == "head":
        heads = "in an FP8 pool with scales of heads, "
        for text, other in (
            ("the scale of KV head 0 is used for all", data.kv_scales[..., :1, :].expand_as(data.kv_scales)),
            ("the scale of a head is used for the next", data.kv_scales.roll(1, -2)),
        ):
            if not torch.equal(other, data.kv_scales):
                yield f"{heads}{text}: the result is right for that", replace(data, kv_scales=other)
    if any(plane.dtype in HALVES for plane in packed.format.planes):
        text = "the halves of a byte of two numbers are swapped: the first is the lower one"
        yield f"{text}. The result is right for that", _with(data, [_swapped(packed, rows) for rows in parts])
    if any(plane.split for plane in packed.format.planes):
        text = "the numbers of a byte are read as adjacent numbers, and are half a row apart"
        yield f"{text}. The result is right for that", _with(data, [_as_adjacent(packed, rows) for rows in parts])


def _misread_rope(data: StepData, packed: PackedRows, plane: Plane) -> Iterator[tuple[str, StepData]]:
    """Mistakes about the rope part of latent rows, which ``plane`` holds."""
    rows = data.stored_keys.clone()
    held = packed.raw(rows, plane)
    if plane.dtype == torch.bfloat16:
        first = held[..., : held.shape[-1] // 2].contiguous().view(torch.float8_e4m3fn)
        held.copy_(first.bfloat16().view(torch.uint8))
        yield "in packed rows, the rope part is read as FP8 numbers: the result is right for that", _with(data, [rows])
    if packed.format.rope_in_value:
        held.zero_()
        text = f"the last {packed.format.rope_in_value} numbers of values, the rope part of keys, are left out"
        yield f"in packed rows, {text}: the result is right without them", replace(data, stored_values=rows)


def _misread_zeros(data: StepData, packed: PackedRows, parts: Sequence[torch.Tensor]) -> Iterator[tuple[str, StepData]]:
    """Mistakes that concern scales and zeros of numbers without a sign together."""
    zeros = next((plane for plane in packed.scale_planes if plane.rule == ZERO), None)
    if zeros is None:
        return
    scales = packed.scales_of(zeros)
    assert scales is not None

    def changed(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> StepData:
        rows = [each.clone() for each in parts]
        for each in rows:
            planes = packed.planes(each)
            scale, zero = change(planes["scales"].clone(), planes["zeros"].clone())
            planes["scales"].copy_(scale)
            planes["zeros"].copy_(zero)
        return _with(data, rows)

    for text, change in (
        (
            "the zero is used as the smallest value, and not as the number that means 0",
            lambda scale, zero: (scale, -zero / scale),
        ),
        ("the zero is added to numbers, and not subtracted", lambda scale, zero: (scale, -zero)),
        ("zeros are rounded to integers", lambda scale, zero: (scale, zero.round())),
        ("scales and zeros are swapped", lambda scale, zero: (zero, scale)),
        ("scales and zeros of a head are used for the next", lambda scale, zero: (scale.roll(1, 3), zero.roll(1, 3))),
    ):
        yield f"in packed rows, {text}: the result is right for that", changed(change)


def _as_adjacent(packed: PackedRows, rows: torch.Tensor) -> torch.Tensor:
    """Rows whose bytes mean to a right reader what they mean to one that takes the numbers of a byte for adjacent."""
    rows = rows.clone()
    for plane in packed.format.planes:
        if plane.split:
            raw = packed.raw(rows, plane)
            first, second = torch.stack((raw & 15, raw >> 4), -1).flatten(-2).chunk(2, -1)
            raw.copy_(first + second * 16)
    return rows


def _with(data: StepData, rows: Sequence[torch.Tensor]) -> StepData:
    return replace(data, stored_keys=rows[0], stored_values=rows[1] if len(rows) > 1 else None)


def _swapped(packed: PackedRows, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    for plane in packed.format.planes:
        if plane.dtype in HALVES:
            raw = packed.raw(rows, plane)
            raw.copy_((raw >> 4) + (raw & 15) * 16)
    return rows


def _bytes_of_ones(plane: Plane) -> torch.Tensor:
    """[bytes] uint8: the scale 1 in a plane of scales."""
    if plane.dtype == POWER_OF_TWO:
        return torch.tensor([127], dtype=torch.uint8)
    return torch.ones(1).to(plane.dtype).view(torch.uint8)


def _scales(
    plane: Plane, held: Sequence[torch.Tensor], page_size: int, largest: float
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Scales of keys and of values, [L, B, S, Hk, tiles, bytes] uint8, in the place of those that rows have.
    ``largest``: of the dtype of numbers.
    """
    what = plane.name
    one = what.removesuffix("s")

    def each(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [change(scales) for scales in held]

    yield f"in packed rows, each {one} is used for the tile before its own", each(lambda own: own.roll(-1, -2))
    yield f"in packed rows, each {one} is used for the tile after its own", each(lambda own: own.roll(1, -2))
    yield (
        f"in packed rows, the {one} of the first tile is used for all tiles",
        each(lambda own: own[..., :1, :].expand_as(own)),
    )
    pairs = torch.arange(held[0].shape[-2]) // 2 * 2
    yield f"in packed rows, two tiles share the {one} of the first of them", each(lambda own: own[..., pairs, :])
    key, last = torch.arange(held[0].shape[2]), held[0].shape[2] - 1
    for other, text in (
        ((key - 1).clamp(min=0), "of a key are used for the next key"),
        ((key + 1).clamp(max=last), "of a key are used for the previous key"),
        (key // page_size * page_size, "of the first key of a page are used for the page"),
    ):
        yield f"in packed rows, the {what} {text}", each(lambda own, other=other: own[:, :, other])  # type: ignore[misc]
    yield f"in packed rows, the {what} of KV head 0 are used for all", each(lambda own: own[:, :, :, :1].expand_as(own))
    yield f"in packed rows, the {what} of a head are used for the next", each(lambda own: own.roll(1, 3))
    yield (
        f"in packed rows, the {what} of a request are used for all requests",
        each(lambda own: own[:, :1].expand_as(own)),
    )
    if len(held) > 1:
        yield f"in packed rows, the {what} of keys are used for values", [held[0], held[0]]
        yield f"in packed rows, the {what} of values are used for keys", [held[1], held[1]]
    if plane.rule == ZERO:
        yield "in packed rows, zeros are left out", each(torch.zeros_like)
        return
    ones = each(lambda own: _bytes_of_ones(plane).expand_as(own))
    yield f"in packed rows, the scales of {plane.tile or 'all'} numbers each are left out", ones
    if len(held) > 1:
        yield "in packed rows, the scales of keys are left out", [ones[0], held[1]]
        yield "in packed rows, the scales of values are left out", [held[0], ones[1]]
    if plane.dtype == torch.float32:
        yield (
            f"in packed rows, the scales are multiplied by {largest:g}, the largest number, which they are for already",
            each(lambda own: (own.view(plane.dtype) * largest).view(torch.uint8)),
        )
        yield (
            "in packed rows, each scale is rounded up to a power of two",
            each(lambda own: next_power_of_two(own.contiguous().view(plane.dtype)).view(torch.uint8)),
        )
