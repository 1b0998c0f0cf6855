"""Selections and indexers; bugs of the sixteenth set.

``MODES`` of a class without a case are those in which its bug can show.
"""

from __future__ import annotations

import torch

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.contract import INDEX_PAGE, ForwardMode, Sparse
from attn_testkit.contract.index_pool import INDEX_WIDTH, index_scales
from attn_testkit_corpus.faults.catalogue import bug, helper

_PAGED = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY})
_OF_DRAFTS = frozenset({ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2})


class Indexed(TorchNativeSparseBackend):
    """Healthy: the adapter in plain torch, with its parts apart. It knows the mode of the step."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        heads={"families": {"mqa", "mla"}, "gqa_ratios": {4, 16}, "head_dims": {64, 128, 512}, "mla_rope_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16, 64}},
        options={"sinks": False},
        lse=None,
    )

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode
        if self.mode is ForwardMode.EXTEND:
            self.new_lens = list(batch.extend_seq_lens_cpu)
            self.total_keys = sum(batch.extend_prefix_lens_cpu) + sum(self.new_lens)

    def extends(self):
        return self.mode is ForwardMode.EXTEND

    def index_slots(self, plan):
        """[bs, columns]: the slot of each index key of each request."""
        return plan.slot_table

    def scored(self, q_index, weights, plan):
        request, table = self.request_of_row(q_index, plan), self.index_slots(plan).long()
        if table.numel() < self.context.kv_pool.num_slots:
            listed = self.scores_of_slots(q_index, weights, plan.layer, table.flatten())
            scores = listed.view(len(request), *table.shape)[torch.arange(len(request), device=table.device), request]
        else:
            scores = self.scores_of_slots(q_index, weights, plan.layer).gather(1, table[request])
        return scores, self.keys_seen(q_index, plan)

    def best(self, scores, sees, layer):
        """[T, k] int64: keys of the best scores. ``scores`` [T, keys]: -inf for keys that a row does not see."""
        return scores.topk(min(layer.topk, scores.shape[1]), 1).indices

    def run_select(self, q_index, weights, plan):
        scores, sees = self.scored(q_index, weights, plan)
        key = torch.arange(scores.shape[1], device=scores.device)
        best = self.best(torch.where(key < sees[:, None], scores, -torch.inf), sees, plan.layer)
        found = torch.where(best < sees[:, None], best, -1).to(torch.int32)
        return torch.nn.functional.pad(found, (0, plan.layer.topk - found.shape[1]), value=-1)

    def padded(self, selected, rows):
        """Padded rows after the last selection select no key."""
        return torch.nn.functional.pad(selected, (0, 0, 0, rows - len(selected)), value=-1)

    def store(self, slots, k_index, layer_id, stored):
        """Store the rows for which ``stored`` [T] is True, and leave all other memory as it is."""
        pool = self.context.index_pool
        scales = index_scales(k_index, pool.scale)
        keys = (k_index.float() / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        slots = torch.where(stored, slots.long(), 0)
        at = slots // INDEX_PAGE, slots % INDEX_PAGE
        all_keys, all_scales = pool.get_keys(layer_id).view(torch.uint8), pool.get_scales(layer_id)
        all_keys.index_put_(at, torch.where(stored[:, None], keys, all_keys[at]))
        all_scales.index_put_(at, torch.where(stored, scales, all_scales[at]))


class Given(Indexed):
    """Healthy: selections are given."""

    capabilities = Indexed.capabilities.with_changes(
        sparse=Sparse(topk={16, 64, 2048}, holes=True, empty_rows=True, fewer_rows=True, any_padding=True)
    )

    def prepared(self, selected, plan):
        """``selected`` [T, topk] as the kernel reads it."""
        return selected

    def run(self, q, kv, plan):
        selected = self.prepared(self.padded(plan.selected, len(q)), plan)
        return self.attend_all(q, kv, plan, self.slots(selected, plan), selected >= 0)[0]


def _in_bins(scores, k, bins, limit):
    """``scores`` with -inf for candidates that find no place: the bin of the k-th best keeps the first ``limit``."""
    threshold = bins.gather(1, scores.topk(k, 1).indices[:, -1:])
    inside = bins == threshold
    return scores.masked_fill(inside & (inside.cumsum(1) > limit), -torch.inf)


def _ordered(bits, sign):
    """Bits of floats as whole numbers in the order of the floats."""
    return torch.where(bits < 0, ~bits, bits + sign)


# cudnn-frontend #407: the top-k writes pairs if topk is larger than the threads of a block (512 here).
@bug(
    "cudnn-frontend #407",
    "decode-mqa4-d64-bf16-p16-k7050.70-shuffled-gauss-sel705-idx4ties-layers1from0-b2prod",
    "completes",
)
class PairsOfOddTopk(Indexed):
    """An odd topk that is larger than a block's threads does not compile."""

    capabilities = Indexed.capabilities.with_changes(sparse={"topk": {16, 64, 705}})

    def best(self, scores, sees, layer):
        if layer.topk > 512 and layer.topk % 2:
            raise RuntimeError(f"assert self.top_k % vecsize_out == 0, with top_k={layer.topk}")
        return super().best(scores, sees, layer)


