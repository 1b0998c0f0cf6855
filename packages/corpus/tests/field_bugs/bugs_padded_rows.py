"""Padded rows and requests of graphs, and rows of a tile behind the last live one."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_launchers import Known, OwnSlots, OwnStart, wide
from parents_native import unwritten
from parents_sparse import Indexed
from parents_states import Gdn32, GdnPaddedByZero
from parents_varlen import Varlen, varlen_of
from parents_wrapper import HostPlanned, Wrapper
from plain_backends import Planned, Rows, Tiled, declared, wide_capabilities

from attn_testkit.contract import ForwardMode
from attn_testkit.contract.index_pool import INDEX_WIDTH, index_scales
from attn_testkit_corpus.faults.catalogue import bug, helper
from attn_testkit_corpus.faults.sparse import SparseParent
from attn_testkit_corpus.faults.states_of_servers import SlotsParent


class Owned(Planned):
    """Blocks find their request in a list of the plan; those behind the plan's own have -1 and do nothing."""

    nothing = -1
    capabilities = wide_capabilities("decode", graph=("decode",), needs={"cpu_seq_lens": True})

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.work = torch.full((max_bs,), self.nothing, dtype=torch.int64, device=self.context.device)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.owners = torch.arange(batch.batch_size, device=self.context.device)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.work[: batch.batch_size].copy_(torch.arange(batch.batch_size))
        self.clear(batch.batch_size)
        if in_capture:
            self.owners = self.work

    def clear(self, bs):
        self.work[bs:].fill_(self.nothing)

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        done = torch.empty(len(out) + 1, *out.shape[1:], dtype=out.dtype, device=out.device)
        for_row = torch.where(self.owners < 0, len(out), self.owners)
        done.index_put_((for_row,), out[self.owners.clamp(min=0)])
        return done[:-1]


@bug(1, "llama.cpp #7903", "target-verify-gqa2x2-d64-bf16-p1-k7.8.9-chain7-reversed-rising_logits-b3prod")
class SurplusRowsOfATileWritten(Tiled):
    """Rows are padded to tiles of 4 or 8 and their bounds are not checked: surplus ones are written over the next."""

    capabilities = declared("decode", "target-verify")

    def finish(self, out, rows):
        n = rows.plan.max_q_len
        tile = n if n <= 2 else 4 if n <= 4 else 8
        done = out.clone()
        for surplus in range(-n % tile):
            at = torch.arange(n + surplus, len(out), n, device=out.device)
            done[at] = out[(at - surplus - 1).clamp(min=0)]
        return done


@bug(
    2,
    "tt-metal #56324",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "writes-own-kv",
)
class PadTailStored(Tiled):
    """A prompt is padded to 32 rows, 1024 there, and rows of padding are stored by what stands behind in the table."""

    capabilities = declared("extend")
    PAD = 32

    def write_kv(self, k, v, plan):
        super().write_kv(k, v, plan)
        new, table = plan.cu_seqlens_q.diff().long(), plan.slot_table.long()
        at = plan.kv_lens.long()[:, None] + torch.arange(self.PAD, device=k.device)
        end = plan.prefix_lens.long() + (new + self.PAD - 1) // self.PAD * self.PAD
        there = (at < end[:, None]) & (at < table.shape[1]) & (new > 0)[:, None]
        slots = torch.where(there, table.gather(1, at.clamp(max=table.shape[1] - 1)), 0).flatten()
        rows = k.new_zeros(len(slots), *k.shape[1:])
        self.context.group_of(plan.layer).kv_pool.set_kv_buffer(plan.layer, slots, rows, rows)


