"""Kernels whose modules name functions of the language otherwise, and that take numbers of Python for tensors."""

from __future__ import annotations

import types

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_wait as wait_for_the_kernel_ahead
from triton.language.extra.cuda import libdevice as nvidias

exponential = tl.exp
larger = tl.maximum
counted = tl.range
asserted = tl.static_assert
aligned = tl.multiple_of
tangent = libdevice.tan
made = tl.full
op = types.ModuleType("op_of_these_kernels")
op.logarithm = tl.log


@triton.jit
def shifted(x, n):
    total = x * 0
    for j in range(n):
        total += exponential(x) * (j * 3).to(tl.float32)
    return total


@triton.jit
def by_other_names(x, out, counts, N: tl.constexpr):
    asserted(N > 2)
    wait_for_the_kernel_ahead()
    row = tl.program_id(0)
    at = aligned(row * N, N) + tl.arange(0, N)
    value = tl.load(x + at)
    count = tl.load(counts + row)
    total = larger(exponential(value), 1.5) + op.logarithm(tl.abs(value) + made([N], 1.0, tl.float32))
    for _ in counted(0, count, num_stages=2):
        total += 1
    tl.store(out + at, total + shifted(value, count))


@triton.jit
def counters_as_tensors(x, out, counts, scale, N: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, N)
    total = tl.load(x + row * N + at)
    for i in range(0, N, 4, warp_specialize=True):  # Triton's compiler ignores keywords of Python's range
        total += i.to(tl.float32) + (i // 2 + 1).to(tl.int64) + (-i).to(tl.int32)
    count = tl.load(counts + row)
    for i in range(count):
        total += (i * 2).to(tl.float32) * scale.to(tl.float32)
    for i in tl.range(count, 0, -2):
        if i % 3 != 0:
            total += (2**i - i).to(tl.int64)
    tl.store(out + row * N + at, total)


@triton.jit
def counters_as_numbers(out, counts, N: tl.constexpr):
    """What the stock interpreter computes too: counters are never asked for what a tensor has."""
    row = tl.program_id(0)
    count = tl.load(counts + row)
    total = tl.zeros([N], tl.float64)
    for i in range(1, count + 1):
        total += i / 4 + i**2 - (i << 3) + i % 5 + abs(-i) + (7 & i) + 3 // i + (i if i > 2 else -i)
        total += tl.arange(0, N) * i
        total += (1 << 40) * i
    for i in range(5):
        total += tl.full([N], i, tl.float64) * (2**33 + i)
    tl.store(out + row * N + tl.arange(0, N), total)


@triton.jit
def other_attributes(out, counts, N: tl.constexpr):
    for i in range(tl.load(counts)):
        tl.store(out + i, i.nothing_of_the_kind)


@triton.jit
def twice(number):
    return 2 * number


STEP = 0


@triton.jit
def counts_for_the_module(x, N: tl.constexpr):
    global STEP
    STEP = STEP + 1
    for i in range(0, N, N):
        tl.store(x + i + tl.arange(0, N), 1.0)


@triton.jit
def adds_what_comes_later(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) + amount(N))  # noqa: F821


@triton.jit
def fast(value):
    return libdevice.fast_expf(value) + nvidias.floor(value)


@triton.jit
def by_the_library(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, fast(tl.load(x + at)))


@triton.jit
def inner_tangent(value):
    return tangent(value)


@triton.jit
def by_the_library_alone(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, inner_tangent(tl.load(x + at)))


OFFSET = tl.constexpr(3)


@triton.jit
def adds_a_constant_of_the_module(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, (OFFSET + at)[None, :].reshape(N) + OFFSET * OFFSET)
