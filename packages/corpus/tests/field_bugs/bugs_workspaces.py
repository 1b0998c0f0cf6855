"""Workspaces, counters, and memory that is kept or too small."""

from __future__ import annotations

import torch
from parents_latent import Latent, mla_capabilities
from parents_launchers import Known, wide
from parents_sparse import OfMode
from parents_split_kv import SplitKV
from plain_backends import FP8, SPEC, Tiled, WithLse, declared
from plain_splits import WithKVSplits

from attn_testkit.contract import LogSumExp, Sparse
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.sparse import SparseParent


class Counted(SplitKV):
    """Of a request with one row, the last split to arrive merges them: a counter says so, and is zero again."""

    capabilities = declared(
        "decode", "extend", "target-verify", "draft-extend", "draft-decode", bounds={"max_draft_branches": 2}
    )

    def reserve(self):
        super().reserve()
        self.arrived = torch.zeros(self.most, device=self.context.device)

    def finish(self, out, rows):
        if rows.plan.max_q_len > 1 or len(out) > self.most:
            return out
        arrived = self.arrived[: len(out)]
        arrived += self.SPLITS
        last = arrived == self.SPLITS
        arrived.masked_fill_(last, 0)
        return torch.where(last[:, None, None], out, torch.empty_like(out))


@bug(
    1,
    "vLLM #40655",
    "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-negative-b6prod-multi_mode",
    "addresses-stable",
    execution="graph",
)
class ScratchOfTheClass(Tiled):
    """The scratch memory is the class's, and replaced when another instance has another shape."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}})
    scratch = None

    def weigh(self, p, v):
        acc = super().weigh(p, v)
        if len(acc) > self.context.max_num_tokens:
            return acc
        kind, shape = type(self), (self.context.max_num_tokens, *acc.shape[1:])
        if kind.scratch is None or kind.scratch.shape != shape:
            kind.scratch = torch.empty(shape, device=acc.device)
        kind.scratch[: len(acc)].copy_(acc)
        return kind.scratch[: len(acc)]


@bug(
    1,
    "sglang #28559",
    "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-negative-b6prod-multi_mode",
    "steps-independent",
)
class LastInstanceDecides(Tiled):
    """The constructor writes a setting of the process: all instances read that of the last one."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}})
    group = 0

    def __init__(self, context):
        super().__init__(context)
        type(self).group = context.layers[0].q_per_kv

    def kv_head(self, layer, device):
        return (torch.arange(layer.tp_q_head_num, device=device) // self.group).clamp(max=layer.tp_k_head_num - 1)


@bug(
    2,
    "vLLM #45844",
    "extend-gqa2x2-d64-bf16-p1-k0.1.8-n6a9.7.1-chunks3-reversed-rising_logits-b3prod",
    "finite",
    execution="graph",
)
class ScratchOfOutputWidth(Tiled):
    """Scratch for partial sums is counted in bytes of the output, and they are floats: full steps reach statistics."""

    SHORT = 2
    capabilities = declared("decode", "extend")

    def __init__(self, context):
        super().__init__(context)
        layer = context.layers[0]
        splits = -(-context.max_context_len // self.TILE)
        self.most = max(context.max_bs, context.max_num_tokens) * layer.tp_q_head_num * splits
        self.room = self.most * layer.v_head_dim // self.SHORT
        self.scratch = torch.zeros((self.most + 1) * (layer.v_head_dim + 2), device=context.device)

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        dim, used = parts.acc.shape[-1], ~torch.isinf(parts.peak)
        if used.numel() > self.most:
            return parts
        item = torch.where(used.flatten(), used.flatten().long().cumsum(0) - 1, self.most - 1)
        at_acc = (item[:, None] * dim + torch.arange(dim, device=item.device)).flatten()
        at_peak = self.room + 2 * item
        self.scratch[at_peak], self.scratch[at_peak + 1] = parts.peak.flatten(), parts.weight.flatten()
        self.scratch[at_acc] = parts.acc.flatten()
        peak = self.scratch[at_peak].view(parts.peak.shape).masked_fill(~used, -torch.inf)
        weight = self.scratch[at_peak + 1].view(parts.peak.shape).masked_fill(~used, 0.0)
        acc = self.scratch[at_acc].view(parts.acc.shape).masked_fill(~used[..., None], 0.0)
        return parts._replace(peak=peak, weight=weight, acc=acc)


@bug(
    2,
    "vLLM #50194",
    "extend-gqa2x2-d64-bf16-p1-k1-n20a20-contiguous-gauss-kvfp8e4m3-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k15.16.17-n7a19.1x2-chunks3-interleaved-negative-kvfp8e4m3-b3prod",
)
class Fp8TilesBeyondScratch(Tiled):
    """With an FP8 pool a tile has 32 rows, and its scratch has room for 16."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": {"same", "fp8_e4m3"}})

    def finish(self, out, rows):
        if self.context.kv_pool.dtype.itemsize > 1 or rows.plan.max_q_len == 1:
            return out
        row = torch.arange(len(out), device=out.device)
        return out[torch.where(rows.place % 32 >= 16, row - 16, row).clamp(min=0)]


@bug(
    2,
    "tokenspeed #1185",
    "decode-mla128-d512r64-bf16-p16-k20-interleaved-gauss-layers1from0-lsepages2merged-b1prod",
    "completes",
    of_a_tier="decode-mla128-d512r64-bf16-p16-k130.5.40-shared-gauss-lsepages2merged-b4prod",
)
class MergeLaunchOverCap(WithKVSplits):
    """The merge has a thread for each head and lane in one block, which takes 1024."""

    capabilities = declared(
        "decode",
        heads={"families": {"mla"}, "gqa_ratios": {16, 128}, "head_dims": {512}},
        kv_pool={"page_sizes": {16}},
        lse=LogSumExp(base="e", pages={"decode"}, merges=True),
    )

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        if out_a.shape[1] * 32 > 1024:
            raise RuntimeError("merge_state launch failed: invalid argument")
        return super().merge_state(out_a, lse_a, out_b, lse_b)


@bug(
    2,
    "vLLM #50781",
    "extend-gqa2x32-d64-bf16-p1-k3-n4a4-interleaved-gauss-layers1from0-lsewhole-b1prod",
    "completes",
    of_a_tier="extend-gqa2x32-d64-bf16-p1-k70.5.40-n36a70.1.35-reversed-gauss-lsewhole-b3prod",
)
class StatsBeyondWorkspace(WithLse):
    """Statistics of returned log-sum-exps come from a workspace of fixed size, 1000 times smaller here."""

    def run_return_lse(self, q, kv, plan):
        if q.shape[0] * q.shape[1] * 8 * 256 > 413_138:
            raise RuntimeError("Buffer overflow when allocating memory for the softmax statistics")
        return super().run_return_lse(q, kv, plan)


@bug(
    3,
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


@bug(4, "flashinfer #1046", "extend-gqa2x2-d64-bf16-p64-k7x2-n34a1.67-interleaved-rising_logits-b3prod", "finite")
class UninitialisedTail(Known):
    """Rows of the last V tile hold what was there before, times weight 0."""

    capabilities = wide("decode", "extend")

    def parts(self, scores, seen, v, rows):
        if self.extends():
            index = torch.arange(seen.shape[1], device=seen.device)
            end = (rows.kv_lens + self.TILE - 1) // self.TILE * self.TILE
            tail = (index >= rows.kv_lens[:, None]) & (index < end[:, None])
            v = torch.where(tail[:, :, None, None], torch.empty_like(v), v)
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            seen = seen | tail
        return super().parts(scores, seen, v, rows)


@bug(4, "mirage #709", "extend-gqa2x2-d64-bf16-p64-k7x2-n34a1.67-interleaved-rising_logits-b3prod")
class MaxTokensEight(Known):
    """A task has 8 tokens, however large the batch is."""

    capabilities = wide("decode", "extend")

    def finish(self, out, rows):
        return torch.where((rows.place < 8)[:, None, None], out, 0.0) if self.extends() else out


@bug(
    5,
    "FastDeploy #8043",
    "decode-gqa2x4-d128-fp16-p4-k15.22.6-contiguous-gauss-kvfp8e4m3-w7-cap1.5-"
    "sink-layers3from5groupsby8x4d64.8x2d128-b4prod",
    "completes",
    execution="graph",
)
class PerLayerHeads(SplitKV):
    """Memory that layers share is as large as the layers with the most KV heads need it."""

    def row_size(self):
        layers = self.context.layers
        most = max(layer.tp_k_head_num for layer in layers)
        return max(layer.tp_q_head_num * layer.v_head_dim for layer in layers if layer.tp_k_head_num == most)


@bug(5, "flashinfer #2002", "decode-mqa4-d64-bf16-p1-k9.70.1.33.9.70.1.33-shuffled-gauss-b8prod", "output-written")
class CounterUninit(SplitKV):
    """Counters of the splits that have arrived lie in memory that nobody cleared."""

    def reserve(self):
        super().reserve()
        self.arrived = torch.empty(self.most, dtype=torch.int32, device=self.context.device)

    def finish(self, out, rows):
        arrived = self.arrived[: len(out)] if len(out) <= self.most else self.arrived.new_empty(len(out))
        arrived += self.SPLITS
        last = arrived == self.SPLITS
        arrived.masked_fill_(last, 0)
        return torch.where(last[:, None, None], out, torch.empty_like(out))


@bug(
    6,
    "vllm #41656",
    "target-verify-gqa2x4-d128-bf16-p4-k15.22.6-chain2-reversed-gauss-layers3from5by4x2d64.8x4d128-b4prod",
    "completes",
)
class MidBufferOfModel(SplitKV):
    """Partial results have room for the first layer's heads and head dim, where layers differ."""

    def row_size(self):
        layer = self.context.layers[0]
        return layer.tp_q_head_num * layer.v_head_dim


@bug(
    6, "flashinfer #3474", "draft-decode-gqa2x2-d64-bf16-p1-k2x2.1-topk1steps3-loop6-reversed-gauss-b4prod", "lossless"
)
class CounterDirty(Counted):
    """Counters of decode lie at the head of a workspace, where an extend has its partial results."""

    def reserve(self):
        super().reserve()
        self.workspace = torch.zeros_like(self.outs)
        self.arrived = self.workspace[: self.most]

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        if rows.plan.max_q_len > 1 and len(scores) <= self.most:
            self.workspace[: parts.acc.numel()].copy_(parts.acc.flatten())
        return parts


@bug(
    14,
    "vllm #51252",
    "extend-mqa4-d128-bf16-p16-k0.1.16-n1a1x3-shared-one_hot-sel16-idx4reuse-b6small",
    "selects-best",
    execution="graph",
)
class WorkspaceTooSmall(OfMode):
    """A prefill gathers index keys of all requests into a workspace of one context; those behind it are not written."""

    def gathered(self, slots, layer_id):
        keys, scales = super().gathered(slots, layer_id)
        if not self.extends():
            return keys, scales
        lens = self._kit_step.kv_lens.long()
        start = (lens.cumsum(0) - lens)[self.requests]
        place = start[:, None] + torch.arange(slots.shape[1], device=slots.device)
        lost = place >= self.context.max_context_len
        return keys.masked_fill(lost[..., None], 0.0), scales.masked_fill(lost, 0.0)

    def scored(self, q, weights, plan):
        self.requests = self.request_of_row(q, plan)
        return super().scored(q, weights, plan)


@bug(
    15,
    "vllm #57388",
    "decode-mqa4-d64-bf16-p16-k32.128.64.16.63-shared-one_hot-sel16-b6prod-multi_mode",
    "buckets-independent",
    execution="graph",
)
class WorkspaceOfBoth(SparseParent):
    """An eager prefill uses the workspace in which the decode graph keeps what it made before its capture."""

    capabilities = SparseParent.capabilities.with_changes(
        eager={"decode", "extend"}, graph={"decode"}, sparse=Sparse(topk={16, 64})
    )
    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.workspace = torch.arange(max(self.capabilities.sparse.topk), device=self.context.device)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.prefill = batch.forward_mode == "extend"
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False

    def prepared(self, selected, plan):
        if self.eager:
            if self.prefill and hasattr(self, "workspace"):
                some = selected.flatten()[: len(self.workspace)]
                self.workspace[: len(some)].copy_(some)
            return selected
        order = self.workspace[: selected.shape[1]].clamp(0, selected.shape[1] - 1)
        return selected[:, order]
