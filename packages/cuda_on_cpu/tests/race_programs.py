"""Labelled programs for races inside a launch: each kernel is right with one set of arguments, and races with another.

``says`` is what the report of the wrong launch must say: which memory, and what the other program did to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def write_tiles(out, step, TILE: tl.constexpr):
    at = tl.program_id(0) * step + tl.arange(0, TILE)
    tl.store(out + at, tl.program_id(0) * 100 + tl.arange(0, TILE))


@triton.jit
def write_value(out, own: tl.constexpr):
    """The number of splits, which every program knows; or each its own."""
    value = 7
    if own:
        value += tl.program_id(0)
    tl.store(out, value)


@triton.jit
def scatter(x, to, out, TILE: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, TILE)
    tl.store(out + tl.load(to + row) * TILE + at, tl.load(x + row * TILE + at))


@triton.jit
def scatter_masked(x, to, out, TILE: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, TILE)
    slot = tl.load(to + row)
    tl.store(out + slot * TILE + at, tl.load(x + row * TILE + at), mask=slot > 0)


@triton.jit
def shift(x, out, n, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at + 1, tl.load(x + at, mask=at < n, other=0.0), mask=at + 1 < n)


@triton.jit
def count(counter, atomic: tl.constexpr):
    if atomic:
        tl.atomic_add(counter, 1)
    else:
        tl.store(counter, tl.load(counter) + 1)


@triton.jit
def sum_tiles(x, out, atomic: tl.constexpr, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    mine = tl.load(x + tl.program_id(0) * TILE + at)
    if atomic:
        tl.atomic_add(out + at, mine)
    else:
        tl.store(out + at, tl.load(out + at) + mine)


@triton.jit
def sum_and_clear(x, out, clears: tl.constexpr, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    if clears and tl.program_id(0) == 0:
        tl.store(out + at, tl.zeros([TILE], tl.float32))
    tl.atomic_add(out + at, tl.load(x + tl.program_id(0) * TILE + at))


@triton.jit
def splits(x, parts, ticket, out, how: tl.constexpr, TILE: tl.constexpr):
    """The last program merges what all have written. how 0: by a ticket; 1: by its place; 2: the ticket orders nothing;
    3: what is merged is written after the ticket was taken; 4: the ticket is one of the program's own threads."""
    at, program, programs = tl.arange(0, TILE), tl.program_id(0), tl.num_programs(0)
    if how != 3:
        tl.store(parts + program * TILE + at, tl.load(x + program * TILE + at) * 2)
    if how == 1:
        last = program == programs - 1
    elif how == 2:
        last = tl.atomic_add(ticket, 1, sem="relaxed") == programs - 1
    elif how == 4:
        last = tl.atomic_add(ticket, 1, scope="cta") == programs - 1
    else:
        last = tl.atomic_add(ticket, 1) == programs - 1
    if how == 3:
        tl.store(parts + program * TILE + at, tl.load(x + program * TILE + at) * 2)
    if last:
        total = tl.zeros([TILE], tl.float32)
        for i in range(programs):
            total += tl.load(parts + i * TILE + at)
        tl.store(out + at, total)


