"""Bugs of the twelfth set that slipped through its first runs, with cases and a choice that there were not then."""

from __future__ import annotations

import torch
from fourth_parents import Known
from plain_backends import declared
from plain_splits import WithKVSplits

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug

INF = float("inf")


@bug(
    "flashinfer #4270",
    "extend-gqa2x2-d64-bf16-p16-k3.37.9.17-n1a1x4-shared-peaked-b4prod",
    "steps-independent",
)
class StridesOfTheFirstCall(Known):
    """What is made for the shapes of a call has its strides, and serves calls of the same shapes."""

    capabilities = declared("extend", kv_pool={"page_sizes": {16}}, graph=())

    def __init__(self, context):
        super().__init__(context)
        self.made = {}

    def query(self, q, plan):
        strides = self.made.setdefault(q.shape, q.stride())
        if q.stride() == strides:
            return q
        end = q.untyped_storage().nbytes() // q.itemsize
        place = torch.full((), q.storage_offset(), device=q.device, dtype=torch.int64)
        for size, step in zip(q.shape, strides, strict=True):
            place = place[..., None] + torch.arange(size, device=q.device) * step
        return q.as_strided((end,), (1,), 0)[place.clamp(max=end - 1)]


@bug("flashinfer #5245", "extend-gqa2x2-d64-bf16-p16-k70.0.33-n1a1x3-reversed-gauss-lseprefix-b3prod", "log-sum-exp")
class LseOfTheFirstHead(WithKVSplits):
    """Where every request has one row, the first query head of a KV head alone gets its log-sum-exp."""

    capabilities = declared(
        "extend", kv_pool={"page_sizes": {16}}, lse=LogSumExp(base="e", whole={"extend"}, prefix={"extend"})
    )

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        first = torch.arange(q.shape[1], device=q.device) % plan.layer.q_per_kv == 0
        lost = (plan.cu_seqlens_q.diff() <= 1).all() & ~first
        return out, torch.where(lost, 0.0, lse)


@bug("vllm #26325", "decode-gqa2x2-d64-bf16-p16-k560.601.577.1040.561.700.563.641.624-shared-gauss-sink-b9prod")
class CascadeWithoutSinks(Known):
    """From eight requests and 256 common keys on, a cascade attends them, which is given no sinks."""

    capabilities = declared("decode", "extend", kv_pool={"page_sizes": {16}}, options={"sinks": True})

    def sink_of(self, rows):
        sinks, pages = super().sink_of(rows), rows.plan.page_table
        alike = (pages == pages[:1]).all(0).long().cumprod(0).sum() * rows.plan.page_size
        common = torch.minimum(alike, rows.plan.prefix_lens.min())
        cascades = (common >= 256) & (len(pages) >= 8)
        return torch.where(cascades, -INF, sinks)