@bug(
    3,
    "sglang #24743",
    "decode-gqa4x2-d128-bf16-p16-k39.70.6-contiguous-gauss-w7-layers3from5groups-b4prod",
    "writes-own-kv",
    execution="graph",
)
class TailOfWindowedSlots(Tiled):
    """Slots of the windowed pool are copied for live rows alone: padded rows store into those of the replay before."""

    capabilities = wide_capabilities("decode", kv_pool={"kv_groups": True}, windows={"decode"})
    eager = inside = False

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.locs = {
            group.index: torch.zeros(max_num_tokens, dtype=torch.int64, device=self.context.device)
            for group in self.context.kv_groups
            if any(la.layer_id in group.layer_ids and la.sliding_window_size >= 0 for la in self.context.layers)
        }

    def init_forward_metadata(self, batch):
        self.eager = self.inside = True
        super().init_forward_metadata(batch)
        self.inside = False

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if self.inside:
            return
        self.eager = False
        for group, kept in self.locs.items():
            live = batch.group_cache_locs[group]
            kept[: len(live)].copy_(live)

    def write_kv(self, k, v, plan):
        group = self.context.group_of(plan.layer)
        if not self.eager and group.index in self.locs:
            plan = replace(plan, out_cache_loc=self.locs[group.index][: len(k)])
        super().write_kv(k, v, plan)


@bug(3, "flashinfer #5176", "decode-gqa2x2-d64-bf16-p1-k0.1.8-interleaved-gauss-b3prod", "completes", execution="graph")
class ExtraBlocksReadOldPlan(Owned):
    """A graph launches more blocks than the plan has, and the surplus works by what an earlier plan left."""

    nothing = 0

    def clear(self, bs):
        pass


@bug(
    4,
    "vllm #40054",
    "extend-gqa2x2-d64-bf16-p16-k3-n4a11-shuffled-gauss-layers1from0-b3prod",
    "buckets-independent",
    execution="graph",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k3.37.9.17-n6a1x3.19-reversed-peaked-b4prod-empty_batches",
)
class QueryStartTailStale(OwnStart):
    """Query_start_loc has entries of live requests alone; the tail is an older batch's."""

    def fill(self, batch, in_capture):
        live = batch.batch_size if in_capture else batch.batch_size - batch.num_padding
        self.start[: live + 1].copy_(batch.query_start_loc[: live + 1])


@bug(4, "vllm #13418", "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod", "writes-own-kv", execution="graph")
class PaddedRowsStored(OwnSlots):
    """All rows of the padded key are stored, by a slot buffer whose tail is stale."""

    def behind(self, live):
        pass


