"""Small kernels for the tests."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, step, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) + step)


@triton.jit
def add_early(x, step, N: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) + step)
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def add_blocked(x, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + step)


@triton.jit
def sum_first(x, count, out, N: tl.constexpr):
    at = tl.arange(0, N)
    live = at < tl.load(count)
    tl.store(out, tl.sum(tl.where(live, tl.load(x + at), 0.0), 0))


@triton.autotune([triton.Config({"BLOCK": 8})], key=["n"])
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % 8 == 0})
@triton.jit
def tuned(x, step, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x + at, tl.load(x + at) + step)


@triton.jit
def broken(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1 // 0)


@triton.jit
def many(x, out, stride, N: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N)
    at = rows[:, None] * stride + columns[None, :]
    value = tl.load(x + at, mask=columns[None, :] < N - 1, other=3).to(tl.float32)
    total = tl.sum(value, 1)
    top = tl.max(value, 1)
    weights = tl.exp(value - top[:, None])
    order = tl.where(columns[None, :] % 2 == 0, weights, -weights)
    parts = tl.cumsum(order, 1) + total[:, None] + tl.cdiv(stride, 3)
    shifted = (rows[:, None] << 1) ^ (columns[None, :] & 3)
    tl.store(out + at, parts + shifted.to(tl.float32) * 0.5 + tl.minimum(top, 1.0)[:, None])


@triton.jit
def add_block(x, block, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)
    tl.store(block, BLOCK)


@triton.jit
def add_small_block(x, block, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= 8)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)
    tl.store(block, BLOCK)


@triton.jit
def cast(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def cast_toward_zero(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty, fp_downcast_rounding="rtz"))


@triton.jit
def multiply(
    a, b, start, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr = None, ALLOW_TF32: tl.constexpr = None,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    at = m[:, None] * N + n[None, :]
    product = tl.dot(left, right, tl.load(start + at), input_precision=PRECISION, allow_tf32=ALLOW_TF32)
    tl.store(out + at, product)


@triton.jit
def operate(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "neg":
        r = -a
    elif OP == "abs":
        r = tl.abs(a)
    elif OP == "scale":
        r = a * 0.3
    elif OP == "fma":
        r = tl.fma(a, b, a)
    elif OP == "maximum":
        r = tl.maximum(a, b)
    elif OP == "minimum":
        r = tl.minimum(a, b)
    elif OP == "clamp":
        r = tl.clamp(a, -0.5, 0.5)
    elif OP == "where":
        r = tl.where(a < b, a, b)
    elif OP == "exp":
        r = tl.exp(a.to(tl.float32))
    elif OP == "bool":
        r = (a > 0).to(tl.bfloat16) + (a == a).to(tl.bfloat16)
    elif OP == "int":
        r = (a * 8).to(tl.int32).to(tl.bfloat16)
    elif OP == "full":
        r = tl.full([N], 1.1, tl.bfloat16) + tl.zeros([N], tl.bfloat16)
    elif OP == "masked":
        r = tl.load(x + at, mask=at % 2 == 0, other=1)
    elif OP == "sort":
        r = tl.sort(a)
    elif OP == "cumsum":
        r = tl.cumsum(a, 0)
    elif OP == "reversed":
        r = tl.cumsum(a, 0, reverse=True)
    elif OP == "cumprod":
        r = tl.cumprod(a, 0)
    tl.store(out + at, r.to(out.dtype.element_ty))


@triton.jit
def smaller(a, b):
    return tl.where(a < b, a, b)


@triton.jit
def reduce(x, out, where, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    value = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(out + m, tl.sum(value, 1))
    tl.store(out + M + m, tl.max(value, 1))
    tl.store(out + 2 * M + m, tl.min(value, 1))
    tl.store(out + 3 * M + m, tl.reduce(value, 1, smaller))
    top, at = tl.max(value, 1, return_indices=True)
    tl.store(out + 4 * M + m, top)
    tl.store(where + m, at)
    tl.store(where + M + m, tl.argmin(value, 1))
    tl.store(out + 5 * M + m, tl.sum(value) + tl.zeros([M], tl.bfloat16))


@triton.jit
def accumulate(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(out + at % 2, tl.load(x + at), mask=at > 0)


@triton.jit
def mark_if_positive(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    positive = tl.load(x) > 0
    tl.store(out + at, 1.0, mask=positive & (at < N - 1))


@triton.jit
def squared(value):
    return value * value


@triton.jit
def follow(x, lens, flags, out, rows, scale, stride, BACK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= rows:
        return
    length, column = tl.load(lens + row), tl.arange(0, BLOCK)
    begin = tl.maximum(length - BACK, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, length, BLOCK):
        at = start + column
        value = tl.load(x + row * stride + at, mask=at < length, other=0.25)
        if start > BACK // 2:
            value = squared(value)
        total += value * scale + start // 3 - (start % 5) * 0.5
    if tl.load(flags + row) > 0:
        total = -total
    count = 0
    while count * count < length:
        count += 1
    tl.store(out + row * BLOCK + column, total + count)


@triton.jit
def add_then_choose(x, flags, more, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    here = x + row * BLOCK + at
    tl.store(here, tl.load(here) + 1)
    if tl.load(flags + row) > 0:
        tl.store(here, tl.load(here) + more)
    tl.atomic_add(x + row * BLOCK, 0.5)


@triton.jit
def add_then_refuse(x, flags, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    here = x + row * BLOCK + at
    tl.store(here, tl.load(here) + 1)
    tl.assume(tl.load(flags + row) == 0)


@triton.jit
def divide_by_flag(x, flags, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    divisor = 0
    for _ in range(tl.load(flags + row)):
        divisor += 1
    tl.store(x + row * BLOCK + tl.arange(0, BLOCK), 12.0 if divisor > 2 else 1 // 0)


STEP = tl.constexpr(1)


@triton.jit
def add_step(x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + STEP)


@triton.jit
def add_and_print(x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)
    print("a program")


@triton.jit
def smallest(x, out, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, tl.reduce(tl.load(x + row * BLOCK + tl.arange(0, BLOCK)), 0, smaller))


@triton.jit
def sum_of_transposed(x, out, scale, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    values = tl.load(x + tl.program_id(0) * M * N + m[:, None] * N + n[None, :])
    sums = tl.sum(tl.trans(values) * scale + tl.zeros([N, M], tl.float32), 1) + tl.sum(values.T * scale, 1)
    products = tl.dot(tl.trans(values) * 1.0, values, input_precision="ieee")
    tl.store(out + tl.program_id(0) * N + n, sums + tl.sum(products, 1))


@triton.jit
def gather(x, at, mask, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    live = tl.load(mask + row)[:, None] if BY_ROW else tl.load(mask + row)[:, None] & (column % 2 == 0)[None, :]
    where = x + tl.load(at + row)[:, None] + column[None, :]
    found = tl.load(where, mask=live, other=-1)
    tl.store(out + row[:, None] * COLUMNS + column[None, :], found)
    tl.store(where, found + 1, mask=live)


@triton.jit
def scatter(out, at, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + tl.load(at + place), place)


@triton.jit
def copy_unaligned(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    bytes_of = x.to(tl.pointer_type(tl.int8)) + 1
    words = (bytes_of + 4 * at).to(tl.pointer_type(tl.int32))
    tl.store(out + at, tl.load(words))
    tl.store(words, tl.load(out + at) + 1)


@triton.jit
def smaller_than_one(value):
    return tl.minimum(value, 1.0) - 1.0


@triton.jit
def store_tile(out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, at.to(tl.float32))


@triton.jit
def store_at(out, place, live=1):
    tl.store(out + place, 7, mask=live != 0)


@triton.jit
def store_where(out, place):
    tl.store(out + tl.load(place), 7)


@triton.jit
def count_at(out, place):
    tl.atomic_add(out + place, 1)


@triton.jit
def store_through_table(table):
    target = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(target + tl.arange(0, 4), 1.0)


@triton.jit
def read_row(pool, slots, out, stride):
    tl.store(out, tl.load(pool + tl.load(slots) * stride).to(tl.float32))


@triton.jit
def exchange(x, at):
    tl.atomic_cas(x + at, 0, 1)


@triton.jit
def copy_from(table, out, place, ROWS: tl.constexpr):
    """Copy what lies ``place`` elements behind a table, as a block or as a single number."""
    at = table + place
    if ROWS == 1:
        tl.store(out, tl.load(at))
    else:
        row = tl.arange(0, ROWS)
        tl.store(out + row, tl.load(at + row))


@triton.jit
def reduced(x, rows, columns, whole, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums, maxima and minima of one block of each program, along each axis and of all its elements."""
    program, r, c = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    block = tl.load(x + (program * ROWS + r[:, None]) * COLUMNS + c[None, :])
    tl.store(rows + (program * 3 + 0) * ROWS + r, tl.sum(block, 1))
    tl.store(rows + (program * 3 + 1) * ROWS + r, tl.max(block, 1))
    tl.store(rows + (program * 3 + 2) * ROWS + r, tl.min(block, 1))
    tl.store(columns + (program * 3 + 0) * COLUMNS + c[None, :], tl.sum(block, 0, keep_dims=True))
    tl.store(columns + (program * 3 + 1) * COLUMNS + c[None, :], tl.max(block, 0, keep_dims=True))
    tl.store(columns + (program * 3 + 2) * COLUMNS + c, tl.min(block, 0))
    tl.store(whole + program * 3 + 0, tl.sum(block))
    tl.store(whole + program * 3 + 1, tl.max(block))
    tl.store(whole + program * 3 + 2, tl.min(block))
