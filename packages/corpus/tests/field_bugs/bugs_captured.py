"""What a graph keeps of its capture, where a replay needs the present step's: lengths, slots, plans, grids."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_latent import Latent, mla_capabilities
from parents_launchers import Known, OwnSlots, wide
from parents_native import Native, changed
from parents_sparse import Given
from parents_states import Kda
from parents_varlen import Varlen, varlen_of
from parents_wrapper import HostPlanned
from plain_backends import Planned, Tiled, WithoutCausalMask, declared, wide_capabilities

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import ForwardMode, Sparse
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.sparse import SparseParent

SPLIT = 64


@bug(
    1,
    "aprender #2030",
    "decode-gqa2x2-d64-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod",
    "replay-follows-batch",
    execution="graph",
)
class KernelChosenAtCapture(Tiled):
    """The kernel is chosen by the lengths at capture, and the one for short contexts has 1,024 keys."""

    capabilities = declared("decode", needs={"cpu_seq_lens": True})
    short = False

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.short = batch.batch_size == 0 or int(batch.seq_lens_cpu[: batch.batch_size].max()) <= 1024

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        return seen & (index < 1024) if self.short else seen


@bug(
    1,
    "sglang #37975",
    "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale",
    "replay-follows-batch",
    execution="graph",
)
class IndptrOfTheGraphNotRefreshed(Planned):
    """A replay writes where each list begins into the eager buffer, not into the one that the graph reads."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.eager_indptr = torch.zeros_like(self.buffers["indptr"])

    def bind(self, indptr, in_capture):
        bound = self.buffers["indptr"] if in_capture else self.eager_indptr
        bound[: len(indptr)].copy_(indptr)


