"""A Triton kernel whose programs draw places from a counter. Imported only by the classes that run it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy(source, target, counter, width, own: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.atomic_add(counter, 1)
    row = place if own else tl.program_id(0)
    at = tl.arange(0, TILE)
    numbers = tl.load(source + row * width + at, at < width)
    tl.store(target + place * width + at, numbers, at < width)


def copied_in_turn(tensor: torch.Tensor, *, own: bool) -> torch.Tensor:
    """Copy rows to other memory; each program draws the next place from a counter. ``own``: it copies the row of that
    place. Otherwise it copies the row of its own number there, which is right only if programs run in order.
    """
    source = tensor.contiguous()
    target, width = torch.empty_like(source), source[:1].numel()
    counter = torch.zeros(1, dtype=torch.int32, device=source.device)
    if source.numel():
        _copy[(len(source),)](source, target, counter, width, own=own, TILE=triton.next_power_of_2(width))
    return target


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_live(source, target, slots, width, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, TILE)
    numbers = tl.load(source + row * width + at, at < width)
    tl.store(target + row * width + at, numbers, at < width)
    if tl.load(slots + row) == 0:
        tl.store(target + at, numbers, at < width)


def copied_by_slot(tensor: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy rows to other memory, and those whose slot is 0 to row 0 as well."""
    source = tensor.contiguous()
    target, width = torch.empty_like(source), source[:1].numel()
    if source.numel():
        _copy_live[(len(source),)](source, target, slots, width, TILE=triton.next_power_of_2(width))
    return target
