"""Launches, labelled by what an H100 does with them. ``python target_programs.py`` measures them on a device.

It prints a line of JSON for each: the device's error, or shared memory, registers and stack. ``targets_h100.json`` has
what one H100 said (torch 2.11, Triton 3.6).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

SCALE = 3


@triton.jit
def product(a, b, out, K, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    total = tl.zeros([M, N], tl.float32)
    for first in range(0, K, STEP):
        x = tl.load(a + m[:, None] * K + first + k[None, :])
        total = tl.dot(x, tl.load(b + (first + k[:, None]) * N + n[None, :]), total)
    tl.store(out + m[:, None] * N + n[None, :], total)


@triton.jit
def scale(x, out, n, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0.0) * 2, mask=at < n)


@triton.jit
def soft_max(x, out, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    value = tl.load(x + at)
    value = tl.exp(value - tl.max(value, 0))
    tl.store(out + at, value / tl.sum(value, 0))


@triton.jit
def sorted_tile(x, out, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out + at, tl.sort(tl.load(x + at)))


@triton.jit
def outer(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(x + m)[:, None] * tl.load(x + n)[None, :]
    tl.store(out + m, tl.sum(tile, 1))


@triton.jit
def turned(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(out + n[:, None] * M + m[None, :], tl.trans(tile))


@triton.jit
def uses_a_global(x, out, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out + at, tl.load(x + at) * SCALE)


@triton.jit
def two_types(x, out, n, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    if n > 3:
        value = tl.load(x + at)
    else:
        value = tl.zeros([TILE], tl.int32)
    tl.store(out + at, value)


@triton.jit
def leaves_a_loop(x, out, n):
    for i in range(n):
        if tl.load(x + i) > 0:
            return
        tl.store(out + i, 1.0)


@triton.jit
def makes_a_list(x, out, n):
    parts = [tl.load(x + i) for i in range(n)]
    tl.store(out, parts[0])


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the device."""
    return torch.ones(*shape, device="cuda").to(dtype)


@dataclass(frozen=True)
class Launch:
    """A launch. ``refused``: an H100 does not run it."""

    name: str
    kernel: Any
    arguments: Callable[[], tuple[Any, ...]]
    options: tuple[tuple[str, Any], ...] = ()
    refused: bool = False


def _product(m: int, n: int, step: int, dtype: torch.dtype = torch.float16, other: torch.dtype | None = None) -> Any:
    return lambda: (
        (ones(m, 4 * step, dtype=dtype), ones(4 * step, n, dtype=other or dtype), ones(m, n), 4 * step, m, n, step)
    )


def _tile(count: int) -> Any:
    return lambda: (ones(3 * count), ones(count), count)


LAUNCHES = (
    Launch("product of one warp group", product, _product(64, 64, 32)),
    Launch("product of three stages", product, _product(128, 128, 64), (("num_stages", 3), ("num_warps", 8))),
    Launch("product of four stages", product, _product(128, 256, 64), (("num_stages", 4), ("num_warps", 8))),
    Launch("product of six stages", product, _product(128, 256, 64), (("num_stages", 6), ("num_warps", 8)), True),
    Launch("float32 in one stage", product, _product(128, 128, 64, torch.float32), (("num_stages", 1),)),
    Launch("float32 in five", product, _product(128, 128, 64, torch.float32), (("num_stages", 5),), True),
    Launch("float8", product, _product(64, 64, 64, torch.float8_e4m3fn), (("num_stages", 2),)),
    Launch("eight keys", product, _product(64, 64, 8), refused=True),
    Launch("two dtypes", product, _product(64, 64, 32, torch.float16, torch.float32), refused=True),
    Launch("tile whose size is not a power of two", scale, lambda: (ones(96), ones(96), 96, 48), refused=True),
    Launch("plain tile", scale, lambda: (*_tile(1024)(), 1024)),
    Launch("three warps", scale, lambda: (*_tile(1024)(), 1024), (("num_warps", 3),), True),
    Launch("64 warps", scale, lambda: (*_tile(1024)(), 1024), (("num_warps", 64),), True),
    Launch("softmax", soft_max, lambda: (ones(4096), ones(4096), 4096)),
    Launch("sort", sorted_tile, lambda: (ones(1024), ones(1024), 1024)),
    Launch("more numbers than a tensor may have", outer, lambda: (ones(2048), ones(2048), 2048, 1024), refused=True),
    Launch("transposed", turned, lambda: (ones(128, 64), ones(64, 128), 128, 64)),
    Launch("transposed with spills", turned, lambda: (ones(512, 256), ones(256, 512), 512, 256)),
    Launch("global variable", uses_a_global, lambda: (ones(64), ones(64), 64), refused=True),
    Launch("two types in one name", two_types, lambda: (ones(64), ones(64), 5, 64), refused=True),
    Launch("return in a loop", leaves_a_loop, lambda: (ones(8), ones(8), 8), refused=True),
    Launch("list of tensors", makes_a_list, lambda: (ones(8), ones(8), 8), refused=True),
    Launch("registers that are limited", scale, lambda: (*_tile(4096)(), 4096), (("maxnreg", 24),)),
)


def measured(launch: Launch) -> dict[str, Any]:
    """The registers and shared memory of a launch on this device, or its refusal."""
    try:
        made = launch.kernel[(1,)](*launch.arguments(), **dict(launch.options))
        torch.cuda.synchronize()
    except Exception as error:  # Triton's classes, and the driver's
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"name": launch.name, "refused": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
    return {
        "name": launch.name, "refused": "", "shared": made.metadata.shared, "registers": made.n_regs,
        "spills": made.n_spills, "uses": [word for word in ("wgmma", "tcgen05") if word in made.asm["ptx"]],
    }  # fmt: skip


if __name__ == "__main__":
    for each in LAUNCHES:
        if not sys.argv[1:] or each.name in sys.argv[1:]:
            print(json.dumps(measured(each)), flush=True)