@bug(
    3,
    "xformers #968",
    "decode-mha2-d64-bf16-p16-k300-shuffled-one_hot-layers1from0-b1prod",
    "replay-follows-batch",
    execution="graph",
    of_a_tier="decode-mha2-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod",
)
class KeysOfTheCaptureInBlocks(Tiled):
    """A graph keeps the longest length of its capture, in blocks of 256 keys: replays lose keys beyond."""

    capabilities = wide_capabilities("decode", needs={"cpu_seq_lens": True})
    most = 0

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.batch_size:
            self.most = -(-int(batch.seq_lens_cpu[: batch.batch_size].max()) // 256) * 256

    def visible(self, index, rows):
        return super().visible(index, rows) & (index < max(self.most, 256))


@bug(
    3,
    "nntrainer #4317",
    "decode-gqa2x2-d64-bf16-p1-k13-reversed-rising_logits-w4-b1prod",
    "replay-follows-batch",
    execution="graph",
)
class WindowRegimeOfTheCapture(Tiled):
    """Whether the window is in force is decided at capture."""

    capabilities = wide_capabilities("decode", needs={"cpu_seq_lens": True}, windows={"decode"})
    longest = 0

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.batch_size:
            self.longest = int(batch.seq_lens_cpu[: batch.batch_size].max())

    def window_start(self, rows):
        if self.longest <= rows.layer.sliding_window_size + 1:
            return torch.zeros_like(rows.position)
        return super().window_start(rows)


@bug(
    3,
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
    3,
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


@bug(
    4,
    "sglang #27664",
    "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale",
    "addresses-stable",
    execution="graph",
)
class NewObjectsAtReplay(Planned):
    """A replay makes new metadata instead of filling those that the graph reads."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if in_capture:
            return super().init_forward_metadata_out_graph(batch, in_capture)
        indptr, indices, lens = self.lists(batch)
        self.bind(indptr, in_capture)
        self.buffers["indices"][: len(indices)].copy_(indices)
        self.planned = {**self.planned, "lens": lens.clone()}


@bug(
    5,
    "nntrainer #4317",
    "decode-gqa8x2-d128-bf16-p8-k1.2.5.9.14.2.30-reversed-gauss-w11-b8prod",
    "replay-follows-batch",
    execution="graph",
)
class RegimeAtCapture(HostPlanned):
    """Whether a window leaves out anything is decided by the lengths of the capture."""

    def at_capture(self, wrapper, longest):
        wrapper.seen_at_capture = longest

    def window(self, layer):
        longest = getattr(self.active, "seen_at_capture", self.longest)
        return layer.sliding_window_size if longest > layer.sliding_window_size + 1 else -1


@bug(
    5,
    "aprender #2030",
    "decode-mha2-d128-bf16-p8-k1025.33-shuffled-plus_minus_one-b3prod",
    "replay-follows-batch",
    execution="graph",
)
class ChunksAtCapture(HostPlanned):
    """The number of chunks of 1024 keys is the capture's."""

    def at_capture(self, wrapper, longest):
        wrapper.chunks = -(-longest // 1024)

    def keep(self, seen, index, lens):
        chunks = getattr(self.active, "chunks", None)
        return seen if chunks is None else seen & (index < chunks * 1024)


@bug(
    6,
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
    6,
    "flashinfer #2511",
    "decode-mha2-d128-bf16-p64-k3.133.33.17-reversed-gauss-kvfp8e4m3-w0-cap1.5-sink-b4prod",
    "addresses-stable",
    execution="graph",
)
class BlockTableRebuilt(Varlen):
    """Each plan makes a new padded table of blocks, and the graph reads that of its capture."""

    capabilities = varlen_of("decode")

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.meta.table = self.block_table(batch)


@bug(
    6,
    "flashinfer #411",
    "extend-mha2-d64-fp16-p16-k3.37.9.17-n6a19.1x3-chunks3-shared-shifted-w46-b7small",
    "replay-follows-batch",
    execution="graph",
)
class GridOfCapture(Varlen):
    """A graph has as many tiles of 16 rows as its capture had: a replay with more loses the last ones."""

    capabilities = varlen_of("extend").with_changes(server={"takes_empty_batches": False})
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
    6,
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
    6,
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
    6,
    "rtp-llm #1259",
    "draft-extend-mqa4-d64-bf16-p16-k14.15.16.17.18.19.20.21.22.23.24.25.26.27.28.29-n2a2x16-shuffled-gauss-b30prod",
    "addresses-stable",
    execution="graph",
)
class CuSeqReallocated(Varlen):
    """Where rows begin is allocated anew at a replay, and the graph reads the old one."""

    capabilities = varlen_of("extend", "draft-extend")

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if not in_capture:
            self.kept.cu = self.kept.cu.clone()
            for meta in self.graphs.values():
                meta.cu = self.kept.cu[: len(meta.cu)]


@bug(
    14,
    "vllm-ascend #11774",
    "decode-gqa2x2-d64-bf16-p16-k600.70.12-shuffled-mean-b3prod",
    "captures-cleanly",
    execution="graph",
)
class SlotsOfLastStepAtCapture(OwnSlots):
    """A capture does not reset the slots of new rows, and its run writes where the step before did."""

    capabilities = OwnSlots.capabilities.with_changes(eager={"decode", "extend"})

    def __init__(self, context):
        super().__init__(context)
        self.of_server = torch.zeros(context.max_num_tokens, dtype=torch.int64, device=context.device)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.new_slots = self.of_server

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        some = batch.out_cache_loc[: len(self.of_server)]
        self.of_server[: len(some)].copy_(some)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if in_capture:
            self.eager = False
        else:
            super().init_forward_metadata_out_graph(batch, in_capture)


@bug(14, "infr #38", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shared-peaked-b3prod", "steps-independent")
class TapeByFingerprint(Known):
    """A decode of the shapes and addresses of an earlier one is a replay of that one's recording."""

    capabilities = wide("decode", "extend", graph=())

    def __init__(self, context):
        super().__init__(context)
        self.tapes = {}

    def run(self, q, kv, plan):
        if not self.decodes():
            return super().run(q, kv, plan)
        key, layer = (q.shape, q.stride(), kv[0].data_ptr()), plan.layer.layer_id
        if layer not in self.tapes or self.tapes[layer][0] != key:
            step = replace(plan.step, table=plan.step.table.clone(), kv_lens=plan.step.kv_lens.clone())
            self.tapes[layer] = key, step
        return super().run(q, kv, replace(plan, step=self.tapes[layer][1]))


@bug(
    15,
    "vllm #51318",
    "decode-mla16-d128r64-bf16-p16-k7x2-reversed-gauss-sel16-layers2from5-b2prod",
    "replay-follows-batch",
    execution="graph",
)
class PackedByActiveWidth(SparseParent):
    """A plan packs rows of indices as wide as the longest row is; the graph reads them with the width at capture."""

    capabilities = SparseParent.capabilities.with_changes(
        eager={"decode", "target-verify"}, graph={"decode", "target-verify"}, sparse=Sparse(topk={16, 64})
    )
    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        most, device = max(self.capabilities.sparse.topk), self.context.device
        self.packed = torch.full((max_num_tokens * most + most,), -1, dtype=torch.int32, device=device)
        self.active = torch.zeros(1, dtype=torch.int64, device=device)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False
        most = self.context.layers[0].topk
        longest = batch.seq_lens[: batch.batch_size].max() + self.context.num_draft_tokens if batch.batch_size else 0
        self.active[0] = most if in_capture else (longest.clamp(max=most) if batch.batch_size else most)

    def prepared(self, selected, plan):
        if self.eager:
            return selected
        rows, width = selected.shape
        row, column = torch.arange(rows, device=selected.device)[:, None], torch.arange(width, device=selected.device)
        at = torch.where(column < self.active, row * self.active + column, len(self.packed) - 1)
        self.packed.index_put_((at.flatten(),), selected.flatten())
        self.packed[-1:] = -1
        there = column < (selected >= 0).sum(1, keepdim=True)
        return torch.where(there, self.packed[: rows * width].view(rows, width), -1)


@bug(
    15,
    "vLLM-2080Ti-Definitive #183",
    "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod",
    "writes-own-kv",
    execution="graph",
)
class SlotsOfCapture(OwnSlots):
    """Slots of new keys are those of the capture."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if in_capture:
            super().init_forward_metadata_out_graph(batch, in_capture)
        self.eager = False


# vllm #48167: attention that is not causal runs in a prefill wrapper which was not made for graphs.
@bug(
    16,
    "vllm #48167",
    "target-verify-gqa2x2-d64-bf16-p16-k7x2.8x29.608.8x8-chain7-reversed-"
    "negative-layers1from0-b41prod-empty_batches-noncausal-overlap_scheduling",
    "replay-follows-batch",
    execution="graph",
)
class PlanOfCapture(Native):
    """Lengths and slots of layers that are not causal are those of the capture, in tensors of that plan."""

    capabilities = wide(
        "decode", "target-verify", options={"non_causal": {"target-verify"}}, server={"takes_bare_chains": True},
    )  # fmt: skip
    frozen = None

    def __init__(self, context):
        super().__init__(context)
        self.plans = []

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.frozen = None
        if in_capture and not self.context.causal:
            bs = batch.batch_size
            table = self.context.req_to_token[batch.req_pool_indices[:bs].long()].long()
            self.frozen = table, batch.seq_lens[:bs].clone()
            self.plans.append(self.frozen)

    def init_forward_metadata(self, batch):
        self.frozen = None
        super().init_forward_metadata(batch)

    def _key_slots(self, batch, group, of_encoder):
        return self.frozen[0] if self.frozen else super()._key_slots(batch, group, of_encoder)

    def _kv_lens(self, batch, counts):
        return super()._kv_lens(changed(batch, seq_lens=self.frozen[1]) if self.frozen else batch, counts)


# InfiniLM #526: lengths of keys are host parameters of the captured kernel.
@bug(
    16,
    "InfiniLM #526",
    "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod",
    "replay-follows-batch",
    execution="graph",
)
class LengthsOfCapture(Native):
    """A replay of a decode attends as many keys as the capture had; slots are the replay's."""

    capabilities = wide("decode", "extend", graph={"decode"})

    def __init__(self, context):
        super().__init__(context)
        self.parameters = []

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            self.parameters.append(batch.seq_lens[: batch.batch_size].clone())

    def _kv_lens(self, batch, counts):
        return super()._kv_lens(batch if self.eager else changed(batch, seq_lens=self.parameters[-1]), counts)


# vllm #47404: the plan renews metadata on another stream, for which the replay does not wait. Here the copy is
# always late: it is done when the next plan is made.
@bug(
    16,
    "vllm #47404",
    "decode-mqa4-d128-bf16-p16-k15.16.17-shared-negative-sel16empty-b4prod",
    "replay-follows-batch",
    execution="graph",
)
class MetadataBehindReplay(Given):
    """A replay uses the numbers of keys of the step before."""

    capabilities = Given.capabilities.with_changes(
        eager={"decode", "target-verify"}, graph={"decode", "target-verify"}, sparse={"holes": False}
    )
    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        few = {"dtype": torch.int64, "device": self.context.device}
        self.work, self.late = torch.zeros(max_num_tokens, **few), None

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False
        if self.late is not None:
            self.work[: len(self.late)].copy_(self.late)
        lens = batch.seq_lens[: batch.batch_size].long()
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            n = self.context.num_draft_tokens
            lens = (lens[:, None] + torch.arange(1, n + 1, device=lens.device)).flatten()
        lens = lens.clamp(max=max(self.capabilities.sparse.topk))
        if in_capture:
            self.work[: len(lens)].copy_(lens)
        self.late = lens.clone()

    def prepared(self, selected, plan):
        if self.eager:
            return selected
        count = torch.nn.functional.pad(self.work[: len(selected)], (0, max(0, len(selected) - len(self.work))))
        column = torch.arange(selected.shape[1], device=selected.device)
        return torch.where(column < count[:, None], selected, -1)


# ATOM #1391: the decode graph reads the buffer of query offsets that prefills fill, and decode does not fill it again.
@bug(
    16,
    "ATOM #1391",
    "decode-mqa4-d64-bf16-p16-k32.128.64.16.63-shuffled-rising_logits-sel16holes-b6prod-multi_mode",
    "buckets-independent",
    execution="graph",
)
class OffsetsOfPrefill(Given):
    """The graph of decode takes the offsets of the last prefill for its own."""

    capabilities = Given.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})
    eager = True

    def __init__(self, context):
        super().__init__(context)
        most = max(context.max_bs, context.max_num_tokens) + 1
        self.offsets = torch.arange(most, dtype=torch.int32, device=context.device)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)
        if self.extends() and batch.batch_size:
            self.offsets[: batch.batch_size + 1].copy_(self._kit_step.cu_seqlens_q)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False
        if in_capture:
            self.offsets.copy_(torch.arange(len(self.offsets), dtype=torch.int32, device=self.offsets.device))

    def slots(self, selected, plan):
        if self.eager:
            return super().slots(selected, plan)
        row, last = torch.arange(len(selected), device=selected.device), len(plan.kv_lens) - 1
        request = torch.searchsorted(self.offsets[: last + 2], row, right=True) - 1
        return plan.slot_table[request.clamp(0, last)[:, None], selected.clamp(min=0).long()].long()