# vllm #47404: the plan renews metadata on another stream, for which the replay does not wait. Here the copy is
# always late: it is done when the next plan is made.
@bug(
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


# sglang #38232: as many candidates as the next power of two are kept, sorted by index, and then cut to topk.
@bug(
    "sglang #38232",
    "decode-mla16-d128r64-bf16-p64-k3.133.33.17-shared-gauss-sel24-idx4-b5small",
    "selects-best",
)
class SortedThenCut(Indexed):
    """With a topk that is not a power of two, the best keys with the highest positions are lost."""

    capabilities = Indexed.capabilities.with_changes(sparse={"topk": {16, 24}})

    def best(self, scores, sees, layer):
        kept = scores.topk(min(1 << (layer.topk - 1).bit_length(), scores.shape[1]), 1)
        found = torch.where(kept.values == -torch.inf, scores.shape[1], kept.indices)
        return found.sort(1).values[:, : layer.topk]


# vllm #52149 (and #51782): more than 32 rows take FilteredTopK, whose coarse bin has room for 16,384 candidates.
class BinOf16384(Indexed):
    """Candidates behind the 16,384th in the bin of the threshold are dropped."""

    MODES = ("decode", "target-verify", "draft-extend", "draft-extend-v2", "extend")

    def best(self, scores, sees, layer):
        if len(scores) > 32 and scores.shape[1] > 16_384:
            bins = _ordered(scores.view(torch.int32).long(), 1 << 32) >> 21
            scores = _in_bins(scores, min(layer.topk, scores.shape[1]), bins, 16_384)
        return super().best(scores, sees, layer)


# ik_llama.cpp #2095: a layer without an index cache is not sparse.
@bug(
    "ik_llama.cpp #2095",
    "draft-extend-mqa4-d64-bf16-p64-k2112.70.12-n2a2x3-interleaved-negative-sel2048-idx4reuse-b4prod-empty_batches",
)
class DenseWithoutIndexKeys(Indexed):
    """A layer that reuses a selection attends to all keys."""

    def run(self, q, kv, plan):
        if not plan.layer.reuses_selection:
            return super().run(q, kv, plan)
        table = plan.slot_table[self.request_of_row(q, plan)].long()
        key = torch.arange(table.shape[1], device=table.device)
        return self.attend_all(q, kv, plan, table, key < self.keys_seen(q, plan)[:, None])[0]


# ik_llama.cpp #2069: with more than 8 rows the scores of the heads are added to the causal mask itself.
@bug(
    "ik_llama.cpp #2069",
    "target-verify-mqa4-d64-bf16-p16-k30.126.62.14.63.31x25.127x25.63x25.15x25.64x16.664.64x8-chain4-shared-shifted-sel64-idx4reuse-b131stale-padded_tokens-overlap_scheduling",
)
class MaskAsAccumulator(Indexed):
    """Index scores of more than 8 rows stay in the mask, which attention and later layers add."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mask = None

    @helper
    def causal(self, rows, plan):
        """[T, keys] float32: 0 for keys that a row sees, and -inf; one for all layers of the step."""
        if self.mask is None or len(self.mask) != len(rows):
            key = torch.arange(plan.slot_table.shape[1], device=rows.device)
            sees = self.keys_seen(rows, plan)[:, None]
            self.mask = torch.zeros(len(rows), len(key), device=rows.device).masked_fill_(key >= sees, -torch.inf)
        return self.mask

    def scored(self, q_index, weights, plan):
        scores, sees = super().scored(q_index, weights, plan)
        mask = self.causal(q_index, plan)
        scores = torch.where(mask == -torch.inf, 0.0, scores)
        return (mask.add_(scores) if len(q_index) > 8 else mask + scores), sees

    def run(self, q, kv, plan):
        selected = self.padded(plan.selected, len(q))
        there, slots = selected >= 0, self.slots(selected, plan)
        k, v = (each.flatten(0, 1)[slots][:, :, 0].float().masked_fill(~there[..., None], 0.0) for each in kv)
        bias = torch.zeros(selected.shape, device=q.device)
        if self.mask is not None:
            mask = torch.nn.functional.pad(self.mask, (0, 0, 0, max(0, len(q) - len(self.mask))))[: len(q)]
            bias = mask.gather(1, selected.clamp(min=0).long())
        logits = q.float() @ k.mT * plan.layer.scaling + bias[:, None]
        weights = torch.softmax(logits.masked_fill(~there[:, None], -torch.inf), -1).nan_to_num(nan=0.0)
        return (weights @ v).to(q.dtype)


# DeepGEMM #392: on SM120 a launch leaves about 5% of the scores of a prefill at 0, each launch others.
@bug(
    "DeepGEMM #392",
    "extend-mqa4-d64-bf16-p16-k3.37.9.17-n6a1x3.19-reversed-mean-sel16-idx4-b4prod",
    "selects-best",
)
class RacingScores(Indexed):
    """Some scores are 0, and other ones in each launch."""

    capabilities = Indexed.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})

    def __init__(self, context):
        super().__init__(context)
        self.launches = torch.zeros(1, dtype=torch.int64, device=context.device)

    def scored(self, q_index, weights, plan):
        scores, sees = super().scored(q_index, weights, plan)
        if not self.extends():
            return scores, sees
        self.launches += 1
        row, key = (torch.arange(each, device=scores.device) for each in scores.shape)
        mixed = row[:, None] * 7_919 + key * 104_729 + self.launches * 15_485_863
        mixed = (mixed ^ (mixed >> 7)) * 2_654_435_761 % (1 << 32)
        return scores.masked_fill(mixed % 97 < 5, 0.0), sees


# TensorRT-LLM #14940: the scheduler of the paged scores reads behind its sums if all lengths are 0.
@bug(
    "TensorRT-LLM #14940",
    "decode-mqa4-d64-bf16-p16-k9.70.1-interleaved-gauss-sel16-idx4ties-b6prod-zero_length_padding",
    "completes",
    execution="graph",
)
class NoLengthAtAll(Indexed):
    """If no request has a key, a task's request is one behind the last."""

    capabilities = Indexed.capabilities.with_changes(
        eager={"decode", "target-verify"},
        graph={"decode", "target-verify"},
        server={"padded_requests": {"rows", "nothing"}},
    )

    def run_select(self, q_index, weights, plan):
        ends = plan.kv_lens.long().cumsum(0)
        tasks, total = torch.arange(4, device=ends.device), ends[-1]
        first = torch.minimum(tasks * ((total + 3) // 4), (total - 1).clamp(min=0))
        self.schedule = ends[torch.searchsorted(ends, first, right=True)]
        return super().run_select(q_index, weights, plan)


# sglang #29798: eager drafts ask for lengths on the host, which the class says not to need.
@bug(
    "sglang #29798",
    "draft-extend-mqa4-d128-bf16-p16-k15.16.17-n4a4x3-shared-peaked-sel16empty-b4stale",
    "completes",
)
class AsksForHostLengths(Indexed):
    """An eager plan of a draft asserts that there is ``seq_lens_cpu``."""

    def init_forward_metadata(self, batch):
        if batch.forward_mode in _OF_DRAFTS:
            assert batch.seq_lens_cpu is not None, "seq_lens_cpu"
        super().init_forward_metadata(batch)


# TensorRT-LLM #16219: tokens per block are those of the manager before. Chunks behind a prefix, and only they, use
# slot mappings.
@bug(
    "TensorRT-LLM #16219",
    "extend-mqa4-d64-bf16-p16-k3.37.9.17-n6a1x3.19-reversed-mean-sel16-idx4-b4prod",
    "completes",
)
class BlocksOfOtherManager(Indexed):
    """Index slots of requests with a prefix have four times the stride."""

    capabilities = Indexed.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})

    @staticmethod
    @helper
    def mapped(slots, prefix_lens):
        return torch.where(prefix_lens > 0, slots // INDEX_PAGE * 4 * INDEX_PAGE + slots % INDEX_PAGE, slots)

    def write_index(self, k_index, plan):
        slots = plan.out_cache_loc.long()
        if self.extends():
            slots = self.mapped(slots, plan.prefix_lens[self.request_of_row(k_index, plan)])
        self.context.index_pool.store(plan.layer.layer_id, slots, k_index)

    def index_slots(self, plan):
        table = plan.slot_table.long()
        if not self.extends():
            return table
        there = torch.arange(table.shape[1], device=table.device) < plan.kv_lens[:, None]
        return torch.where(there, self.mapped(table, plan.prefix_lens[:, None]), table)


# TensorRT-LLM #18034: kernels of decode count the rows of their input, and scratch is that of the plan.
@bug(
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


# sglang #36807: the coarse bucket (8 bits of a half) of the threshold has room for 4,096 candidates; only topk 2048.
class BucketOf4096(Indexed):
    """Candidates behind the 4,096th in the bucket of the threshold are dropped."""

    MODES = ("decode", "target-verify", "draft-extend", "draft-extend-v2", "extend")

    def best(self, scores, sees, layer):
        if layer.topk == 2_048 and scores.shape[1] > 4_096:
            bins = _ordered(scores.half().view(torch.int16).long(), 1 << 16) >> 8
            scores = _in_bins(scores, 2_048, bins, 4_096)
        return super().best(scores, sees, layer)


# vllm #52500: short extends are decodes. They count as even if those with rows are, and rows are then shared evenly.
class EvenRows(Indexed):
    """With a request without rows, each request is taken to have rows / requests."""

    MODES = ("extend",)
    capabilities = Indexed.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})
    width = 0

    def scored(self, q_index, weights, plan):
        some = {each for each in self.new_lens if each} if self.extends() else set()
        if len(some) == 1 and max(some) <= 8:
            rows, requests = sum(self.new_lens), len(self.new_lens)
            if rows % requests:
                raise RuntimeError(f"shape '[{requests}, -1]' is invalid for {rows} rows")
            self.width = rows // requests
        try:
            return super().scored(q_index, weights, plan)
        finally:
            self.width = 0

    def request_of_row(self, rows, plan):
        if not self.width:
            return super().request_of_row(rows, plan)
        return (torch.arange(len(rows), device=rows.device) // self.width).clamp(max=len(plan.kv_lens) - 1)


# vllm #48404: the expanded block table has the columns of the greatest context, and the runner's table has more.
@bug(
    "vllm #48404",
    "target-verify-mqa4-d64-bf16-p16-k9.64.1-chain4-shuffled-gauss-sel16-idx4-b4prod-context_of_prefixes",
    "selects-best",
)
class TableOfContext(Indexed):
    """Keys behind the greatest context are those of the next row; rows that are not even raise an error."""

    capabilities = Indexed.capabilities.with_changes(server={"context_len": {"all", "prefix"}})

    def scored(self, q_index, weights, plan):
        width, columns = self.context.max_context_len, plan.slot_table.shape[1]
        if columns == width or self.mode in {ForwardMode.DECODE, ForwardMode.EXTEND}:
            return super().scored(q_index, weights, plan)
        if self.mode is ForwardMode.DRAFT_EXTEND:
            raise RuntimeError(f"the expanded size of the tensor ({width}) must match the existing size ({columns})")
        request, table = self.request_of_row(q_index, plan), plan.slot_table.long()
        listed = self.scores_of_slots(q_index, weights, plan.layer, table.flatten()).view(len(request), *table.shape)
        row, key = torch.arange(len(request), device=table.device), torch.arange(columns, device=table.device)
        behind = row[:, None] + key // width
        of_row = request[behind.clamp(max=len(request) - 1)]
        return listed[row[:, None], of_row, key % width], self.keys_seen(q_index, plan)


# vllm #52109: keys are written row by row; a prefill gathers them in tiles of 16 tokens by 16 bytes.
@bug(
    "vllm #52109",
    "extend-mqa4-d64-bf16-p16-k3.37.9.17-n6a1x3.19-reversed-mean-sel16-idx4-b4prod",
    "selects-best",
)
class TiledReader(Indexed):
    """A prefill reads tiles where rows were written."""

    capabilities = Indexed.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})

    def scores_of_slots(self, q_index, weights, layer, slots=None):
        if not self.extends():
            return super().scores_of_slots(q_index, weights, layer, slots)
        pool = self.context.index_pool
        scales = pool.get_scales(layer.layer_id)
        if slots is None:
            slots = torch.arange(scales.numel(), device=scales.device)
        page, place = slots[:, None] // INDEX_PAGE, slots[:, None] % INDEX_PAGE
        number = torch.arange(INDEX_WIDTH, device=slots.device)
        byte = place // 16 * 16 * INDEX_WIDTH + number // 16 * 256 + place % 16 * 16 + number % 16
        keys = pool.get_index_buffer(layer.layer_id)[page, byte].view(torch.float8_e4m3fn).float()
        of_slot = torch.zeros(len(q_index), len(keys), device=keys.device)
        for head in range(layer.index_heads):
            of_slot += (q_index[:, head].float() @ keys.T).relu_() * weights[:, head, None]
        return of_slot * scales[page[:, 0], place[:, 0]]


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


