"""Bugs of the third set about plans, and about state that is kept."""

from __future__ import annotations

import torch
from plain_backends import Planned, WithoutCausalMask
from third_parents import FP8, SPEC, Latent, Owned, mla_capabilities, wide_capabilities

from attn_testkit_corpus.faults.catalogue import bug


@bug("flashinfer #5176", "decode-gqa2x2-d64-bf16-p1-k0.1.8-interleaved-gauss-b3prod", "completes", execution="graph")
class ExtraBlocksReadOldPlan(Owned):
    """A graph launches more blocks than the plan has, and the surplus works by what an earlier plan left."""

    nothing = 0

    def clear(self, bs):
        pass


@bug(
    "flashinfer #2185",
    "decode-gqa2x2-d64-bf16-p1-k0.1.8-interleaved-gauss-b3prod",
    "replay-follows-batch",
    execution="graph",
)
class IndicesNotCopiedForGraphs(Planned):
    """With graphs the page indices are checked and never copied."""

    capabilities = wide_capabilities("decode", graph=("decode",), needs={"cpu_seq_lens": True})

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        bs, buffers = batch.batch_size, self.buffers
        indptr, indices, lens = self.lists(batch)
        if len(indices) > len(buffers["indices"]):
            raise ValueError("more indices than the buffer has room for")
        self.bind(indptr, in_capture)
        buffers["lens"][:bs].copy_(lens)
        if in_capture:
            self.planned = {**buffers, "indptr": buffers["indptr"][: bs + 1], "lens": buffers["lens"][:bs]}
            self.longest = self.context.max_context_len


@bug(
    "flashinfer #726",
    "decode-mha2-d64-bf16-p16-k14.15.16.17.18.19.20.21.22.23.24.25.26.27.28.29-shuffled-gauss-b30prod",
    "completes",
    execution="graph",
)
class ZeroLengthsCountedOnce(Planned):
    """Searching the chunk size, lengths of 0 count nothing; splitting, they count one chunk."""

    capabilities = wide_capabilities("decode", graph=("decode",), needs={"cpu_seq_lens": True})

    def get_cuda_graph_seq_len_fill_value(self):
        return 0

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        bs, size = batch.batch_size, self.context.page_size
        pages = [-(-int(n) // size) for n in batch.seq_lens_cpu[:bs].tolist()]
        most, chunk = max(8, bs), 1
        while sum(-(-n // chunk) for n in pages) > most:
            chunk += 1
        if sum(max(1, -(-n // chunk)) for n in pages) > most:
            raise RuntimeError("new batch size should not exceed padded batch size")

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        return torch.nan_to_num(super().forward(q, k, v, layer, batch, save_kv_cache))


@bug(
    "aiter #1606",
    "draft-extend-v2-mla128-d512r64-bf16-p64-k140-n4a3-contiguous-gauss-layers1from0-b1nan",
    of_a_tier="draft-extend-v2-mla128-d512r64-bf16-p64-k63.64.65-n4a4.1.4-shared-gauss-b4small",
)
class WorkInfoTooSmall(Latent):
    """Work items are rows by splits, and the list has room for requests alone: the surplus is dropped."""

    capabilities = mla_capabilities(*SPEC, heads={"gqa_ratios": {16, 128}}, kv_pool={"kv_dtypes": FP8})

    def visible(self, index, rows):
        seen, tiles_q = super().visible(index, rows), rows.plan.max_q_len
        if rows.layer.tp_q_head_num < 128 or tiles_q == 1:
            return seen
        lens = rows.plan.kv_lens.long()
        tiles = (lens + self.TILE - 1) // self.TILE
        each = ((tiles.sum() + 7) // 8).clamp(min=1)
        pieces = (tiles + each - 1) // each
        begin = (pieces.cumsum(0) - pieces) * tiles_q
        item = (begin[rows.request] + rows.place * pieces[rows.request])[:, None] + index // self.TILE // each
        return seen & (item < len(lens) * tiles_q + 7)


@bug(
    "vLLM #51011",
    "target-verify-mla16-d512r64-bf16-p1-k21.3.0.8.9.33.1.17.5-chain7-contiguous-shifted-kvfp8e4m3-b9prod",
    "completes",
)
class WidthNotInTheTable(Latent):
    """FP8 kernels are looked up by the number of rows: some have none."""

    capabilities = mla_capabilities(*SPEC, kv_pool={"kv_dtypes": FP8})
    WIDTHS = (1, 2, 4)

    def run(self, q, kv, plan):
        if self.context.kv_pool.dtype.itemsize == 1 and plan.max_q_len not in self.WIDTHS:
            raise KeyError(plan.max_q_len)
        return super().run(q, kv, plan)


@bug(
    "vLLM #48167",
    "extend-mha2-d64-bf16-p16-k9.530.70.0-n8a20.1.3.7-interleaved-gauss-b4prod-noncausal",
    "addresses-stable",
    execution="graph",
)
class NonCausalPlanIsFresh(WithoutCausalMask):
    """Non-causal plans are made of new tensors, which a graph does not know."""

    capabilities = wide_capabilities(
        "extend", "target-verify", "decode", options={"non_causal": {"extend", "target-verify"}}
    )

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        bs = batch.batch_size
        if bs and not self.context.causal:
            more = self.context.num_draft_tokens if batch.forward_mode.is_target_verify() else 0
            self.fresh = batch.seq_lens[:bs].long() + more

    def visible(self, index, rows):
        if rows.layer.causal:
            return super().visible(index, rows)
        return index < self.fresh[rows.request][:, None]