@bug(4, "sglang #27752", "decode-gqa2x2-d64-bf16-p16-k9.70.1-shuffled-gauss-b4prod-padded_tokens")
class PlannedBeforePadding(Known):
    """Planned before the batch is padded; a row's request is row // (rows // requests)."""

    capabilities = wide("decode", "target-verify", "draft-extend-v2", server={"takes_more_rows": True})

    def rows_of(self, q, plan):
        bs = len(plan.kv_lens)
        width = max(len(q) // bs, 1)
        row = torch.arange(len(q), device=q.device)
        request = (row // width).clamp(max=bs - 1)
        place = row - request * width
        return Rows(plan, request, place, plan.kv_lens[request].long() - width + place)


@bug(
    5,
    "tt-metal #52671",
    "decode-gqa2x2-d64-bf16-p1-k3x45.1x43.9x44-shuffled-gauss-b132prod",
    "writes-own-kv",
    execution="graph",
)
class TilePadWriter(Tiled):
    """Of more than 32 requests, no multiple of 32: rows that fill the last tile are stored in slots of the first."""

    capabilities = declared("decode")

    def write_kv(self, k, v, plan):
        super().write_kv(k, v, plan)
        more = -len(k) % 32 if len(k) > 32 else 0
        zeros = torch.zeros_like(k[:more]), torch.zeros_like(v[:more])
        self.context.kv_pool.set_kv_buffer(plan.layer, plan.out_cache_loc[:more], *zeros)


@bug(
    5,
    "vllm #39773",
    "decode-mha2-d64-bf16-p32-k1056.1152.1088.16.63-shared-rising_logits-w0-"
    "cap1.5-layers3from5varied-b5prod-padded_tokens",
    "completes",
    execution="graph",
)
class RowsAsRequests(HostPlanned):
    """Decode takes the rows of Q, padding's too, for the requests of the plan: behind it lies an older one."""

    def __init__(self, context):
        super().__init__(context)
        most, few = context.max_bs, {"dtype": torch.int32, "device": context.device}
        self.start = torch.zeros(most + 1, **few)
        self.last = torch.ones(most, **few)
        self.row = torch.arange(most + 1, **few)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        if batch.forward_mode.is_decode():
            self.start[: batch.batch_size + 1].copy_(self.active.pages)
            self.last[: batch.batch_size].copy_(self.active.last)
            self.active = Wrapper(self.row, self.start, self.active.indices, self.last)

    def planned(self, rows):
        return self.active.of_requests(rows) if self.active.rows is self.row else self.active

    def pages(self, at, inside, plan):
        return plan.indices[torch.where(inside, at, 0)].long()


@bug(
    5,
    "rvllm #32",
    "decode-gqa8x2-d256-bf16-p1-k13-interleaved-rising_logits-w46-b1prod-overlap_scheduling",
    "writes-own-kv",
    execution="graph",
)
class PadSlotsLive(HostPlanned):
    """The end of the buffer of slots that graphs read holds a live slot."""

    in_graph = False

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.new_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.context.device)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.in_graph = False

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.in_graph, slots = True, batch.out_cache_loc
        self.new_slots[: len(slots)].copy_(slots)
        self.new_slots[len(slots) :] = slots[0]

    def write(self, layer, batch, k, v):
        slots = self.new_slots[: len(k)] if self.in_graph else batch.out_cache_loc
        self.context.kv_pool.set_kv_buffer(layer, slots, k, v)


@bug(
    6,
    "vllm #13922",
    "decode-mha2-d128-bf16-p64-k3.133.33.17-reversed-gauss-kvfp8e4m3-w0-cap1.5-sink-b4prod",
    "writes-own-kv",
    execution="graph",
)
class SlotMapShort(Varlen):
    """The cache writer stores as many rows as K has, and in a padded graph there are fewer slots than that."""

    capabilities = varlen_of("decode")
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
    6,
    "flashinfer #919",
    "draft-extend-mqa4-d64-bf16-p16-k14.15.16.17.18.19.20.21.22.23.24.25.26.27.28.29-n2a2x16-shuffled-gauss-b30prod",
    "writes-own-kv",
    execution="graph",
)
class AppendArbitraryTail(Varlen):
    """Rows behind a graph's last token are appended by whatever request and position are there: the first, and 0."""

    capabilities = varlen_of("extend", "draft-extend")

    def write(self, layer, batch, k, v):
        row = torch.arange(len(k), device=k.device)
        first = self.meta.table[0, 0].long() * self.context.page_size
        slots = torch.where(row < self.meta.cu[-1], batch.out_cache_loc, first)
        self.context.kv_pool.set_kv_buffer(layer, slots, k, v)


@bug(10, "vllm-ascend #5397", "extend-mha2-d64-bf16-p16-k0x3-n20a20x3-shuffled-gauss-b4prod-padded_tokens", "completes")
class AscendMhaPadding(Varlen):
    """Where no request has a prefix, K and V are the new rows, and there may be no more of them than lengths say."""

    capabilities = declared(
        "decode",
        "extend",
        graph=("decode",),
        heads={"families": {"mha"}, "gqa_ratios": {1}},
        kv_pool={"page_sizes": {16}},
        server={"takes_more_rows": True},
    )
    lengths = None

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        fresh = batch.forward_mode == "extend" and not any(batch.extend_prefix_lens_cpu)
        self.lengths = sum(batch.extend_seq_lens_cpu) if fresh else None

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.lengths = None

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        if save_kv_cache and self.lengths is not None and len(k) != self.lengths:
            raise RuntimeError(f"keyT({len(k)}) must be equal to the last of actualSequenceLengthKV({self.lengths})")
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@bug(
    14,
    "ATOM #1595",
    "extend-mqa4-d64-bf16-p16-k9.70.1-n2a2x3-contiguous-gauss-sel64empty-b4prod-padded_tokens",
    "completes",
)
class PaddedRowsAbort(SparseParent):
    """An eager prefill with more rows than its plan aborts: it has an offset for each planned row and one more."""

    capabilities = SparseParent.capabilities.with_changes(server={"takes_more_rows": True})
    planned = None

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.planned = len(batch.input_ids) if batch.forward_mode == "extend" else None

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.planned = None

    def run(self, q, kv, plan):
        if self.planned is not None and len(q) != self.planned:
            raise RuntimeError("kv_indptr_prefix length must be N+1")
        return super().run(q, kv, plan)


