"""A kernel to measure the Triton interpreter with: a lookup in a paged store, page by page, with running softmax."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BATCH, _GROUPS, _WIDTH, _PAGE, _PAGES = 4, 4, 64, 16, 4


@triton.jit
def paged_lookup(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, lens_ptr, scale, stride_q, stride_page, stride_slot, stride_table,
    WIDTH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Run a program per (row, group): `out` is the mean of the row's first `lens` values, weighted by softmax(q k
    scale).

    `q` and `out` are (rows, groups, WIDTH); `k` and `v` (pages, PAGE, groups, WIDTH); `table` names each row's pages.
    """
    row, group = tl.program_id(0), tl.program_id(1)
    channel, slot = tl.arange(0, WIDTH), tl.arange(0, PAGE)
    length = tl.load(lens_ptr + row)
    at = row * stride_q + group * WIDTH + channel
    q = tl.load(q_ptr + at).to(tl.float32) * scale
    top = -1e30
    total = 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    for page in range(tl.cdiv(length, PAGE)):
        block = tl.load(table_ptr + row * stride_table + page).to(tl.int64)
        where = block * stride_page + slot[:, None] * stride_slot + group * WIDTH + channel[None, :]
        live = page * PAGE + slot < length
        k = tl.load(k_ptr + where, mask=live[:, None], other=0.0).to(tl.float32)
        scores = tl.where(live, tl.sum(k * q[None, :], 1), -1e30)
        new_top = tl.maximum(top, tl.max(scores, 0))
        shrink = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top)
        v = tl.load(v_ptr + where, mask=live[:, None], other=0.0).to(tl.float32)
        acc = acc * shrink + tl.sum(weights[:, None] * v, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    tl.store(out_ptr + at, acc / total)


def problem(device: str) -> tuple[Tensor, ...]:
    """(q, k, v, out, page table, lengths) on `device`: 4 rows of 64 positions, 4 groups of 64 numbers, float32."""
    torch.manual_seed(0)
    pool = (_BATCH * _PAGES + 1, _PAGE, _GROUPS, _WIDTH)
    tensors = (
        torch.randn(_BATCH, _GROUPS, _WIDTH),
        torch.randn(*pool),
        torch.randn(*pool),
        torch.zeros(_BATCH, _GROUPS, _WIDTH),
        torch.arange(1, 1 + _BATCH * _PAGES, dtype=torch.int32).view(_BATCH, _PAGES),
        torch.full((_BATCH,), _PAGE * _PAGES, dtype=torch.int32),
    )
    return tuple(tensor.to(device) for tensor in tensors)


def launch(tensors: tuple[Tensor, ...]) -> None:
    """One launch of 16 programs over 4 pages each."""
    q, k, v, out, table, lens = tensors
    paged_lookup[(_BATCH, _GROUPS)](
        q, k, v, out, table, lens, _WIDTH**-0.5, q.stride(0), k.stride(0), k.stride(1), table.stride(0),
        WIDTH=_WIDTH, PAGE=_PAGE,
    )  # fmt: skip
