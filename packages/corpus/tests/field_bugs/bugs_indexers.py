"""Indexers: index keys, scores, and the keys that are best."""

from __future__ import annotations

import torch
from parents_sparse import PAGE, WIDTH, Indexed, OfMode
from torch.nn.functional import pad

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.contract import INDEX_PAGE, ForwardMode, Indexer, Sparse
from attn_testkit_corpus.faults.catalogue import bug, helper
from attn_testkit_corpus.faults.indexer import IndexerParent
from attn_testkit_corpus.faults.sparse import SparseParent

KERNEL_PAGE = 16

LONG_ROW = 4096


@bug(
    14,
    "ATOM #1859",
    "target-verify-mqa4-d64-bf16-p16-k1039.1040.1041-chain7-contiguous-rising_logits-sel16-idx4ties-b3prod",
    "selection-well-formed",
)
class BoundOfRequest(OfMode):
    """In decode and verify the keys to select from are the request's, for each of its rows."""

    def lengths(self, rows, plan):
        right = super().lengths(rows, plan)
        return plan.kv_lens[self.request_of_row(rows, plan)].long() if self.mode.is_target_verify() else right


@bug(
    14,
    "pypto-lib #592",
    "extend-mqa4-d64-bf16-p16-k32.33.16-n7a17.2.1-chunks3-shared-gauss-sel16-idx4reuse-b4prod",
    "selection-well-formed",
)
class ScoresAsManyAsRows(OfMode):
    """A prefill scores as many keys of a request as it has new rows, from the first key on."""

    def lengths(self, rows, plan):
        right = super().lengths(rows, plan)
        count = plan.cu_seqlens_q.diff()[self.request_of_row(rows, plan)]
        return torch.minimum(right, count.long()) if self.extends() else right


@bug(
    14,
    "mlx-lm #1189",
    "extend-mqa4-d64-bf16-p16-k32.33.16-n7a17.2.1-chunks3-shared-gauss-sel16-idx4reuse-b4prod",
    "selection-well-formed",
)
class KeysOfTheChunk(OfMode):
    """A prefill knows the index keys of its own chunk, and numbers them from 0 on."""

    def run_select(self, q_index, weights, plan):
        if not self.extends():
            return super().run_select(q_index, weights, plan)
        prefix = plan.prefix_lens[self.request_of_row(q_index, plan)].long()[:, None]
        scores = self.scored(q_index, weights, plan)
        place = torch.arange(scores.shape[1], device=scores.device)
        own = scores.gather(1, (place + prefix).clamp(max=scores.shape[1] - 1))
        lengths = self.lengths(q_index, plan) - prefix[:, 0]
        return self.best(own, lengths, plan.layer.topk).to(torch.int32)


@bug(
    14,
    "sglang #37625, vllm #55314",
    "decode-mqa4-d64-bf16-p16-k40000-contiguous-gauss-sel16-idx4ties-b1prod",
    "selects-best",
    of_a_tier="decode-mqa4-d64-bf16-p16-k66000.70-shuffled-gauss-sel16-idx4ties-layers1from0-b2prod",
)
class BinOf4096(IndexerParent):
    """Candidates of the threshold's bin, the upper 8 bits of a score, are dropped from the 4096th on."""

    CAPACITY = 4096

    def best(self, scores, lengths, topk):
        place = torch.arange(scores.shape[1], device=scores.device)
        seen = place < lengths[:, None]
        bits = scores.float().nan_to_num(nan=-torch.inf).view(torch.int32)
        ordered = torch.where(bits < 0, ~bits, bits | -(1 << 31)).to(torch.int64) & 0xFFFFFFFF
        coarse = torch.where(seen, ordered >> 24, -1)
        threshold = coarse.sort(1, descending=True).values[:, min(topk, scores.shape[1]) - 1, None]
        in_bin = seen & (coarse == threshold)
        dropped = in_bin & (in_bin.cumsum(1) > self.CAPACITY)
        return super().best(scores.masked_fill(dropped, -torch.inf), lengths, topk)