@bug(15, "ATOM #1015", "decode-gqa2x2-d64-bf16-p1-k1.2.5.9.14.2.30-reversed-negative-b7prod", "writes-own-kv")
class WritesWholeBuffer(OwnSlots):
    """The eager writer has as many slots as the buffer holds: those behind the step's are of an earlier one."""

    capabilities = wide("decode", "extend")
    most = 0

    def __init__(self, context):
        super().__init__(context)
        self.eager_slots = torch.zeros(context.max_num_tokens, dtype=torch.int64, device=context.device)

    def write_kv(self, k, v, plan):
        if not self.eager:
            return super().write_kv(k, v, plan)
        self.eager_slots[: len(k)].copy_(plan.out_cache_loc)
        self.most = max(self.most, len(k))
        k, v = (torch.cat([each, each.new_zeros(self.most - len(each), *each.shape[1:])]) for each in (k, v))
        return super().write_kv(k, v, replace(plan, out_cache_loc=self.eager_slots[: self.most]))


@bug(
    15,
    "vllm-ascend #11408",
    "target-verify-mamba4x2-d64-bf16-p16-k5-chain2-shuffled-strong_decay-k64w4s32.null.slots-b2nan",
    "writes-own-state",
    execution="graph",
)
class PaddedRequestsKeepSlots(SlotsParent):
    """Slots and counts of padded requests of a verify in a graph are those of the last replay."""

    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        few = {"dtype": torch.int32, "device": self.context.device}
        self.kept = torch.full((max_bs, self.context.num_draft_tokens), -1, **few)
        self.kept_counts = torch.ones(max_bs, **few)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False
        if not batch.forward_mode.is_target_verify():
            return
        given, counts = super().listed(batch), batch.state.num_accepted
        kept = self.kept[: len(given)]
        kept.copy_(given if in_capture else torch.where(given > 0, given, kept))
        if counts is not None:
            live = (given[:, 0] > 0)[: len(counts)]
            kept = self.kept_counts[: len(counts)]
            kept.copy_(counts if in_capture else torch.where(live, counts, kept))

    def listed(self, batch):
        if self.eager or not batch.forward_mode.is_target_verify():
            return super().listed(batch)
        return self.kept[: batch.batch_size]

    def last_accepted(self, counts):
        return super().last_accepted(counts if self.eager else self.kept_counts[: len(counts)])


class FinitePadding(Known):
    """Padded requests have no rows, and rows behind the last live one get zeros."""

    capabilities = wide(
        "decode", "extend", graph={"decode"}, server={"padded_requests": {"nothing"}, "finite_padding": True}
    )

    def finish(self, out, rows):
        return out.masked_fill(self.behind(out, rows)[:, None, None], 0.0)

    def behind(self, out, rows):
        return torch.arange(len(out), device=out.device) >= rows.plan.cu_seqlens_q[-1]


# vllm-plugin-FL #368: rows of the output behind num_actual_tokens are never written.
@bug(
    16,
    "vllm-plugin-FL #368",
    "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod",
    "padding-finite",
    execution="graph",
)
class PaddingUnwritten(FinitePadding):
    """Rows of the output behind the live ones are not written."""

    def finish(self, out, rows):
        return unwritten(out, self.behind(out, rows))


# TensorRT-LLM #18034: kernels of decode count the rows of their input, and scratch is that of the plan.
@bug(
    16,
    "TensorRT-LLM #18034",
    "decode-mqa4-d64-bf16-p16-k9.70.1-interleaved-gauss-sel16-idx4ties-b4prod-padded_tokens",
    "completes",
)
class PaddingIsRequests(Indexed):
    """Rows behind those of the plan need scratch that is not there."""

    capabilities = Indexed.capabilities.with_changes(
        eager={"decode", "target-verify"}, graph={"decode", "target-verify"}
    )

    @helper
    def count(self, rows, plan):
        if rows > len(plan.kv_lens) * plan.max_q_len:
            raise RuntimeError(f"scratch for {len(plan.kv_lens)} requests is too small for {rows} rows")

    def run_select(self, q_index, weights, plan):
        self.count(len(q_index), plan)
        return super().run_select(q_index, weights, plan)

    def run(self, q, kv, plan):
        self.count(len(q), plan)
        return super().run(q, kv, plan)


