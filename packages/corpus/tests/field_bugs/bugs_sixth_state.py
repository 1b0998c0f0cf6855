"""What is planned and kept; bugs of the sixth set."""

from __future__ import annotations

from dataclasses import replace

import torch
from fifth_parents_varlen import Varlen
from fifth_parents_wrapper import HostPlanned
from plain_backends import Tiled
from sixth_parents import Counted, FullMask, Pinned
from third_parents import Latent, mla_capabilities, wide_capabilities

from attn_testkit_corpus.faults.catalogue import bug


def _of(*modes):
    """Of what ``Varlen`` declares, some modes."""
    few = set(modes)
    return Varlen.capabilities.with_changes(
        eager=few, graph=few, windows=few, server={"verify_lens": {"prefix"}, "takes_bare_chains": False}
    )


@bug(
    "sglang #33127",
    "target-verify-gqa2x2-d64-bf16-p16-k0.1.16-t0.1.0.3.0.5.1-shuffled-one_hot-b3prod",
    "output-contract",
    execution="graph",
)
class MaskFitsAlways(FullMask):
    """A mask buffer for the requests of graphs says that it fits every batch."""

    def most_requests(self, max_bs):
        return 4 * max(max_bs, self.context.max_bs)


@bug(
    "vllm #32799",
    "decode-mha2-d64-bf16-p8-k9.70.1.33-shuffled-gauss-b5prod-overlap_scheduling",
    "completes",
    execution="graph",
)
class PinnedReused(Pinned):
    """Each plan is written into the same pinned memory, though the copy of the one before may not be done."""

    def __init__(self, context):
        super().__init__(context)
        self.kept_pinned = {}

    def pinned(self, name, count):
        if name not in self.kept_pinned:
            pages = -(-self.context.max_context_len // self.context.page_size)
            self.kept_pinned[name] = super().pinned(name, self.context.max_bs * pages + 1)
        return self.kept_pinned[name][:count]


@bug(
    "phyai #5",
    "decode-gqa8x2-d256-bf16-p1-k13-interleaved-rising_logits-w46-b1prod-overlap_scheduling",
    "addresses-stable",
    execution="graph",
)
class PlanNotIntoBuffers(HostPlanned):
    """A plan makes new tensors, and leaves the buffers that the graph reads as they were."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if in_capture:
            super().init_forward_metadata_out_graph(batch, in_capture)
        else:
            self.active = self.plan(batch)


@bug(
    "vllm #13922",
    "decode-mha2-d128-bf16-p64-k3.133.33.17-reversed-gauss-kvfp8e4m3-w0-cap1.5-sink-b4prod",
    "writes-own-kv",
    execution="graph",
)
class SlotMapShort(Varlen):
    """The cache writer stores as many rows as K has, and in a padded graph there are fewer slots than that."""

    capabilities = _of("decode")
    in_graph = False

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.new_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.context.device)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.in_graph = False

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.in_graph = True
        self.new_slots[: len(batch.out_cache_loc)].copy_(batch.out_cache_loc)

    def write(self, layer, batch, k, v):
        slots = self.new_slots[: len(k)] if self.in_graph else batch.out_cache_loc
        self.context.kv_pool.set_kv_buffer(layer, slots, k, v)


@bug(
    "flashinfer #919",
    "draft-extend-mqa4-d64-bf16-p16-k14.15.16.17.18.19.20.21.22.23.24.25.26.27.28.29-n2a2x16-shuffled-gauss-b30prod",
    "writes-own-kv",
    execution="graph",
)
class AppendArbitraryTail(Varlen):
    """Rows behind a graph's last token are appended by whatever request and position are there: the first, and 0."""

    capabilities = _of("extend", "draft-extend")

    def write(self, layer, batch, k, v):
        row = torch.arange(len(k), device=k.device)
        first = self.meta.table[0, 0].long() * self.context.page_size
        slots = torch.where(row < self.meta.cu[-1], batch.out_cache_loc, first)
        self.context.kv_pool.set_kv_buffer(layer, slots, k, v)


@bug(
    "flashinfer #2511",
    "decode-mha2-d128-bf16-p64-k3.133.33.17-reversed-gauss-kvfp8e4m3-w0-cap1.5-sink-b4prod",
    "addresses-stable",
    execution="graph",
)
class BlockTableRebuilt(Varlen):
    """Each plan makes a new padded table of blocks, and the graph reads that of its capture."""

    capabilities = _of("decode")

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.meta.table = self.block_table(batch)


@bug(
    "flashinfer #411",
    "extend-mha2-d64-fp16-p16-k3.37.9.17-n6a19.1x3-chunks3-shared-shifted-w46-b7small",
    "replay-follows-batch",
    execution="graph",
)
class GridOfCapture(Varlen):
    """A graph has as many tiles of 16 rows as its capture had: a replay with more loses the last ones."""

    capabilities = _of("extend").with_changes(server={"takes_empty_batches": False})
    tiles = None

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.tiles = None

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            self.tiles = sum(-(-n // 16) for n in batch.extend_seq_lens_cpu)

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        if self.tiles is None:
            return out
        request, place, _ = self.rows(len(q), self.meta)
        tiles = (self.meta.cu.diff() + 15) // 16
        tile = (tiles.cumsum(0) - tiles)[request] + place // 16
        return torch.where((tile < self.tiles)[:, None, None], out, torch.empty_like(out))


@bug(
    "sglang #25824",
    "decode-gqa2x2-d64-bf16-p16-k6-shared-gauss-w7-layers2from0groups-b1prod",
    "writes-own-kv",
    execution="graph",
    of_a_tier="decode-gqa4x2-d128-bf16-p16-k39.70.6-contiguous-gauss-w7-layers3from5groups-b4prod",
)
class MemoizedLoc(Tiled):
    """Slots of the windowed pool are kept by address and size of the full pool's, which are the same at each replay."""

    capabilities = wide_capabilities("decode", kv_pool={"kv_groups": True}, windows={"decode"})
    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.memo = {}
        self.new_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.context.device)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False
        for group in self.context.kv_groups[1:]:
            key = batch.out_cache_loc.data_ptr(), batch.out_cache_loc.numel()
            slots = self.memo.setdefault(key, group.cache_loc(batch).clone())
            self.new_slots.zero_()
            self.new_slots[: len(slots)].copy_(slots)

    def write_kv(self, k, v, plan):
        if self.context.group_of(plan.layer).index and not self.eager:
            plan = replace(plan, out_cache_loc=self.new_slots[: len(k)])
        super().write_kv(k, v, plan)


@bug(
    "sglang #9675",
    "decode-mla16-d512r64-bf16-p32-k2080-shuffled-one_hot-layers1from0-b1prod",
    "replay-follows-batch",
    execution="graph",
    of_a_tier="decode-mla16-d512r64-bf16-p32-k4096-reversed-one_hot-b1prod",
)
class BlocksOfCurrentMax(Latent):
    """A graph's table of blocks is as wide as its capture needs, in runs of 64 pages."""

    capabilities = mla_capabilities("decode", kv_pool={"page_sizes": {32, 64}}, bounds={"max_context_len": 4160})
    columns = None

    def init_forward_metadata(self, batch):
        self.columns = None
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            longest, run = self.get_cuda_graph_seq_len_fill_value(), 64 * self.context.page_size
            self.columns = -(-longest // run) * run

    def slots(self, plan):
        return super().slots(plan)[:, : self.columns]


@bug(
    "rtp-llm #1259",
    "draft-extend-mqa4-d64-bf16-p16-k14.15.16.17.18.19.20.21.22.23.24.25.26.27.28.29-n2a2x16-shuffled-gauss-b30prod",
    "addresses-stable",
    execution="graph",
)
class CuSeqReallocated(Varlen):
    """Where rows begin is allocated anew at a replay, and the graph reads the old one."""

    capabilities = _of("extend", "draft-extend")

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if not in_capture:
            self.kept.cu = self.kept.cu.clone()
            for meta in self.graphs.values():
                meta.cu = self.kept.cu[: len(meta.cu)]


@bug("flashinfer #3474", "draft-decode-gqa2x2-d64-bf16-p1-k2x2.1-topk1steps3-loop6-reversed-gauss-b4prod", "lossless")
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
