"""Labelled programs for bounds: each kernel runs right with one set of arguments, and out of bounds with another.

Of a wrong launch, ``says`` is what the report must say of it: the tensor from whose pointer the address was computed.
A wrong program with ``undefined`` raises nothing on a device and leaves numbers that no load defined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def copy_tile(x, out, n, masked: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if masked:
        tl.store(out + at, tl.load(x + at, mask=at < n, other=0.0), mask=at < n)
    else:
        tl.store(out + at, tl.load(x + at))


@triton.jit
def store_tile(x, out, n, first, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out + first + at, tl.load(x + at), mask=at < n)


@triton.jit
def load_tile(x, out, n, first, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out + at, tl.load(x + first + at, mask=at < n, other=0.0))


@triton.jit
def rows_of_pages(kv, page_table, lens, out, pages, row, PAGE: tl.constexpr):
    at = tl.arange(0, PAGE)
    total = 0.0
    for i in range(pages):
        page = tl.load(page_table + i)
        live = i * PAGE + at < tl.load(lens)
        total += tl.sum(tl.load(kv + page.to(tl.int64) * row + at, mask=live, other=0.0), 0)
    tl.store(out, total)


@triton.jit
def next_row(cu_seqlens, out, request):
    tl.store(out, tl.load(cu_seqlens + request + 1) - tl.load(cu_seqlens + request))


@triton.jit
def mask_without_other(x, out, n, other: tl.constexpr, mask_result: tl.constexpr, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    if other:
        value = tl.load(x + at, mask=at < n, other=0)
    else:
        value = tl.load(x + at, mask=at < n)
    if mask_result:
        value = tl.where(at < n, value, 0)
    tl.store(out, tl.sum(value, 0))


@triton.jit
def gather_slots(kv, slots, out, n, other: tl.constexpr, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    if other:
        slot = tl.load(slots + at, mask=at < n, other=0)
    else:
        slot = tl.load(slots + at, mask=at < n)
    tl.store(out + at, tl.load(kv + slot))


@triton.jit
def rounds_of_splits(lens, x, out, n, other: tl.constexpr, TILE: tl.constexpr):
    """As many rounds as the longest request has keys. The lengths of a tile of requests are loaded at once."""
    at = tl.arange(0, TILE)
    if other:
        keys = tl.load(lens + at, mask=at < n, other=0)
    else:
        keys = tl.load(lens + at, mask=at < n)
    total = 0.0
    for i in range(tl.max(keys, 0)):
        total += tl.load(x + i)
    tl.store(out, total)


@triton.jit
def padded_dot(q, k, out, rows, width, other: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """A product over a head that is padded: rows of padding may be anything, columns of padding may not."""
    r, w = tl.arange(0, R), tl.arange(0, W)
    at = r[:, None] * width + w[None, :]
    if other:
        left = tl.load(q + at, mask=w[None, :] < width, other=0.0)
        right = tl.load(k + at, mask=w[None, :] < width, other=0.0)
    else:
        left = tl.load(q + at, mask=(r[:, None] < rows) & (w[None, :] < width))
        right = tl.load(k + at, mask=(r[:, None] < rows) & (w[None, :] < width))
    found = tl.dot(left, tl.trans(right))
    tl.store(out + r[:, None] * rows + r[None, :], found, mask=(r[:, None] < rows) & (r[None, :] < rows))


@triton.jit
def guarded_gather(kv, slots, out, n, guards: tl.constexpr, TILE: tl.constexpr):
    """Slots without `other` are right if whatever uses them has the same mask."""
    at = tl.arange(0, TILE)
    slot = tl.load(slots + at, mask=at < n)
    if guards:
        tl.store(out + at, tl.load(kv + slot, mask=at < n) * 2, mask=at < n)
    else:
        tl.store(out + at, tl.load(kv + slot) * 2, mask=at < n)


@triton.jit
def add_at(counts, place, value):
    tl.atomic_add(counts + place, value)


@triton.jit
def add_tile(counts, first, n, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.atomic_add(counts + first + at, 1, mask=at < n)


@triton.jit
def max_at(best, place, value):
    tl.atomic_max(best + place, value)


@triton.jit
def exchange_at(lock, place, value):
    tl.atomic_xchg(lock + place, value)


@triton.jit
def swap_at(lock, place, expected, value):
    tl.atomic_cas(lock + place, expected, value)


@triton.jit
def store_through(table, i, offset):
    target = tl.load(table + i).to(tl.pointer_type(tl.float32))
    tl.store(target + offset, 1.0)


@triton.jit
def load_through(table, out, n, offset, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    targets = tl.load(table + i, mask=i < n, other=0).to(tl.pointer_type(tl.float32))
    tl.store(out + i, tl.load(targets + offset, mask=i < n, other=0.0))


@triton.jit
def by_strides(x, out, rows, stride, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    for row in range(rows):
        tl.store(out + row * WIDTH + at, tl.load(x + row * stride + at))


@triton.jit
def walk_back(x, out, start, steps):
    total = 0.0
    for i in range(steps):
        total += tl.load(x + start - i)
    tl.store(out, total)


@triton.jit
def moving_pointer(x, out, steps, TILE: tl.constexpr):
    at = x + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for _ in range(steps):
        total += tl.load(at)
        at += TILE
    tl.store(out + tl.arange(0, TILE), total)


@triton.jit
def square(x, out, rows, columns, R: tl.constexpr, C: tl.constexpr):
    r, c = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    live = (r < rows) & (c < columns)
    tl.store(out + r * C + c, tl.load(x + r * columns + c, mask=live, other=0.0))


@triton.jit
def words_of_bytes(x, out, word):
    tl.store(out, tl.load((x + word * 4).to(tl.pointer_type(tl.int32))))


@triton.jit
def two_sides(a, b, out, which, at):
    source = a if which == 0 else b
    tl.store(out, tl.load(source + at))


@triton.jit
def last_of(x, lens, out):
    tl.store(out, tl.load(x + tl.load(lens) - 1))


@triton.jit
def slot_of_write(kv, out_cache_loc, k, skip: tl.constexpr, WIDTH: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    slot = tl.load(out_cache_loc + row).to(tl.int64)
    if skip:
        tl.store(kv + slot * WIDTH + at, tl.load(k + row * WIDTH + at), mask=slot >= 0)
    else:
        tl.store(kv + slot * WIDTH + at, tl.load(k + row * WIDTH + at))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the device."""
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def whole(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Integers on the device."""
    return torch.tensor(values, dtype=dtype, device="cuda")


def part(rows: slice, *shape: int) -> torch.Tensor:
    """A view of some rows of a larger tensor."""
    return zeros(*shape)[rows]


I64 = torch.int64


@dataclass(frozen=True)
class Pair:
    """A right launch and a wrong one of a kernel. ``arguments`` are made anew for each."""

    name: str
    kernel: Any
    right: Callable[[], tuple[Any, ...]]
    wrong: Callable[[], tuple[Any, ...]]
    says: str
    grid: int = 1
    undefined: bool = False
    bounds: str = "storage"
    confined: tuple[int, ...] = ()
    """Arguments that are handed over as views which a kernel may not leave."""
    options: tuple[tuple[str, int], ...] = ()


def addresses(*tensors: torch.Tensor, more: int = 0) -> torch.Tensor:
    """A table of pointers. ``more``: bytes to add to the last."""
    found = [tensor.data_ptr() for tensor in tensors]
    found[-1] += more
    return torch.tensor(found, dtype=I64).to("cuda")


_KEPT: list[torch.Tensor] = []


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that outlives the table which points to it."""
    _KEPT.append(tensor)
    return tensor


TILE8 = (("TILE", 8),)
PAIRS = (
    Pair(
        "store behind the last row",
        store_tile,
        lambda: (zeros(8), zeros(12), 8, 4),
        lambda: (zeros(8), zeros(12), 8, 5),
        r"store .* up to 4 bytes past the end of out",
        options=TILE8,
    ),
    Pair(
        "store before the first row",
        store_tile,
        lambda: (zeros(8), zeros(12), 8, 0),
        lambda: (zeros(8), zeros(12), 8, -1),
        r"store .* up to 4 bytes before the start of out",
        options=TILE8,
    ),
    Pair(
        "tile of the last program",
        copy_tile,
        lambda: (zeros(20), zeros(20), 20, True),
        lambda: (zeros(20), zeros(24), 20, False),
        r"load .* past the end of x",
        grid=3,
        options=TILE8,
    ),
    Pair(
        "tile that is stored too far",
        copy_tile,
        lambda: (zeros(24), zeros(20), 20, True),
        lambda: (zeros(24), zeros(20), 20, False),
        r"store .* past the end of out",
        grid=3,
        options=TILE8,
    ),
    Pair(
        "one number behind the end",
        load_tile,
        lambda: (zeros(9), zeros(8), 8, 1),
        lambda: (zeros(9), zeros(8), 8, 2),
        r"load .* up to 4 bytes past the end of x",
        options=TILE8,
    ),
    Pair(
        "row -1",
        load_tile,
        lambda: (zeros(8), zeros(8), 8, 0),
        lambda: (zeros(8), zeros(8), 8, -8),
        r"load .* up to 32 bytes before the start of x",
        options=TILE8,
    ),
    Pair(
        "mask of another length",
        load_tile,
        lambda: (zeros(5), zeros(8), 5, 0),
        lambda: (zeros(5), zeros(8), 6, 0),
        r"load .* up to 4 bytes past the end of x",
        options=TILE8,
    ),
    Pair(
        "page -1",
        rows_of_pages,
        lambda: (zeros(4, 8), whole(3, 0, -1), whole(16), zeros(1), 3, 8),
        lambda: (zeros(4, 8), whole(3, 0, -1), whole(17), zeros(1), 3, 8),
        r"load .* before the start of kv",
        options=(("PAGE", 8),),
    ),
    Pair(
        "page beyond the pool",
        rows_of_pages,
        lambda: (zeros(4, 8), whole(3), whole(8), zeros(1), 1, 8),
        lambda: (zeros(4, 8), whole(4), whole(8), zeros(1), 1, 8),
        r"load .* past the end of kv",
        options=(("PAGE", 8),),
    ),
    Pair(
        "more pages than the table has",
        rows_of_pages,
        lambda: (zeros(4, 8), whole(1, 2), whole(16), zeros(1), 2, 8),
        lambda: (zeros(4, 8), whole(1, 2), whole(16), zeros(1), 3, 8),
        r"load .* up to 4 bytes past the end of page_table",
        options=(("PAGE", 8),),
    ),
    Pair(
        "page size of another pool",
        rows_of_pages,
        lambda: (zeros(4, 8), whole(3), whole(8), zeros(1), 1, 8),
        lambda: (zeros(4, 8), whole(3), whole(8), zeros(1), 1, 16),
        r"load .* past the end of kv",
        options=(("PAGE", 8),),
    ),
    Pair(
        "offsets one request too far",
        next_row,
        lambda: (whole(0, 2, 5), zeros(1, dtype=torch.int32), 1),
        lambda: (whole(0, 2, 5), zeros(1, dtype=torch.int32), 2),
        r"load .* up to 4 bytes past the end of cu_seqlens",
    ),
    Pair(
        "masked number that is added",
        mask_without_other,
        lambda: (zeros(5), zeros(1), 5, True, False),
        lambda: (zeros(5), zeros(1), 5, False, False),
        "nan",
        undefined=True,
        options=TILE8,
    ),
    Pair(
        "masked number that is masked again",
        mask_without_other,
        lambda: (zeros(5), zeros(1), 5, False, True),
        lambda: (zeros(5, dtype=torch.int32), zeros(1, dtype=torch.int32), 5, False, False),
        "large",
        undefined=True,
        options=TILE8,
    ),
    Pair(
        "masked half numbers",
        mask_without_other,
        lambda: (zeros(5, dtype=torch.bfloat16), zeros(1), 5, False, True),
        lambda: (zeros(5, dtype=torch.bfloat16), zeros(1), 5, False, False),
        "nan",
        undefined=True,
        options=TILE8,
    ),
    Pair(
        "masked slot as an index",
        gather_slots,
        lambda: (zeros(9), whole(1, 2, 3), zeros(8), 3, True),
        lambda: (zeros(9), whole(1, 2, 3), zeros(8), 3, False),
        r"load .* past the end of kv",
        options=TILE8,
    ),
    Pair(
        "slots whose users have the same mask",
        guarded_gather,
        lambda: (zeros(9), whole(1, 2, 3), zeros(8), 3, True),
        lambda: (zeros(9), whole(1, 2, 3), zeros(8), 3, False),
        r"past the end of kv(.|\n)*probably a masked load of this launch needs `other=`",
        options=TILE8,
    ),
    Pair(
        "rounds of a loop that no load defined",
        rounds_of_splits,
        lambda: (whole(2, 4, 3), zeros(4), zeros(1), 3, True),
        lambda: (whole(2, 4, 3), zeros(4), zeros(1), 3, False),
        r"a loop of triton kernel rounds_of_splits(.|\n)*a masked load without `other`",
        options=TILE8,
    ),
    Pair(
        "columns of padding in a product",
        padded_dot,
        lambda: (zeros(16, 12), zeros(16, 12), zeros(16, 16), 16, 12, True),
        lambda: (zeros(16, 12), zeros(16, 12), zeros(16, 16), 16, 12, False),
        "nan",
        undefined=True,
        options=(("R", 16), ("W", 16)),
    ),
    Pair(
        "atomic add behind the end",
        add_at,
        lambda: (whole(0, 0), 1, 1),
        lambda: (whole(0, 0), 2, 1),
        r"store .* past the end of counts",
    ),
    Pair(
        "masked atomic add",
        add_tile,
        lambda: (zeros(6, dtype=torch.int32), 2, 4),
        lambda: (zeros(6, dtype=torch.int32), 2, 5),
        r"store .* past the end of counts",
        options=TILE8,
    ),
    Pair(
        "atomic max before the start",
        max_at,
        lambda: (whole(0, 0), 0, 1),
        lambda: (whole(0, 0), -1, 1),
        r"store .* before the start of best",
    ),
    Pair(
        "atomic exchange behind the end",
        exchange_at,
        lambda: (whole(0, 0), 1, 1),
        lambda: (whole(0, 0), 3, 1),
        r"store .* past the end of lock",
    ),
    Pair(
        "compare and swap behind the end",
        swap_at,
        lambda: (whole(0, 0), 1, 0, 1),
        lambda: (whole(0, 0), 2, 0, 1),
        r"store .* past the end of lock",
    ),
    Pair(
        "store through a table of pointers",
        store_through,
        lambda: (addresses(kept(zeros(4))), 0, 3),
        lambda: (addresses(kept(zeros(4))), 0, 1 << 28),
        r"store .* an address that comes from a number",
    ),
    Pair(
        "load through a table of pointers",
        load_through,
        lambda: (addresses(kept(zeros(4)), kept(zeros(9))), zeros(2), 2, 3),
        lambda: (addresses(kept(zeros(4)), kept(zeros(9)), more=1 << 30), zeros(2), 2, 3),
        r"load .* an address that comes from a number",
        options=(("TILE", 2),),
    ),
    Pair(
        "row of the table of pointers",
        store_through,
        lambda: (addresses(kept(zeros(4)), kept(zeros(4))), 1, 3),
        lambda: (addresses(kept(zeros(4)), kept(zeros(4))), 2, 3),
        r"load .* past the end of table",
    ),
    Pair(
        "stride of another tensor",
        by_strides,
        lambda: (zeros(4, 8), zeros(4, 8), 4, 8),
        lambda: (zeros(4, 8), zeros(4, 8), 4, 12),
        r"load .* past the end of x",
        options=(("WIDTH", 8),),
    ),
    Pair(
        "row of a view",
        load_tile,
        lambda: (part(slice(8, 16), 24), zeros(8), 8, 0),
        lambda: (part(slice(8, 16), 24), zeros(8), 8, 4),
        r"load .* past the end of x",
        bounds="view",
        options=TILE8,
    ),
    Pair(
        "row before a view",
        store_tile,
        lambda: (zeros(8), part(slice(8, 16), 24), 8, 0),
        lambda: (zeros(8), part(slice(8, 16), 24), 8, -4),
        r"store .* before the start of out",
        bounds="view",
        options=TILE8,
    ),
    Pair(
        "rows of another batch in a static buffer",
        load_tile,
        lambda: (part(slice(0, 16), 24), zeros(8), 8, 8),
        lambda: (part(slice(0, 12), 24), zeros(8), 8, 8),
        r"load .* up to 16 bytes past the end of x(.|\n)*a storage that the launch was given a part of",
        confined=(0,),
        options=TILE8,
    ),
    Pair(
        "output of the request before",
        store_tile,
        lambda: (zeros(8), part(slice(8, 16), 24), 8, 0),
        lambda: (zeros(8), part(slice(8, 16), 24), 8, -4),
        r"store .* up to 16 bytes before the start of out(.|\n)*a storage that the launch was given a part of",
        confined=(1,),
        options=TILE8,
    ),
    Pair(
        "pages of a table of which a batch has fewer",
        rows_of_pages,
        lambda: (zeros(4, 8), part(slice(0, 3), 5).int(), whole(24), zeros(1), 3, 8),
        lambda: (zeros(4, 8), zeros(5, dtype=torch.int32)[:2], whole(24), zeros(1), 3, 8),
        r"load .* up to 4 bytes past the end of page_table",
        confined=(1,),
        options=(("PAGE", 8),),
    ),
    Pair(
        "walk below the start",
        walk_back,
        lambda: (zeros(6), zeros(1), 5, 6),
        lambda: (zeros(6), zeros(1), 4, 6),
        r"load .* before the start of x",
    ),
    Pair(
        "pointer that moves on",
        moving_pointer,
        lambda: (zeros(24), zeros(8), 3),
        lambda: (zeros(24), zeros(8), 4),
        r"load .* past the end of x",
        options=TILE8,
    ),
    Pair(
        "last row of a square",
        square,
        lambda: (zeros(3, 5), zeros(4, 8), 3, 5),
        lambda: (zeros(3, 5), zeros(4, 8), 4, 5),
        r"load .* past the end of x",
        options=(("R", 4), ("C", 8)),
    ),
    Pair(
        "words of bytes",
        words_of_bytes,
        lambda: (zeros(8, dtype=torch.uint8), whole(0), 1),
        lambda: (zeros(8, dtype=torch.uint8), whole(0), 2),
        r"load .* past the end of x",
    ),
    Pair(
        "the other of two tensors",
        two_sides,
        lambda: (zeros(4), zeros(9), zeros(1), 1, 8),
        lambda: (zeros(4), zeros(9), zeros(1), 0, 8),
        r"load .* past the end of a",
    ),
    Pair(
        "last key of no keys",
        last_of,
        lambda: (zeros(6), whole(1), zeros(1)),
        lambda: (zeros(6), whole(0), zeros(1)),
        r"load .* up to 4 bytes before the start of x",
    ),
    Pair(
        "padded row that is written",
        slot_of_write,
        lambda: (zeros(4, 8), whole(2, -1), zeros(2, 8), True),
        lambda: (zeros(4, 8), whole(2, -1), zeros(2, 8), False),
        r"store .* before the start of kv",
        grid=2,
        options=(("WIDTH", 8),),
    ),
)