class LeavesPadding(Indexed):
    """Healthy: rows of slot -1 are not stored."""

    capabilities = Indexed.capabilities.with_changes(server={"padding_slots": {0, -1}})

    def write_kv(self, k, v, plan):
        pool, slots = self.context.kv_pool, plan.out_cache_loc.long()
        old_k, old_v = (each[:1] for each in pool.get_kv_buffer(plan.layer.layer_id))
        padding = (slots < 0)[:, None, None]
        k, v = torch.where(padding, old_k, k), torch.where(padding, old_v, v)
        pool.set_kv_buffer(plan.layer, slots.clamp(min=0), k, v)

    def write_index(self, k_index, plan):
        self.store(plan.out_cache_loc, k_index, plan.layer.layer_id, plan.out_cache_loc >= 0)


# TensorRT-LLM #18673: slot -1 is token -1 of page 0, as C divides. The bytes in front of the layer's pages are written;
# those of the first layer, which would be outside the pool, are left out here.
@bug(
    16,
    "TensorRT-LLM #18673",
    "decode-mqa4-d64-bf16-p16-k14.15.16.17.18.19.20.21.22.23.24.25.26.27.28.29-shuffled-gauss-sel16-idx4ties-b30prod",
    "index-stored",
    execution="graph",
)
class SlotOfNoPage(LeavesPadding):
    """The index key of padding is stored in front of page 0."""

    def write_index(self, k_index, plan):
        super().write_index(k_index, plan)
        pool = self.context.index_pool
        at = pool.layer_ids.index(plan.layer.layer_id)
        if not at:
            return
        keys = k_index.float() / index_scales(k_index, pool.scale)[:, None]
        keys = keys.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        padding = plan.out_cache_loc < 0
        last = (torch.arange(1, len(keys) + 1, device=keys.device) * padding).amax()
        before = pool.memory[at - 1, -1, -INDEX_WIDTH:]
        before.copy_(torch.where(last > 0, keys.index_select(0, (last - 1).clamp(min=0)[None])[0], before))


# 52: ATOM #1436. The kernels skip negative indices; padded requests of vLLM's full graphs have the null block 0.
@bug(
    16,
    "ATOM #1436",
    "decode-gdn4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32.null-b4prod",
    "writes-own-state",
    execution="graph",
)
class PaddingIsNotNegative(GdnPaddedByZero):
    """Padded requests of a replayed decode read and write slot 0."""

    def stores(self, indices):
        return indices >= 0 if self.in_graph else super().stores(indices)


# 56: mlx-lm #1736. The mask of the rows of padding on the right is dropped; windows follow the lengths.
@bug(
    16,
    "mlx-lm #1736",
    "extend-gdn4x2-d64-fp32-p16-k0.17.0-n4a1x2.9-shuffled-mild_decay-k128w4s32-b3prod",
    "state-matches-oracle",
)
class PaddingUpdatesStates(Gdn32):
    """Shorter requests of a prefill are padded with rows of zeros, which update their states."""

    def forward(self, mixed, a, b, layer, batch):
        # The windows before the step are overwritten by it; those after the rows follow from them.
        out = super().forward(mixed, a, b, layer, batch)
        if self.mode is not ForwardMode.EXTEND:
            return out
        conv, temporal = self.pools(layer)
        bs = len(self.counts)
        window = conv[self.index][..., : layer.conv_width - 1]
        state = temporal[self.index].float()
        zeros = tuple(each.new_zeros(bs, each.shape[1]) for each in (mixed, a, b))
        for token in range(min(batch.extend_seq_lens_cpu), self.width):
            padding = token >= self.counts
            one, moved = self.convolved(zeros[0], window, layer)
            after, _ = self.step(state, *self.split(one, layer), zeros[1], zeros[2], layer)
            window = torch.where(padding[:, None, None], moved, window)
            state = torch.where(padding[:, None, None, None], after, state)
        self.store(temporal, state.to(temporal.dtype), self.index, self.live)
        return out
