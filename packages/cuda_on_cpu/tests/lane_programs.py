"""Labelled programs for threads of one program: each is right with a barrier or another order, and races without it.

They keep the mechanism of public bugs (TensorRT-LLM #17522, Megatron-LM #5963, triton #9887 and #1615) or were written
to look like one. ``says`` is what the report of the wrong launch must say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def shifted_window(window, x, out, barrier: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """A convolution reads its window by rows, and writes it again as a tile that is one row further."""
    n, w = tl.arange(0, N), tl.arange(0, WIDTH)
    total = tl.load(x + n)
    for i in range(WIDTH):
        total += tl.load(window + i * N + n)
    moved = tl.load(window + (w[:, None] + 1) * N + n[None, :], mask=w[:, None] < WIDTH - 1, other=0.0)
    fresh = tl.load(x + w[:, None] * 0 + n[None, :])
    if barrier:
        tl.debug_barrier()
    tl.store(window + w[:, None] * N + n[None, :], tl.where(w[:, None] < WIDTH - 1, moved, fresh))
    tl.store(out + n, total)


@triton.jit
def rotate_in_place(x, how: tl.constexpr, N: tl.constexpr):
    """Pairs of neighbours are rotated. how 0: stored as halves; 1: with a barrier; 2: stored where they were."""
    n = tl.arange(0, N)
    one, two = tl.load(x + 2 * n), tl.load(x + 2 * n + 1)
    if how == 1:
        tl.debug_barrier()
    if how == 2:
        tl.store(x + 2 * n, one - two)
        tl.store(x + 2 * n + 1, one + two)
    else:
        tl.store(x + n, one - two)
        tl.store(x + N + n, one + two)


@triton.jit
def through_memory(x, buffer, out, how: tl.constexpr, N: tl.constexpr):
    """A tile is transposed through memory. how 0: at once; 1: a barrier; 2: read as it was stored; 3: after a sum."""
    r, c = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    value = tl.load(x + r * N + c)
    tl.store(buffer + r * N + c, value)
    if how == 1:
        tl.debug_barrier()
    if how == 3:
        value += tl.sum(value, 1)[:, None]
    if how == 2:
        value += tl.load(buffer + r * N + c)
    else:
        value += tl.load(buffer + c * N + r)
    tl.store(out + r * N + c, value)


@triton.jit
def number_for_all(x, buffer, out, how: tl.constexpr, N: tl.constexpr):
    """One number is stored, and a tile loads it. how 0: at once; 1: after a barrier; 2: the tile uses the number."""
    n = tl.arange(0, N)
    scale = tl.load(x) * 2
    tl.store(buffer, scale)
    if how == 1:
        tl.debug_barrier()
    if how == 2:
        tl.store(out + n, tl.load(x + n) * scale)
    else:
        tl.store(out + n, tl.load(x + n) * tl.load(buffer + n * 0))


@triton.jit
def row_of_all(x, out, barrier: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Every row of a tile loads the first row of memory, which one of them stores again."""
    r, n = tl.arange(0, R)[:, None], tl.arange(0, N)[None, :]
    value = tl.load(x + r * 0 + n)
    if barrier:
        tl.debug_barrier()
    tl.store(x + n, tl.load(out + n) + 1)
    tl.store(out + r * N + n, value)


@triton.jit
def neighbours(x, how: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr):
    """Steps of a prefix sum in memory. how 0: no barrier; 1: after the load; 2: also after the store."""
    n = tl.arange(0, N)
    for i in tl.static_range(STEPS):
        before = tl.load(x + n - (1 << i), mask=n >= 1 << i, other=0.0)
        mine = tl.load(x + n)
        if how >= 1:
            tl.debug_barrier()
        tl.store(x + n, before + mine)
        if how == 2:
            tl.debug_barrier()


