"""Small kernels for the tests."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, step, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) + step)


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
