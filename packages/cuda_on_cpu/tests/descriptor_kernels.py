"""Kernels with tensor descriptors, block pointers and hints to caches, and the cases in which they run.

Run as a program, it writes what the stock interpreter leaves on CPU tensors: `python descriptor_kernels.py FILE`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

HAS_BLOCK_POINTERS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
"""Triton 3.9 has the name, and refuses it."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.float8_e5m2)
COMPUTED = (torch.bfloat16, torch.float8_e5m2)
"""The stock interpreter moves them, and computes with the integers that they are to NumPy: there it is no measure."""
ROUNDS = 3
"""Launches of a case, each with other numbers: the kernel's Python runs for the first programs alone."""


@triton.jit
def copy_by_descriptors(
    x, out, rows, columns, stride, step_row, step_column, M: tl.constexpr, N: tl.constexpr, PAD: tl.constexpr
):
    source = tl.make_tensor_descriptor(
        x, shape=[rows, columns], strides=[stride, 1], block_shape=[M, N], padding_option=PAD
    )
    target = tl.make_tensor_descriptor(out, [32, 64], [64, 1], [M, N])
    i, j = tl.program_id(0) * M, tl.program_id(1) * N
    target.store([i, j], source.load([i + step_row, j + step_column]))


@triton.jit
def copy_from_descriptor(source, out, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.program_id(0) * M, tl.program_id(1) * N
    value = tl.load_tensor_descriptor(source, [i, j])
    at = (i + tl.arange(0, M))[:, None] * 64 + j + tl.arange(0, N)[None, :]
    tl.store(out + at, value, cache_modifier=".cs", eviction_policy="evict_first")


@triton.jit
def add_to_descriptor(x, target, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.program_id(0) * M, tl.program_id(1) * N
    at = (i + tl.arange(0, M))[:, None] * 64 + j + tl.arange(0, N)[None, :]
    value = tl.load(x + at, eviction_policy="evict_last", volatile=True)
    tl.store_tensor_descriptor(target, [i, j], value + target.load([i, j]))


@triton.jit
def fill_descriptor(target, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.program_id(0) * M, tl.program_id(1) * N
    tl.store_tensor_descriptor(target, [i, j], tl.full([M, N], 1.0, tl.float32))


@triton.jit
def shape_of_descriptor(source, out):
    at = tl.program_id(0)
    tl.store(out + at * 4, source.shape[0])
    tl.store(out + at * 4 + 1, source.shape[1])
    tl.store(out + at * 4 + 2, source.strides[0])
    tl.store(out + at * 4 + 3, source.strides[1])


@triton.jit
def rows_of(descriptor, rows, column):
    return descriptor.gather(rows, column)


@triton.jit
def gather_and_scatter(x, rows, out, n, N: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [n, 64], [64, 1], [1, N])
    target = tl.make_tensor_descriptor(out, [n, 64], [64, 1], [1, N])
    at = tl.program_id(0)
    wanted = tl.load(rows + at * 8 + tl.arange(0, 8))
    for column in range(0, 64, N):
        target.scatter(rows_of(source, wanted, column), wanted, column)


@triton.jit
def reduce_by_descriptor(x, out, KIND: tl.constexpr, N: tl.constexpr):
    target = tl.make_tensor_descriptor(out, [6, N], [N, 1], [8, N])
    value = tl.load(x + (tl.program_id(0) * 8 + tl.arange(0, 8))[:, None] * N + tl.arange(0, N)[None, :])
    if KIND == "add":
        target.atomic_add([0, 0], value)
    elif KIND == "min":
        target.atomic_min([0, 0], value)
    elif KIND == "max":
        target.atomic_max([0, 0], value)
    elif KIND == "and":
        target.atomic_and([0, 0], value)
    elif KIND == "or":
        target.atomic_or([0, 0], value)
    else:
        target.atomic_xor([0, 0], value)


@triton.jit
def product(a, b, out, K, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    i, j = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros([M, N], tl.float32)
    for k in range(0, K, STEP):
        total += tl.dot(a.load([i, k]), b.load([k, j]), input_precision="ieee")
    out.store([i, j], total)


@triton.jit
def of_three_axes(pair, out, N: tl.constexpr):
    page, head = tl.program_id(0), tl.program_id(1)
    block = pair[0].load([page, 0, head, 0]).reshape(4, N) - pair[1].load([page, 0, head, 0]).reshape(4, N)
    at = (page * 3 + head) * 4 * N
    tl.store(out + at + tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :], block)


@triton.jit
def copy_by_block_pointers(x, out, rows, columns, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * M
    source = tl.make_block_ptr(x, (rows, columns), (columns, 1), (i, -8), (M, N), (1, 0))
    target = tl.make_block_ptr(out, (32, 64), (64, 1), (i, 0), (M, N), (1, 0))
    for _ in range(0, 64, N):
        value = tl.load(source, boundary_check=(0, 1), padding_option=PAD, cache_modifier=".cg")
        tl.store(target, value, boundary_check=(0, 1), eviction_policy="evict_first")
        source = tl.advance(source, (0, N))
        target = tl.advance(target, (0, N))


def numbers(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Made on the host, so that they are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, shape, generator=generator, dtype=torch.int64, device="cpu").to(dtype)
    return (4 * torch.randn(*shape, generator=generator, device="cpu")).to(dtype)


def copies(dtype: torch.dtype, pad: str, rows: int, columns: int, up: int, left: int) -> Callable[[str], list[Tensor]]:
    def run(device: str) -> list[Tensor]:
        found = []
        for seed in range(ROUNDS):
            x, out = numbers(seed, dtype, 21, 48).to(device), numbers(9, dtype, 32, 64).to(device)
            copy_by_descriptors[(2, 2)](x, out, rows, columns, 48, up, left, 16, 32, pad)
            found.append(out)
        return found

    return run


def given(dtype: torch.dtype, pad: str) -> Callable[[str], list[Tensor]]:
    def run(device: str) -> list[Tensor]:
        found = []
        for seed in range(ROUNDS):
            whole, out = numbers(seed, dtype, 24, 96).to(device), numbers(9, dtype, 32, 64).to(device)
            target = numbers(8, dtype, 32, 64).to(device)
            source = TensorDescriptor.from_tensor(whole[3:, 16:64], [16, 32], padding=pad)
            copy_from_descriptor[(2, 2)](source, out, M=16, N=32)
            add_to_descriptor[(2, 2)](out, target=TensorDescriptor.from_tensor(target[:29], [16, 32]), M=16, N=32)
            shape = torch.zeros(3, 4, dtype=torch.int64).to(device)
            shape_of_descriptor[(3,)](source, shape)
            found += [out, target, shape]
        return found

    return run


def rows_picked(dtype: torch.dtype) -> Callable[[str], list[Tensor]]:
    def run(device: str) -> list[Tensor]:
        found = []
        for seed in range(ROUNDS):
            x, out = numbers(seed, dtype, 20, 64).to(device), numbers(9, dtype, 20, 64).to(device)
            rows = torch.tensor([3, 0, 19, 20, -1, 7, 12, 2**30, 5, 4, -(2**31), 11, 1, 18, 21, 6], dtype=torch.int32)
            gather_and_scatter[(2,)](x, rows.to(device), out, 20, N=32)
            found.append(out)
        return found

    return run


def products(dtype: torch.dtype) -> Callable[[str], list[Tensor]]:
    def run(device: str) -> list[Tensor]:
        found = []
        for seed in range(ROUNDS):
            a, b = numbers(seed, dtype, 40, 48).to(device), numbers(seed + 5, dtype, 48, 32).to(device)
            out = torch.zeros(40, 32, device="cpu").to(device)
            blocks = (TensorDescriptor.from_tensor(a, [16, 16]), TensorDescriptor.from_tensor(b, [16, 16]))
            product[(3, 2)](*blocks, TensorDescriptor.from_tensor(out, [16, 16]), 48, 16, 16, 16)
            found.append(out)
        return found

    return run


def pages(device: str) -> list[Tensor]:
    found = []
    for seed in range(ROUNDS):
        pool, other = (numbers(seed + i, torch.float16, 5, 4, 3, 16).to(device) for i in (0, 5))
        out = torch.zeros(5, 3, 4, 16, dtype=torch.float16, device="cpu").to(device)
        pair = tuple(TensorDescriptor.from_tensor(tensor, [1, 4, 1, 16]) for tensor in (pool, other))
        of_three_axes[(5, 3)](pair, out, N=16)
        found.append(out)
    return found


def blocks(dtype: torch.dtype, pad: str) -> Callable[[str], list[Tensor]]:
    def run(device: str) -> list[Tensor]:
        found = []
        for seed in range(ROUNDS):
            x, out = numbers(seed, dtype, 21, 48).to(device), numbers(9, dtype, 32, 64).to(device)
            copy_by_block_pointers[(2,)](x, out, 21, 48, pad, M=16, N=16)
            found.append(out)
        return found

    return run


def _cases() -> dict[str, Callable[[str], list[Tensor]]]:
    found: dict[str, Callable[[str], list[Tensor]]] = {"pages": pages}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        found[f"copy {name}"] = copies(dtype, "zero", 21, 48, 0, 0)
        found[f"copy {name} before the first row and column"] = copies(dtype, "zero", 21, 48, -5, -16)
        found[f"copy {name} of fewer rows and columns"] = copies(dtype, "zero", 17, 37, 2, 16)
        if dtype not in COMPUTED:
            found[f"given {name}"] = given(dtype, "zero")
        found[f"rows {name}"] = rows_picked(dtype)
        if HAS_BLOCK_POINTERS:
            found[f"blocks {name}"] = blocks(dtype, "zero")
    for dtype in (torch.float32, torch.float16):
        name = str(dtype).removeprefix("torch.")
        found[f"copy {name} padded with nan"] = copies(dtype, "nan", 19, 40, 3, 16)
        found[f"given {name} padded with nan"] = given(dtype, "nan")
        found[f"product {name}"] = products(dtype)
        if HAS_BLOCK_POINTERS:
            found[f"blocks {name} padded with nan"] = blocks(dtype, "nan")
    return found


CASES = _cases()


if __name__ == "__main__":
    torch.save({name: case("cpu") for name, case in CASES.items()}, sys.argv[1])
