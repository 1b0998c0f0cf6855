"""Kernels on which the comparison itself is tried."""

import triton
import triton.language as tl

root = tl.sqrt


@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def multiply(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def root_of(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, root(tl.load(x + at, mask=at < n)), mask=at < n)


@triton.jit
def branches(x, deep: tl.constexpr):
    value = tl.load(x)
    if deep:
        value += 1
        value *= 2
    tl.store(x, value)


@triton.jit
def through_a_pointer(table, n):
    there = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(there, n)
