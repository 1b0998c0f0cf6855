"""Backends with a Triton kernel whose launch has more programs than the batch has requests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch
from attn_testkit_corpus.faults.dense import DenseBackend


@triton.jit
def clear_rows_without_keys(OUT, LENS, STARTS, requests, width, D: tl.constexpr, GUARDED: tl.constexpr):
    request = tl.program_id(0)
    if GUARDED & (request >= requests):
        return
    if tl.load(LENS + request) == 0:
        at, there = tl.load(STARTS + request) * width + tl.arange(0, D), tl.arange(0, D) < width
        tl.store(OUT + at, tl.zeros([D], OUT.dtype.element_ty), mask=there)


class GridOfTheBuffer(DenseBackend):
    """Rows without keys are cleared by a program per entry of a buffer of lengths, which is longer than the batch."""

    guarded = False

    @override
    def forward(self, q, k, v, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool = True) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache).contiguous()
        requests, width = len(self.kv_lens), out[0].numel()
        lens, starts = (torch.nn.functional.pad(each, (0, requests)) for each in (self.kv_lens, self.starts))
        starts[requests:] = self.starts
        block = triton.next_power_of_2(width)
        clear_rows_without_keys[(2 * requests,)](out, lens, starts, requests, width, D=block, GUARDED=self.guarded)
        return out


class GuardedGridAndAWrongScale(GridOfTheBuffer):
    """The launch is as large, its programs know the number of requests, and logits are wrong."""

    guarded = True

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys, layer) * 1.5


class GuardedGrid(GridOfTheBuffer):
    """The launch is as large, and its programs know the number of requests."""

    guarded = True
