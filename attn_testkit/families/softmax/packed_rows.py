"""Packed rows of a KV pool whose scales a backend reads in another way: those of other tiles, keys and requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...contract.row_format import Plane, next_power_of_two
from ...steps.data import StepData

__all__ = ["misread_rows"]


def misread_rows(data: StepData) -> Iterator[tuple[str, StepData]]:
    """Mistakes in reading packed rows, and the numbers of the step that are attended then. Nothing for other rows."""
    packed, rows = data.row_format, data.stored_keys
    if packed is None or rows.dtype != torch.uint8:
        return
    for plane in (each for each in packed.format.planes if each.tile > 1):
        for text, numbers in _scales(plane, packed.planes(rows)[plane.name]):
            misread = rows.clone()
            packed.planes(misread)[plane.name].copy_(numbers)
            if not torch.equal(misread, rows):
                yield f"{text}: the result is right for that", replace(data, stored_keys=misread)


def _scales(plane: Plane, held: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Scales [L, B, S, Hk, tiles] in the place of those that rows have."""
    yield "in packed rows, each scale is used for the tile before its own", held.roll(-1, -1)
    yield "in packed rows, each scale is used for the tile behind its own", held.roll(1, -1)
    yield "in packed rows, the scale of the first tile is used for all tiles", held[..., :1].expand_as(held)
    yield "in packed rows, the scales of a key are used for the key behind it", held.roll(1, 2)
    yield "in packed rows, the scales of a request are used for all requests", held[:, :1].expand_as(held)
    yield f"in packed rows, the scales of {plane.tile} numbers each are left out", torch.ones_like(held)
    yield "in packed rows, each scale is rounded up to a power of two", next_power_of_two(held.contiguous())
