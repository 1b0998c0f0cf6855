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
