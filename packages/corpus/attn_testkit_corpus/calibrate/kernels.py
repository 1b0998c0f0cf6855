"""Snippets: Triton launches. Needs triton; on a machine without a GPU, TRITON_INTERPRET=1 before it is imported."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .inputs import DEVICE, Inputs
from .snippet import Snippet, named


@triton.jit
def scale_add(out, x, factor, n, BLOCK: tl.constexpr):
    """Store `x * factor + 1` for the first `n` elements, BLOCK of them per program; float32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0.0) * factor + 1.0, mask=at < n)


@triton.jit
def page_slots(table, lens, out, stride, width, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Row r of `out` (rows, width): the slots of the first lens[r] positions, by row r of `table`."""
    row = tl.program_id(0)
    length = tl.load(lens + row)
    for start in range(tl.cdiv(length, BLOCK)):
        at = start * BLOCK + tl.arange(0, BLOCK)
        page = tl.load(table + row * stride + at // PAGE, mask=at < length, other=0)
        tl.store(out + row * width + at, page * PAGE + at % PAGE, mask=at < length)


def _launch(e: Inputs, factor: float = 2.0, n: int = 8) -> Tensor:
    out = torch.zeros(8, device=DEVICE)
    scale_add[(2,)](out, e.x, factor, n, BLOCK=4)
    return out


def _launch_grid_function(e: Inputs) -> Tensor:
    out = torch.zeros(8, device=DEVICE)
    scale_add[lambda meta: (triton.cdiv(8, meta["BLOCK"]),)](out, e.x, 2.0, 8, BLOCK=4)
    return out


def _launch_grid_from_host(e: Inputs) -> Tensor:
    out = torch.zeros(8, device=DEVICE)
    scale_add[(triton.cdiv(e.py, 4),)](out, e.x, 2.0, 8, BLOCK=4)
    return out


def _launch_between_torch(e: Inputs) -> Tensor:
    e.buf.copy_(e.x).mul_(2)
    scale_add[(2,)](e.buf, e.buf, 3.0, 8, BLOCK=4)
    return e.buf * 10


def _launch_indices(e: Inputs) -> Tensor:
    out = torch.zeros(4, 12, dtype=torch.int32, device=DEVICE)
    page_slots[(4,)](e.table, e.seq, out, e.table.stride(0), 12, PAGE=4, BLOCK=4)
    return out


def _launch_host_pointer(e: Inputs) -> Tensor:
    out = torch.zeros(8, device=DEVICE)
    scale_add[(2,)](out, e.h_x, 2.0, 8, BLOCK=4)
    return out


def _launch_pinned_pointer(e: Inputs) -> Tensor:
    out = torch.zeros(8, device=DEVICE)
    scale_add[(2,)](out, e.p_x, 2.0, 8, BLOCK=4)
    return out


SNIPPETS: tuple[Snippet, ...] = named(
    {
        "triton: launch": _launch,
        "triton: grid function": _launch_grid_function,
        "triton: grid from host": _launch_grid_from_host,
        "triton: float baked": lambda e: _launch(e, factor=float(e.py)),
        "triton: int baked": lambda e: _launch(e, n=e.py),
        "triton: .item() argument": lambda e: _launch(e, n=int(e.i)),
        "triton: dev0d pointer": lambda e: _launch(e, factor=2.0) * e.scalar,
        "triton: between torch ops": _launch_between_torch,
        "triton: kv indices": _launch_indices,
        "triton: host pointer": _launch_host_pointer,
        "triton: pinned pointer": _launch_pinned_pointer,
    }
)