@triton.jit
def ticket_that_is_reset(ticket, out, by_the_last: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    if not by_the_last and program == 0:
        tl.store(ticket, 0)
    if tl.atomic_add(ticket, 1) == programs - 1:
        tl.store(out, 1)
        if by_the_last:
            tl.store(ticket, 0)


@triton.jit
def locked_sum(x, out, lock, locks: tl.constexpr):
    mine = tl.load(x + tl.program_id(0))
    if locks:
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
    tl.store(out, tl.load(out) + mine)
    if locks:
        tl.atomic_xchg(lock, 0)


@triton.jit
def chain(x, sums, flags, how: tl.constexpr):
    """A running sum over programs. how 0: each waits for the one before; 1: nobody waits; 2: all wait for the first."""
    program = tl.program_id(0)
    before = 0.0
    if program > 0:
        if how == 0:
            while tl.atomic_add(flags + program - 1, 0) == 0:
                pass
        if how == 2:
            while tl.atomic_add(flags, 0) == 0:
                pass
        before = tl.load(sums + program - 1)
    tl.store(sums + program, before + tl.load(x + program))
    tl.atomic_xchg(flags + program, 1)


@triton.jit
def volatile_chain(x, sums, flags, waits: tl.constexpr):
    program = tl.program_id(0)
    before = 0.0
    if program > 0:
        if waits:
            while tl.load(flags + program - 1, volatile=True) == 0:
                pass
        before = tl.load(sums + program - 1)
    tl.store(sums + program, before + tl.load(x + program))
    tl.atomic_xchg(flags + program, 1)


@triton.jit
def append_and_attend(k, kv, out, slot, all_write: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Query heads of one KV head: each writes the new key before it reads all, or only the first does."""
    head, at = tl.program_id(0), tl.arange(0, WIDTH)
    if all_write:
        tl.store(kv + slot * WIDTH + at, tl.load(k + at))
    else:
        if head == 0:
            tl.store(kv + slot * WIDTH + at, tl.load(k + at))
    total = tl.zeros([WIDTH], tl.float32)
    for i in range(slot + 1):
        total += tl.load(kv + i * WIDTH + at)
    tl.store(out + head * WIDTH + at, total)


@triton.jit
def best_of(x, best, out, atomic: tl.constexpr):
    program = tl.program_id(0)
    tl.atomic_max(best, tl.load(x + program))
    if atomic:
        tl.store(out + program, tl.atomic_add(best, 0) * 0)
    else:
        tl.store(out + program, tl.load(best) * 0)


@triton.jit
def normalize(x, scratch, out, own: tl.constexpr, TILE: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, TILE)
    where = scratch
    if own:
        where = scratch + row * TILE
    tl.store(where + at, tl.load(x + row * TILE + at) + row)
    value = tl.load(where + at)
    tl.store(out + row * TILE + at, value / tl.sum(value, 0))


@triton.jit
def step_states(states, slots, x, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    slot = tl.load(slots + tl.program_id(0))
    state = tl.load(states + slot * WIDTH + at)
    tl.store(states + slot * WIDTH + at, state * 0.5 + tl.load(x + tl.program_id(0) * WIDTH + at))


@triton.jit
def set_bits(words, atomic: tl.constexpr):
    program = tl.program_id(0)
    if atomic:
        tl.atomic_or(words + program // 8, 1 << (program % 8))
    else:
        tl.store(words + program // 8, tl.load(words + program // 8) | (1 << (program % 8)))


@triton.jit
def transpose(x, n, all_pairs: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    if all_pairs:
        swaps = i != j
    else:
        swaps = i < j
    if swaps:
        a, b = tl.load(x + i * n + j), tl.load(x + j * n + i)
        tl.store(x + i * n + j, b)
        tl.store(x + j * n + i, a)


@triton.jit
def bytes_of(out, width):
    tl.store(out + tl.program_id(0) * width, (tl.program_id(0) + 1).to(tl.int8))
    tl.store(out + tl.program_id(0) * width + 1, (tl.program_id(0) + 1).to(tl.int8))


@triton.jit
def rows_in_place(x, bias, rows, reads_next: tl.constexpr, WIDTH: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    value = tl.load(x + row * WIDTH + at)
    if reads_next:
        value += tl.load(x + (row + 1) * WIDTH + at, mask=at < (rows - row - 1) * WIDTH, other=0.0)
    tl.store(x + row * WIDTH + at, value + tl.load(bias + at))


@triton.jit
def partial_max(x, top, out, two_launches: tl.constexpr, phase: tl.constexpr):
    program = tl.program_id(0)
    if not two_launches or phase == 0:
        tl.store(top + program, tl.load(x + program) * 3)
    if not two_launches or phase == 1:
        best = -1.0
        for i in range(tl.num_programs(0)):
            best = tl.maximum(best, tl.load(top + i))
        tl.store(out + program, best)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the device."""
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def rising(*shape: int) -> torch.Tensor:
    """1, 2, 3 and so on, on the device."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float32, device="cuda").reshape(shape)


def whole(*values: int) -> torch.Tensor:
    """Integers on the device."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


I32 = torch.int32


@dataclass(frozen=True)
class Pair:
    """A right launch and a wrong one of a kernel. ``arguments`` are made anew for each."""

    name: str
    kernel: Any
    right: Callable[[], tuple[Any, ...]]
    wrong: Callable[[], tuple[Any, ...]]
    says: str
    grid: tuple[int, ...] = (3,)
    options: tuple[tuple[str, int], ...] = ()
    right_kernel: Any = None
    """The kernel of the right launch, if it is another one."""


T4 = (("TILE", 4),)
W4 = (("WIDTH", 4),)
PAIRS = (
    Pair(
        "tiles that overlap",
        write_tiles,
        lambda: (zeros(16, dtype=I32), 4),
        lambda: (zeros(16, dtype=I32), 3),
        r"byte 12 of out, int32 \[16\], which program \(0, 0, 0\) of the same launch stored to",
        options=T4,
    ),
    Pair(
        "one value that all know",
        write_value,
        lambda: (zeros(1, dtype=I32), False),
        lambda: (zeros(1, dtype=I32), True),
        "byte 0 of out, .* stored to",
    ),
    Pair(
        "two rows for one slot",
        scatter,
        lambda: (rising(3, 4), whole(2, 0, 1), zeros(3, 4)),
        lambda: (rising(3, 4), whole(2, 0, 2), zeros(3, 4)),
        "byte 32 of out, .* stored to",
        options=T4,
    ),
    Pair(
        "padded rows of slot 0",
        scatter,
        lambda: (rising(3, 4), whole(2, 0, 0), zeros(3, 4)),
        lambda: (rising(3, 4), whole(2, 0, 0), zeros(3, 4)),
        "byte 0 of out, .* stored to",
        options=T4,
        right_kernel=scatter_masked,
    ),
    Pair(
        "rows that move by one in place",
        shift,
        lambda: (rising(12), zeros(12), 12),
        lambda: (lambda x: (x, x, 12))(rising(12)),
        "byte 16 of x, .* stored to",
        options=T4,
    ),
    Pair(
        "counter",
        count,
        lambda: (zeros(1, dtype=I32), True),
        lambda: (zeros(1, dtype=I32), False),
        "byte 0 of counter, .* stored to",
    ),
    Pair(
        "sum of tiles",
        sum_tiles,
        lambda: (rising(3, 4), zeros(4), True),
        lambda: (rising(3, 4), zeros(4), False),
        "byte 0 of out, .* stored to",
        options=T4,
    ),
    Pair(
        "zeroes while others add",
        sum_and_clear,
        lambda: (rising(3, 4), zeros(4), False),
        lambda: (rising(3, 4), zeros(4), True),
        "an? atomic operation .* byte 0 of out, .* stored to",
        options=T4,
    ),
    *[
        Pair(
            f"merge of splits: {name}",
            splits,
            lambda: (rising(3, 4), zeros(3, 4), zeros(1, dtype=I32), zeros(4), 0),
            lambda how=how: (rising(3, 4), zeros(3, 4), zeros(1, dtype=I32), zeros(4), how),
            "a load .* byte 0 of parts, .* stored to",
            options=T4,
        )
        for name, how in (
            ("the last by its place", 1),
            ("relaxed ticket", 2),
            ("written after the ticket", 3),
            ("ticket of one program", 4),
        )
    ],
    Pair(
        "reset of a ticket",
        ticket_that_is_reset,
        lambda: (zeros(1, dtype=I32), zeros(1, dtype=I32), True),
        lambda: (zeros(1, dtype=I32), zeros(1, dtype=I32), False),
        "byte 0 of ticket, .* stored to",
    ),
    Pair(
        "lock",
        locked_sum,
        lambda: (rising(3), zeros(1), zeros(1, dtype=I32), True),
        lambda: (rising(3), zeros(1), zeros(1, dtype=I32), False),
        "byte 0 of out, .* stored to",
    ),
    Pair(
        "running sum without a flag",
        chain,
        lambda: (rising(3), zeros(3), zeros(3, dtype=I32), 0),
        lambda: (rising(3), zeros(3), zeros(3, dtype=I32), 1),
        r"byte 0 of sums, .* program \(0, 0, 0\) of the same launch stored to",
    ),
    Pair(
        "running sum that waits for the first",
        chain,
        lambda: (rising(3), zeros(3), zeros(3, dtype=I32), 0),
        lambda: (rising(3), zeros(3), zeros(3, dtype=I32), 2),
        r"byte 4 of sums, .* program \(1, 0, 0\) of the same launch stored to",
    ),
    Pair(
        "flag that is polled",
        volatile_chain,
        lambda: (rising(3), zeros(3), zeros(3, dtype=I32), True),
        lambda: (rising(3), zeros(3), zeros(3, dtype=I32), False),
        "byte 0 of sums, .* stored to",
    ),
    Pair(
        "new key that one head writes",
        append_and_attend,
        lambda: (rising(4), zeros(3, 4), zeros(2, 4), 2, True),
        lambda: (rising(4), zeros(3, 4), zeros(2, 4), 2, False),
        "a load .* byte 32 of kv, .* stored to",
        grid=(2,),
        options=(("HEADS", 2), ("WIDTH", 4)),
    ),
    Pair(
        "maximum that is read plainly",
        best_of,
        lambda: (whole(3, 4, 5), zeros(1, dtype=I32), zeros(3, dtype=I32), True),
        lambda: (whole(3, 4, 5), zeros(1, dtype=I32), zeros(3, dtype=I32), False),
        "byte 0 of best, .* loaded from",
    ),
    Pair(
        "scratch of all programs",
        normalize,
        lambda: (rising(3, 4), zeros(3, 4), zeros(3, 4), True),
        lambda: (rising(3, 4), zeros(3, 4), zeros(3, 4), False),
        "byte 0 of scratch, .* (stored to|loaded from)",
        options=T4,
    ),
    Pair(
        "two requests with one state",
        step_states,
        lambda: (rising(4, 4), whole(3, 0, 1), rising(3, 4)),
        lambda: (rising(4, 4), whole(3, 0, 3), rising(3, 4)),
        "byte 48 of states, .* stored to",
        options=W4,
    ),
    Pair(
        "bits of one word",
        set_bits,
        lambda: (zeros(1, dtype=I32), True),
        lambda: (zeros(1, dtype=I32), False),
        "byte 0 of words, .* stored to",
    ),
    Pair(
        "transposed in place",
        transpose,
        lambda: (rising(3, 3), 3, False),
        lambda: (rising(3, 3), 3, True),
        "of x, .* stored to",
        grid=(3, 3),
    ),
    Pair(
        "bytes of one word",
        bytes_of,
        lambda: (zeros(8, dtype=torch.int8), 2),
        lambda: (zeros(8, dtype=torch.int8), 1),
        "byte 1 of out, .* stored to",
    ),
    Pair(
        "row that the next program changes",
        rows_in_place,
        lambda: (rising(3, 4), rising(4), 3, False),
        lambda: (rising(3, 4), rising(4), 3, True),
        "a store .* byte 16 of x, .* loaded from",
        options=W4,
    ),
    Pair(
        "two phases in one launch",
        partial_max,
        lambda: (rising(3), rising(3), zeros(3), True, 1),
        lambda: (rising(3), rising(3), zeros(3), False, 0),
        r"byte 4 of top, .* loaded from|byte 0 of top, .* stored to",
    ),
)