# 57: tt-metal #54850. The slot is a host scalar when the trace is captured; eager steps pass the real one. There it is
# that of prefills, which no graph of states has here; a decode of a graph has the same slots.
@bug(
    16,
    "tt-metal #54850",
    "decode-kda1x2-d64-fp16-p16-k3.1.12.7.2.20.5-shuffled-weak_decay-k64w4s32.zeroed.strided-b7nan",
    "replay-follows-batch",
    execution="graph",
)
class SlotsOfTrace(Kda):
    """A replay reads and writes the states of the slots of its capture; windows follow the batch."""

    def __init__(self, context):
        super().__init__(context)
        self.traced = []

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            self.traced.append(batch.state.indices.long().clamp(min=0).clone())

    def slots_of_states(self, batch):
        return (self.traced[-1], self.traced[-1]) if self.in_graph else super().slots_of_states(batch)


# 10, onnxruntime #32239: the number of splits is that of the lengths at the capture.
@bug(
    18,
    "onnxruntime #32239",
    "decode-gqa3x2-d32-fp16-p128-k7x2-reversed-gauss-kvfp8e4m3-kvsidebysidehnd-w4000-spanswidebylayer-sink-lsepages2merged-b2prod-zero_length_padding",
    "log-sum-exp",
    execution="graph",
)
class SplitsOfCapture(TorchNativeBackend):
    """A decode graph launches as many KV splits as the keys at its capture needed."""

    capabilities = TorchNativeBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})
    splits = None

    def init_forward_metadata(self, batch):
        self.splits = None
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        decodes = batch.forward_mode is ForwardMode.DECODE and batch.batch_size
        if in_capture:
            longest = int(batch.seq_lens_cpu[: batch.batch_size].max()) if decodes else 0
            self.splits = max(1, -(-longest // SPLIT)) if decodes else None

    def _visibility(self, batch, counts, offset):
        position, key, visible = super()._visibility(batch, counts, offset)
        return position, key, visible if self.splits is None else visible & (key < self.splits * SPLIT)