@bug(
    14,
    "ATOM #1362",
    "draft-extend-v2-mqa4-d128-bf16-p16-k37.3.0.16.9.33.1.17.5-n4a4x9-shared-negative-sel16-idx4-b10prod",
    "selects-best",
)
class LastLayerReuses(IndexerParent):
    """The last layer uses the selection of the layer before it instead of that of its own indexer."""

    capabilities = IndexerParent.capabilities.with_changes(sparse=Sparse(topk={16}, indexer=Indexer(heads={4})))
    last = None

    def run_select(self, q_index, weights, plan):
        if plan.layer.layer_id == self.context.layers[-1].layer_id and self.last is not None:
            return self.last
        self.last = super().run_select(q_index, weights, plan)
        return self.last


@bug(
    14,
    "vllm #43966",
    "extend-mla16-d128r64-bf16-p16-k3.37.9.17-n9a15.16.2.1-shared-peaked-sel16-idx4ties-b4prod",
    "selection-well-formed",
)
class ShortPrefillIsADecode(OfMode):
    """Requests of up to 4 new rows count as decodes, whose rows select from all keys of the request."""

    THRESHOLD = 4

    def lengths(self, rows, plan):
        right, request = super().lengths(rows, plan), self.request_of_row(rows, plan)
        short = (plan.cu_seqlens_q.diff()[request] <= self.THRESHOLD) & self.extends()
        return torch.where(short, plan.kv_lens[request].long(), right)