@triton.jit
def written_twice(x, out, same: tl.constexpr, N: tl.constexpr):
    """Two tiles overlap. The second writes the numbers that are there, or others."""
    n = tl.arange(0, N)
    tl.store(out + n, tl.load(x + n))
    if same:
        tl.store(out + N // 2 + n, tl.load(x + N // 2 + n))
    else:
        tl.store(out + N // 2 + n, tl.load(x + N // 2 + n) + 1)


@triton.jit
def disjoint(x, how: tl.constexpr, N: tl.constexpr):
    """Two tiles of one tensor, which have no element in common; or half of their elements."""
    n = tl.arange(0, N)
    value = tl.load(x + n)
    if how == 0:
        tl.store(x + N + n, value)
    else:
        tl.store(x + N // 2 + n, value)


@triton.jit
def slots_moved(pool, source, target, barrier: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Rows of a pool are copied to slots that other rows of the tile are read from. Slots are loaded first: the threads
    exchange them, which orders what comes before."""
    r, n = tl.arange(0, R), tl.arange(0, N)
    start, to = tl.load(source + r)[:, None] * N, tl.load(target + r)[:, None] * N
    rows = tl.load(pool + start + n[None, :])
    if barrier:
        tl.debug_barrier()
    tl.store(pool + to + n[None, :], rows)


@triton.jit
def gathered_between(x, buffer, out, gathers: tl.constexpr, shows: tl.constexpr, N: tl.constexpr):
    """A tile is read backwards. ``gathers``: its elements are exchanged in between. ``shows``: Python prints."""
    n = tl.arange(0, N)
    value = tl.load(x + n)
    tl.store(buffer + n, value)
    if gathers:
        value = tl.gather(value, N - 1 - n, 0)
    if shows:
        tl.static_print("between")
    tl.store(out + n, value + tl.load(buffer + N - 1 - n))


@dataclass(frozen=True)
class Pair:
    """A right launch and a wrong one of a kernel. ``arguments`` are made anew for each."""

    name: str
    kernel: Any
    right: Callable[[], tuple[Any, ...]]
    wrong: Callable[[], tuple[Any, ...]]
    says: str
    options: tuple[tuple[str, int], ...] = ()
    right_options: tuple[tuple[str, int], ...] = ()
    """Options of the right launch alone."""


def some(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), device="cuda").view(shape)


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


N128 = (("N", 128),)
N16 = (("N", 16),)
PAIRS = (
    Pair(
        "window of a convolution",
        shifted_window,
        lambda: (some(4, 128), some(128) * 7, some(128), True),
        lambda: (some(4, 128), some(128) * 7, some(128), False),
        "a store .* of window, .* loads from with no barrier",
        (("WIDTH", 4), *N128),
    ),
    Pair(
        "rotation from neighbours to halves",
        rotate_in_place,
        lambda: (some(256), 1),
        lambda: (some(256), 0),
        "a store .* of x, .* loads from with no barrier",
        N128,
    ),
    Pair(
        "rotation that stays where it is",
        rotate_in_place,
        lambda: (some(256), 2),
        lambda: (some(256), 0),
        "loads from with no barrier",
        N128,
    ),
    Pair(
        "rotation of one warp",
        rotate_in_place,
        lambda: (some(256), 0),
        lambda: (some(256), 0),
        "loads from with no barrier",
        N128,
        (("num_warps", 1),),
    ),
    Pair(
        "tile that is transposed through memory",
        through_memory,
        lambda: (some(16, 16), some(16, 16) * 0, some(16, 16), 1),
        lambda: (some(16, 16), some(16, 16) * 0, some(16, 16), 0),
        "a load .* of buffer, .* stores to with no barrier",
        N16,
    ),
    Pair(
        "tile that is read as it was stored",
        through_memory,
        lambda: (some(16, 16), some(16, 16) * 0, some(16, 16), 2),
        lambda: (some(16, 16), some(16, 16) * 0, some(16, 16), 0),
        "stores to with no barrier",
        N16,
    ),
    Pair(
        "sum between a store and a load",
        through_memory,
        lambda: (some(16, 16), some(16, 16) * 0, some(16, 16), 3),
        lambda: (some(16, 16), some(16, 16) * 0, some(16, 16), 0),
        "stores to with no barrier",
        N16,
    ),
    Pair(
        "elements that are exchanged in between",
        gathered_between,
        lambda: (some(128), some(128) * 0, some(128), True, False),
        lambda: (some(128), some(128) * 0, some(128), False, False),
        "a load .* of buffer, .* stores to with no barrier",
        N128,
    ),
    Pair(
        "elements that are exchanged in a program that prints",
        gathered_between,
        lambda: (some(128), some(128) * 0, some(128), True, True),
        lambda: (some(128), some(128) * 0, some(128), False, True),
        "a load .* of buffer, .* stores to with no barrier",
        N128,
    ),
    Pair(
        "number that a tile loads",
        number_for_all,
        lambda: (some(128), some(1), some(128), 1),
        lambda: (some(128), some(1), some(128), 0),
        "a load .* of buffer, .* stores to with no barrier",
        N128,
    ),
    Pair(
        "number that a tile uses",
        number_for_all,
        lambda: (some(128), some(1), some(128), 2),
        lambda: (some(128), some(1), some(128), 0),
        "stores to with no barrier",
        N128,
    ),
    Pair(
        "row that every row loads",
        row_of_all,
        lambda: (some(64), some(4, 64), True),
        lambda: (some(64), some(4, 64), False),
        "a store .* of x, .* loads from with no barrier",
        (("R", 4), ("N", 64)),
    ),
    Pair(
        "prefix sum with no barrier",
        neighbours,
        lambda: (some(64), 2),
        lambda: (some(64), 0),
        "a store .* of x, .* loads from with no barrier",
        (("STEPS", 3), ("N", 64)),
    ),
    Pair(
        "prefix sum with half of the barriers",
        neighbours,
        lambda: (some(64), 2),
        lambda: (some(64), 1),
        "a load .* of x, .* stores to with no barrier",
        (("STEPS", 3), ("N", 64)),
    ),
    Pair(
        "prefix sum of one warp's elements",
        neighbours,
        lambda: (some(64), 0),
        lambda: (some(64), 0),
        "loads from with no barrier",
        (("STEPS", 3), ("N", 64)),
        (("N", 32),),
    ),
    Pair(
        "tiles that overlap",
        written_twice,
        lambda: (some(256), some(256) * 0, True),
        lambda: (some(256), some(256) * 0, False),
        "a store .* of out, .* stores to with no barrier",
        N128,
    ),
    Pair(
        "tiles of one tensor",
        disjoint,
        lambda: (some(256), 0),
        lambda: (some(256), 1),
        "a store .* of x, .* loads from with no barrier",
        N128,
    ),
    Pair(
        "slots that are read and written",
        slots_moved,
        lambda: (some(8, 32), whole(0, 1, 2, 3), whole(1, 2, 3, 0), True),
        lambda: (some(8, 32), whole(0, 1, 2, 3), whole(1, 2, 3, 0), False),
        "a store .* of pool, .* loads from with no barrier",
        (("R", 4), ("N", 32)),
    ),
    Pair(
        "slots that are only written",
        slots_moved,
        lambda: (some(8, 32), whole(0, 1, 2, 3), whole(4, 5, 6, 7), False),
        lambda: (some(8, 32), whole(0, 1, 2, 3), whole(4, 5, 6, 0), False),
        "a store .* of pool, .* loads from with no barrier",
        (("R", 4), ("N", 32)),
    ),
    Pair(
        "slots that are written in place",
        slots_moved,
        lambda: (some(8, 32), whole(0, 1, 2, 3), whole(0, 1, 2, 3), False),
        lambda: (some(8, 32), whole(0, 1, 2, 3), whole(1, 0, 2, 3), False),
        "a store .* of pool, .* loads from with no barrier",
        (("R", 4), ("N", 32)),
    ),
)