# mlxcel #619: only a mask of the caller makes a prefill causal, and callers give none. Up to topk keys are dense.
@bug(
    "mlxcel #619",
    "extend-mqa4-d64-bf16-p16-k3.37.9.17-n6a1x3.19-reversed-mean-sel16-idx4-b4prod",
    "selection-well-formed",
)
class CausalByMask(Indexed):
    """Rows of a prefill see later rows, in the indexer and in the dense path of short requests."""

    capabilities = Indexed.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})

    def keys_seen(self, rows, plan):
        if not self.extends():
            return super().keys_seen(rows, plan)
        return plan.kv_lens[self.request_of_row(rows, plan)].long()

    def run(self, q, kv, plan):
        selected = self.padded(plan.selected, len(q))
        if self.extends() and plan.layer.index_heads:  # selections without an indexer are taken as they are
            lens = plan.kv_lens[self.request_of_row(q, plan)][:, None]
            key = torch.arange(selected.shape[1], dtype=selected.dtype, device=q.device)
            selected = torch.where(lens <= plan.layer.topk, torch.where(key < lens, key, -1), selected)
        return self.attend_all(q, kv, plan, self.slots(selected, plan), selected >= 0)[0]


# vllm #46478: parts of a prefill behind the first gather the keys again, into a view of another size. What they read is
# not told; here it is the key a page before.
class PartsGatherAgain(Indexed):
    """Rows behind the first 512 MiB of scores are scored with other keys."""

    MODES = ("extend",)
    capabilities = Indexed.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})

    def scored(self, q_index, weights, plan):
        scores, sees = super().scored(q_index, weights, plan)
        if not self.extends():
            return scores, sees
        first = (1 << 29) // 4 // max(1, self.total_keys)
        return torch.cat([scores[:first], scores[first:].roll(INDEX_PAGE, 1)]), sees


# aiter #4440: the kernel of paged scores takes a block to be a token.
@bug(
    "aiter #4440",
    "decode-mla16-d128r64-bf16-p64-k32.128.64.16.63-shuffled-negative-sel16-idx4gauss-b6nan",
    "selects-best",
)
class BlockIsToken(Indexed):
    """A key's position is looked up in the block table, and its block's first token is read."""

    capabilities = Indexed.capabilities.with_changes(
        eager={"decode", "target-verify"}, graph={"decode", "target-verify"}, kv_pool={"page_sizes": {1, 64}}
    )

    def index_slots(self, plan):
        if self.mode not in _PAGED or plan.page_size == 1:
            return plan.slot_table
        pages = plan.page_table.long()
        request, key = (torch.arange(each, device=pages.device) for each in plan.slot_table.shape)
        at = (request[:, None] * pages.shape[1] + key).clamp(max=pages.numel() - 1)
        return pages.flatten()[at] * plan.page_size
