"""Bugs of the fifth set that slipped through its first runs, with cases that there were not then."""

from __future__ import annotations

import torch
from fifth_parents_varlen import Varlen
from fifth_parents_wrapper import HostPlanned
from plain_splits import WithKVSplits
from third_parents import FP8, Latent, mla_capabilities

from attn_testkit_corpus.faults.catalogue import bug


@bug("vllm #46952", "decode-mla32-d512r64-bf16-p16-k70.33.1-shuffled-gauss-kvfp8e4m3-layers1from0-b3prod")
class FoldedHeads(Latent):
    """Rows of 32 heads are folded to two of 16 with FP8, and unfolded in the wrong order."""

    capabilities = mla_capabilities(
        "decode", "target-verify", heads={"gqa_ratios": {16, 32, 64}}, kv_pool={"kv_dtypes": FP8}
    )

    def finish(self, out, rows):
        t, h, d = out.shape
        if h != 32 or self.context.kv_pool.dtype.itemsize != 1:
            return out
        return out.reshape(2, t, 16, d).transpose(0, 1).reshape(t, h, d)


@bug("vllm #39148", "decode-gqa2x2-d64-bf16-p16-k35.0.16.1.70-shared-gauss-lsepages3merged-b6prod", "log-sum-exp")
class BothEmpty(WithKVSplits):
    """Two parts without keys are merged to NaN."""

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        top = torch.maximum(lse_a, lse_b)
        a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
        out = (out_a.float() * a[..., None] + out_b.float() * b[..., None]) / (a + b)[..., None]
        return out.to(out_a.dtype), top + (a + b).log()


@bug(
    "vllm #17283",
    "decode-mqa4-d64-bf16-p16-k560.601.577.1040.561.700.563.641.624-shared-gauss-layers1from0-b9prod",
    "completes",
)
class CascadeBatch(Varlen):
    """From eight requests and 256 common keys on, the common prefix is planned for all requests, and not for one."""

    capabilities = Varlen.capabilities.with_changes(
        graph=(), eager=("decode", "extend"), windows=(), server={"eager_without_waits": False}
    )

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        if batch.batch_size < 8:
            return
        table, size = self.meta.table, self.context.page_size
        alike = (table == table[:1]).all(0).long().cumprod(0).sum()
        prefix = (self.meta.lens - self.meta.cu.diff()).min()
        if int(torch.minimum(alike, prefix // size)) * size >= 256:
            raise RuntimeError("scheduler_metadata must have shape (metadata_size)")


@bug("flashinfer #4347", "decode-mha2-d128-bf16-p256-k4737.300.33-reversed-plus_minus_one-b4prod", "keys-counted-once")
class FarPages(HostPlanned):
    """Of pages of more than 128 slots only those of the first 4096 keys, and the last, are right."""

    capabilities = HostPlanned.capabilities.with_changes(
        kv_pool={"page_sizes": {128, 256}}, bounds={"max_context_len": 16384}
    )

    def keep(self, seen, index, lens):
        size = self.context.page_size
        return seen & ((index < 4096) | (index >= (lens - 1) // size * size)) if size > 128 else seen