@bug(15, "aiter #5525", "decode-mla16-d128r32-bf16-p16-k0.1.16-contiguous-mean-sel16-idx4-b4prod", "selects-best")
class RowsOf132(IndexerParent):
    """Keys of a page are read as if each had its scale behind it (in the thread: the other way round)."""

    def gathered(self, slots, layer_id):
        _, scales = super().gathered(slots, layer_id)
        buffer = self.context.index_pool.get_index_buffer(layer_id)
        rows = buffer.view(len(buffer), PAGE, WIDTH + 4)[..., :WIDTH]
        keys = rows[slots // PAGE, slots % PAGE]
        return keys.contiguous().view(torch.float8_e4m3fn).float(), scales


@bug(15, "TileOPs #2149", "decode-mqa4-d128-bf16-p16-k1.2.5.9.14.2.30-shuffled-gauss-sel16holesempty-b8stale", "finite")
class TileOfLastRow(SparseParent):
    """No key leaves its place of the tile as the last row filled it; at first it holds anything."""

    def run(self, q, kv, plan):
        selected = self.prepared(plan.selected, plan)
        slot, there = self.slots(selected, plan), self.is_key(selected, plan)
        row = torch.arange(len(selected), device=selected.device)[:, None]
        last = torch.where(there, row, -1).cummax(0).values
        k, v = (each.flatten(0, 1)[slot][:, :, 0].float() for each in kv)
        column = torch.arange(selected.shape[1], device=selected.device)
        v = v[last.clamp(min=0), column].masked_fill((last < 0)[..., None], torch.nan)
        k = k.masked_fill(~there[..., None], 0.0)
        logits = (q.float() @ k.mT * plan.layer.scaling).masked_fill(~there[:, None], -torch.inf)
        weights = torch.softmax(logits, -1).nan_to_num(nan=0.0)
        return (weights @ v).to(q.dtype)


@bug(
    15,
    "sglang #30645",
    "decode-mqa4-d64-bf16-p16-k20480.70-shuffled-gauss-sel2048-idx4ties-layers1from0-b2prod",
    "selection-well-formed",
)
class TiesOf1024(IndexerParent):
    """At most 1024 candidates that tie at the threshold are kept; the rest of the row is -1."""

    CAPACITY = 1024
    capabilities = IndexerParent.capabilities.with_changes(
        sparse=Sparse(topk={16, 2048}, indexer=Indexer(heads={4}, reuses_selections=True))
    )

    def best(self, scores, lengths, topk):
        right = super().best(scores, lengths, topk)
        there = right >= 0
        chosen = scores.gather(1, right.clamp(min=0)).masked_fill(~there, torch.inf)
        threshold = chosen.amin(1, keepdim=True)
        tied = there & (chosen == threshold)
        full = (lengths > topk)[:, None]
        kept = torch.where(full & tied & (tied.cumsum(1) > self.CAPACITY), -1, right)
        return kept.gather(1, (kept < 0).to(torch.int8).argsort(dim=1, stable=True))


@bug(
    15, "aiter #4376", "decode-mla16-d128r64-bf16-p16-k15.16.17-contiguous-shifted-sel16-idx4ties-b4stale", "repeatable"
)
class TiesByArrival(IndexerParent):
    """Keys that tie at the threshold are taken in an order that is another one in each call."""

    def __init__(self, context):
        super().__init__(context)
        self.calls = torch.zeros(1, dtype=torch.int64, device=context.device)

    def best(self, scores, lengths, topk):
        self.calls += 1
        place = torch.arange(scores.shape[1], device=scores.device)
        arrival = ((place + self.calls) * 40503 % 65537).argsort(stable=True)
        seen = torch.where(place < lengths[:, None], scores, -torch.inf)[:, arrival]
        order = arrival[seen.sort(dim=1, descending=True, stable=True).indices[:, :topk]]
        order = pad(order, (0, topk - order.shape[1]), value=scores.shape[1])
        return torch.where(order < lengths[:, None], order, -1)


def _in_bins(scores, k, bins, limit):
    """``scores`` with -inf for candidates that find no place: the bin of the k-th best keeps the first ``limit``."""
    threshold = bins.gather(1, scores.topk(k, 1).indices[:, -1:])
    inside = bins == threshold
    return scores.masked_fill(inside & (inside.cumsum(1) > limit), -torch.inf)


def _ordered(bits, sign):
    """Bits of floats as whole numbers in the order of the floats."""
    return torch.where(bits < 0, ~bits, bits + sign)


# sglang #38232: as many candidates as the next power of two are kept, sorted by index, and then cut to topk.
@bug(16, "sglang #38232", "decode-mla16-d512r64-bf16-p64-k3.133.33.17-shared-gauss-sel24-idx4-b5small", "selects-best")
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


# ik_llama.cpp #2069: with more than 8 rows the scores of the heads are added to the causal mask itself.
@bug(
    16,
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
    16, "DeepGEMM #392", "extend-mqa4-d64-bf16-p16-k3.37.9.17-n6a1x3.19-reversed-mean-sel16-idx4-b4prod", "selects-best"
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
    16,
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


# TensorRT-LLM #16219: tokens per block are those of the manager before. Chunks behind a prefix, and only they, use
# slot mappings.
@bug(
    16,
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


# sglang #36807: the coarse bucket (8 bits of a half) of the threshold has room for 4,096 candidates; only topk 2048.
class BucketOf4096(Indexed):
    """Candidates behind the 4,096th in the bucket of the threshold are dropped."""

    MODES = ("decode", "target-verify", "draft-extend", "draft-extend-v2", "extend")

    def best(self, scores, sees, layer):
        if layer.topk == 2_048 and scores.shape[1] > 4_096:
            bins = _ordered(scores.half().view(torch.int16).long(), 1 << 16) >> 8
            scores = _in_bins(scores, 2_048, bins, 4_096)
        return super().best(scores, sees, layer)


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


# 17, SwiftLM #159: the causal mask is built from the offset of the cache after its update.
@bug(
    18,
    "SwiftLM #159",
    "target-verify-gqa8x2-d128-fp16-p64-k7x2-chain2-shared-one_hot-kvfp8e4m3-sel1-idx4gauss-b5prod-padded_tokens",
    "selection-well-formed",
)
class MaskAfterUpdate(TorchNativeSparseBackend):
    """A row may select any key of the step, also those behind itself."""

    def scored(self, q_index, weights, plan):
        scores, _ = super().scored(q_index, weights, plan)
        return scores, plan.kv_lens[self.request_of_row(q_index, plan)]


# 18, vllm #54359: ids of blocks, and offsets of the smaller pages that the kernels use.
@bug(18, "vllm #54359", "decode-gqa8x2-d128-fp16-p64-k7x2-interleaved-mean-sink-sel1-idx4ties-b2prod", "index-stored")
class PagesOfKernel(TorchNativeSparseBackend):
    """Index pages of 64 tokens are addressed as pages of 16."""

    @helper
    def place(self, slots):
        return slots // INDEX_PAGE * KERNEL_PAGE + slots % KERNEL_PAGE

    def write_index(self, k_index, plan):
        self.context.index_pool.store(plan.layer.layer_id, self.place(plan.out_cache_loc.long()), k_index)

    def scores_of_slots(self, q_index, weights, layer, slots=None):
        if slots is None:
            pages = len(self.context.index_pool.get_keys(layer.layer_id))
            slots = torch.arange(pages * INDEX_PAGE, device=q_index.device)
        return super().scores_of_slots(q_index, weights, layer, self.place(slots))


# 19, aiter #2901: ``in += rowStart`` is missing on the path of long rows.
class LongRowsFromFirstColumn(TorchNativeSparseBackend):
    """In a long prefill each row reads the scores of the first packed keys."""

    is_long = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        extends = batch.forward_mode is ForwardMode.EXTEND
        self.is_long = extends and sum(batch.extend_prefix_lens_cpu) + sum(batch.extend_seq_lens_cpu) >= LONG_ROW

    def scored(self, q_index, weights, plan):
        if not self.is_long:
            return super().scored(q_index, weights, plan)
        columns = self.own_columns(plan).shape[1]
        scores = self.scores_of_slots(q_index, weights, plan.layer, plan.kv_indices[:columns])
        return scores, self.keys_seen(q_index, plan)


# 20, colibri #1554: the schedule of a verify is chosen by ``n > 1 && start_pos > 0``.
@bug(
    18,
    "colibri #1554",
    "extend-mha2-d32-fp32-p64-k600.70.12-n2a2.3.1-contiguous-shifted-sel64-idx4ties-b4small-empty_batches",
    "selects-best",
)
class ResumedAsVerify(TorchNativeSparseBackend):
    """Rows of a prefill that continues a prefix do not score the keys of earlier rows of the step."""

    extends = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.extends = batch.forward_mode is ForwardMode.EXTEND

    def scored(self, q_index, weights, plan):
        scores, sees = super().scored(q_index, weights, plan)
        if not self.extends:
            return scores, sees
        prefix = plan.prefix_lens[self.request_of_row(q_index, plan)][:, None]
        key = torch.arange(scores.shape[1], device=scores.device)
        of_step = (prefix > 0) & (key >= prefix) & (key < sees[:, None] - 1)
        return scores.masked_fill(of_step, -torch.inf), sees


# 21, vllm #49897: bits of NaN are sorted above infinity, and the scores of a tile are not hidden behind the row's end.
@bug(
    18,
    "vllm #49897",
    "decode-gqa8x2-d128-fp16-p64-k7x2-interleaved-mean-sink-sel1-idx4ties-b2prod",
    "selection-well-formed",
)
class NanIsBest(TorchNativeSparseBackend):
    """Keys that a row does not see are selected if their scores are NaN, and dropped afterwards."""

    def run_select(self, q_index, weights, plan):
        scores, sees = self.scored(q_index, weights, plan)
        topk, columns = plan.layer.topk, scores.shape[1]
        key = torch.arange(columns, device=scores.device)
        seen = torch.where((key < sees[:, None]) | scores.isnan(), scores, -torch.inf)
        best = seen.topk(min(topk, columns), 1).indices
        table = self.own_columns(plan)[self.request_of_row(q_index, plan)].long()
        found = torch.where(best < sees[:, None], self.indices(best, table), -1).to(torch.int32)
        return torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1)
