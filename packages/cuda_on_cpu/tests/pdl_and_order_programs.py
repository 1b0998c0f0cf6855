"""Labelled programs that are right in one legal order and wrong in another: programs of a launch, kernels, the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def claim(counter, out, who, named: tl.constexpr):
    """Each program takes the next free place. ``named``: it also writes whose the place is."""
    place = tl.atomic_add(counter, 1)
    tl.store(out + place, 100 + tl.program_id(0))
    if named:
        tl.store(who + place, tl.program_id(0))


@triton.jit
def produce(x, out):
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    value = tl.load(x + at) * 2
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + at, value)


@triton.jit
def consume(x, table, out, waits: tl.constexpr):
    """The table is older than the kernel before, which writes x. waits 0: never; 1: before both; 2: before x."""
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    if waits == 1:
        tl.extra.cuda.gdc_wait()
    row = tl.load(table + tl.program_id(0))
    if waits == 2:
        tl.extra.cuda.gdc_wait()
    tl.store(out + at, tl.load(x + row * 8 + tl.arange(0, 8)) + 1)


@triton.jit
def look_back(flags, out):
    """Each program waits for the one before: legal on a device that starts programs in order."""
    pid = tl.program_id(0)
    if pid > 0:
        while tl.load(flags + pid - 1, volatile=True) == 0:
            pass
    tl.store(out + pid, pid)
    tl.atomic_xchg(flags + pid, 1, sem="release")


def claimed(named: bool) -> torch.Tensor:
    """Values by program, [4]. Not ``named``: taken to be in the order of the programs."""
    counter, out, who = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (1, 4, 4))
    claim[(4,)](counter, out, who, named=named)
    return out[who.long().argsort()] if named else out


def chained(waits: int, pdl: bool, between: bool = False) -> torch.Tensor:
    """Two kernels, the second of which may begin early. ``between``: torch launches a kernel between them."""
    x = torch.arange(32.0, device="cuda")
    table = torch.tensor([3, 2, 1, 0], device="cuda")
    doubled, out, more = torch.zeros(32, device="cuda"), torch.zeros(32, device="cuda"), torch.zeros(4, device="cuda")
    produce[(4,)](x, doubled)
    if between:
        more.add_(1)
    consume[(4,)](doubled, table, out, waits=waits, launch_pdl=pdl)
    return out


def polled(falls_back: bool) -> float:
    """A result that the host asks for without waiting. Not ``falls_back``: it takes a number that is not there yet."""
    pinned = torch.zeros(1).pin_memory()
    result = torch.ones(1, device="cuda") * 7
    pinned.copy_(result, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    known = None
    if event.query():
        known = float(pinned[0])
    if falls_back and known is None:
        event.synchronize()
        known = float(pinned[0])
    return -1.0 if known is None else known
