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
def passes_on(x, out, begins: tl.constexpr):
    """begins 0: the next kernel begins when this one ends; 1: before this one waits; 2: after it has waited."""
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    if begins == 1:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    if begins == 2:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + at, tl.load(x + at))


@triton.jit
def uses(x, out, how: tl.constexpr, waits: tl.constexpr):
    """The first access is how 0: a load; 1: a store; 2: an atomic sum."""
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    if waits:
        tl.extra.cuda.gdc_wait()
    if how == 0:
        tl.store(out + at, tl.load(x + at))
    elif how == 1:
        tl.store(x + at, at.to(x.dtype.element_ty))
    else:
        tl.atomic_add(x + at, 1)


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


def _memory() -> list[torch.Tensor]:
    return [torch.zeros(32, device="cuda") for _ in range(3)]


def after_memory(waits: bool) -> None:
    """Memory without contents is made between the two kernels: nothing is launched."""
    x, doubled, _ = _memory()
    produce[(4,)](x, doubled)
    uses[(4,)](doubled.view(4, 8), torch.empty_like(doubled), how=0, waits=waits, launch_pdl=True)


def after_zeros(waits: bool) -> None:
    """Right without a wait, too: torch launches a kernel between the two, which waits for the first."""
    x, doubled, _ = _memory()
    produce[(4,)](x, doubled)
    uses[(4,)](doubled, torch.zeros(32, device="cuda"), how=0, waits=waits, launch_pdl=True)


def after_the_host(waits: bool) -> None:
    """Right without a wait, too: the host waits."""
    x, doubled, out = _memory()
    produce[(4,)](x, doubled)
    torch.cuda.synchronize()
    uses[(4,)](doubled, out, how=0, waits=waits, launch_pdl=True)


def as_bytes(waits: bool) -> None:
    x, doubled, _ = _memory()
    produce[(4,)](x, doubled)
    out = torch.empty(32, dtype=torch.uint8, device="cuda")
    uses[(4,)](doubled.view(torch.uint8), out, how=0, waits=waits, launch_pdl=True)


def written_too_early(waits: bool) -> None:
    """The kernel before still reads what this one writes."""
    x, doubled, out = _memory()
    produce[(4,)](x, doubled)
    uses[(4,)](x, out, how=1, waits=waits, launch_pdl=True)


def added_too_early(waits: bool) -> None:
    x, doubled, out = _memory()
    produce[(4,)](x, doubled)
    uses[(4,)](doubled, out, how=2, waits=waits, launch_pdl=True)


def third_of_three(waits: bool, begins: int = 1) -> None:
    """The last kernel reads what the first writes, and the second lets it begin before the first has ended."""
    x, doubled, out = _memory()
    produce[(4,)](x, doubled)
    passes_on[(4,)](x, torch.empty_like(x), begins=begins, launch_pdl=True)
    uses[(4,)](doubled, out, how=0, waits=waits, launch_pdl=True)


def third_after_a_wait(waits: bool) -> None:
    """Right without a wait, too: the second lets it begin after it has waited for the first."""
    third_of_three(waits, begins=2)


def third_after_the_end(waits: bool) -> None:
    """Right without a wait, too: the second has waited for the first, and has ended."""
    third_of_three(waits, begins=0)


TOO_EARLY = {
    after_memory: "a load .* memory of x that triton kernel produce, launched before, writes",
    as_bytes: "a load .* memory of x that triton kernel produce, launched before, writes",
    written_too_early: "a store .* memory of x that triton kernel produce, launched before, reads",
    added_too_early: "an atomic operation .* memory of x that triton kernel produce, launched before, writes",
    third_of_three: "a load .* memory of x that triton kernel produce, launched before, writes",
}
"""Programs that are wrong unless the last kernel waits, and what the report must say."""
IN_TIME = (after_zeros, after_the_host, third_after_a_wait, third_after_the_end)


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
