"""Ranks of context parallelism."""

from __future__ import annotations

import torch
from parents_launchers import wide
from parents_native import Native
from parents_ranks import GivenRank, LatentRank, Rank
from plain_backends import DRAFT_EXTENDS, declared
from plain_splits import WithKVSplits

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug, helper


@bug(2, "vLLM #48003", "decode-gqa2x2-d64-bf16-p16-k1500.70-shared-gauss-lsepages2merged-b3prod", "log-sum-exp")
class GlobalLengthsOnARank(WithKVSplits):
    """The plan of a rank counts the keys of all ranks: it reads pages that are not its own."""

    def held(self, plan, place):
        if plan.part.kind != "rank":
            return super().held(plan, place)
        return place < plan.kv_lens[:, None]

    def sees(self, key, rows):
        if rows.plan.part.kind != "rank":
            return super().sees(key, rows)
        return torch.ones_like(key, dtype=torch.bool)


@bug(
    6,
    "tokenspeed #364",
    "extend-gqa2x2-d64-bf16-p16-k0.35.0.16.1.70.33.9.17-n2a2.1.2.1.2.1.2.1.2-reversed-gauss-lsetokens3-b10prod",
    "log-sum-exp",
)
class LocalCausal(WithKVSplits):
    """A rank's keys are masked causally by their number on the rank."""

    capabilities = declared(
        "decode",
        "extend",
        "draft-extend-v2",
        kv_pool={"page_sizes": {16}},
        bounds={"max_context_len": 2048},
        lse=LogSumExp(base="e", whole={"decode"}, tokens={"decode", "extend", "draft-extend-v2"}, merges=True),
    )

    def sees(self, key, rows):
        if rows.plan.part.kind != "rank":
            return super().sees(key, rows)
        nth = torch.arange(key.shape[1], device=key.device)
        last = rows.plan.part_lens[rows.request].long() - rows.new + rows.place
        return nth <= last[:, None]


@bug(
    14,
    "vllm-ascend #11849",
    "target-verify-gqa2x2-d64-bf16-p16-k300.7-chain2-reversed-negative-lsepages2merged-b3prod",
    "log-sum-exp",
)
class OwnKeyNotCounted(WithKVSplits):
    """The bound of a row among a rank's keys counts those before the row; of none, the mask is left out."""

    capabilities = WithKVSplits.capabilities.with_changes(
        eager={"decode", "target-verify"}, graph={"decode", "target-verify"},
        lse=LogSumExp(
            base="e", whole={"decode", "target-verify"}, pages={"decode", "target-verify"}, prefix=(), merges=True
        ),
    )  # fmt: skip

    def sees(self, key, rows):
        right = super().sees(key, rows)
        if rows.plan.part.kind != "rank" or rows.plan.max_q_len == 1:
            return right
        before = key < rows.position[:, None]
        return torch.where(before.any(-1, keepdim=True), right & before, torch.ones_like(right))


# sglang #39737: a draft-extend takes lengths of all ranks for those of one.
@bug(
    16,
    "sglang #39737",
    "draft-extend-gqa4x16-d128-bf16-p1-k130.5.40-n2a2.1.2-shared-gauss-lsetokens3-b4prod",
    "log-sum-exp",
)
class BoundsOfAllRanks(Native):
    """In a draft-extend the n-th key of a rank is visible if n is not behind the row's place among all keys."""

    capabilities = wide(
        "decode", *DRAFT_EXTENDS, lse=LogSumExp(
            base="e", **{kind: {"decode", *DRAFT_EXTENDS} for kind in ("whole", "pages", "tokens")}
        ),
    )  # fmt: skip
    part = None

    def forward_return_lse(self, q, k, v, layer, batch, save_kv_cache=True, *, part):
        self.part = part
        return super().forward_return_lse(q, k, v, layer, batch, save_kv_cache, part=part)

    def _in_window(self, layer):
        seen = super()._in_window(layer)
        if self.mode not in DRAFT_EXTENDS or self.part is None or self.part.kind != "rank":
            return seen
        number = self.part.holds(self._key, self._prefix[:, None]).cumsum(-1) - 1
        bounded = number[:, None] <= self._position[..., None]
        return bounded & (self._key <= self._last_key)[:, None]


# vllm #36070: dcp_context_kv_lens is computed in each step, and its address is baked into the graph.
@bug(
    17,
    "vllm #36070",
    "decode-gqa2x2-d64-bf16-p1-k1.2.5.9.14.2.30-shuffled-rising_logits-ranks3by2-b8small",
    "log-sum-exp",
    execution="graph",
)
class ContextLensOfCapture(Rank):
    """A replay of a decode attends as much context as its capture had; the other metadata are the replay's."""

    capturing = False

    def __init__(self, context):
        super().__init__(context)
        self.of_captures = []

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.capturing = in_capture
        super().init_forward_metadata_out_graph(batch, in_capture)

    def kept(self, name, value):
        if name != "context" or self.mode != "decode" or not self.is_rank:
            return super().kept(name, value)
        if self.capturing:
            self.of_captures.append(value)
        return value


# vllm-ascend #11072: the mask is made if num_decode_reqs > 0, and warm-up requests have no computed tokens.
@bug(
    17,
    "vllm-ascend #11072",
    "target-verify-gqa2x2-d64-bf16-p16-k0.1.16-chain4-reversed-peaked-ranks3by2-b4nan",
    "log-sum-exp",
    execution="graph",
)
class MaskOfNoContext(Rank):
    """A verify graph has no mask: no request of its capture has context, and then none is made."""

    capturing = False

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.capturing = in_capture
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.capturing = False

    def mask_of(self, plan):
        # The capture's requests have the fill value of lengths, 0.
        return None if self.capturing and self.is_rank else super().mask_of(plan)


# vllm #47181: local(G - k) is not local(G) - k.
@bug(
    17, "vllm #47181", "target-verify-gqa2x2-d64-bf16-p16-k0.1.16-chain4-reversed-peaked-ranks3by2-b4nan", "log-sum-exp"
)
class BoundFromLastLocal(Rank):
    """Row j of a verify sees all keys of the rank but the last N - 1 - j."""

    def bounds(self, rows, plan):
        if self.mode != "target-verify" or not self.is_rank:
            return super().bounds(rows, plan)
        return (plan.local[rows.request] - (self.context.num_draft_tokens - 1 - rows.place)).clamp(min=0)

    def sees_context(self, index, rows):
        seen = super().sees_context(index, rows)
        if self.mode != "target-verify" or not self.is_rank:
            return seen
        return seen & (index < self.bounds(rows, self.plan)[:, None])


# vllm #38416: kernels initialize the log-sum-exp with 0.
@bug(
    17,
    "vllm #38416",
    "decode-mla16-d512r64-bf16-p1-k32.128.64.16.63-reversed-gauss-ranks3by2-b6nan",
    "log-sum-exp",
    execution="graph",
)
class ZeroLseOfEmpty(LatentRank):
    """In a decode the log-sum-exp of a rank without keys of the request is 0, and its output zeros."""

    def attend(self, q, k, v, layer, batch, save_kv_cache):
        out, lse = super().attend(q, k, v, layer, batch, save_kv_cache)
        if self.mode != "decode" or not batch.batch_size:
            return out, lse
        empty = self.plan.local[self.rows_of(q).request] == 0
        return out, lse.masked_fill(empty[:, None], 0.0)


# aiter #4342: `if (slot_idx < 0) return;` skips the query as well.
@bug(17, "aiter #4342", "decode-mla16-d512r64-bf16-p1-k32.128.64.16.63-reversed-gauss-ranks3by2-b6nan", "log-sum-exp")
class QueryOnlyWithSlot(LatentRank):
    """In a decode the query of a token that another rank stores is what the buffer holds."""

    def __init__(self, context):
        super().__init__(context)
        layer = context.layers[0]
        size = context.max_num_tokens, layer.tp_q_head_num, layer.head_dim
        self.queries = torch.zeros(size, dtype=context.dtype, device=context.device)

    def query(self, q, batch):
        if self.mode != "decode":
            return q
        kept = self.queries[: len(q)]
        kept.copy_(torch.where(batch.out_cache_loc[:, None, None] >= 0, q, kept))
        return kept.clone()


# vllm-ascend #14534: the fused prolog of a decode writes with the slot mapping of the replicated cache.
@bug(
    17,
    "vllm-ascend #14534",
    "decode-gqa2x2-d64-bf16-p1-k1.2.5.9.14.2.30-shuffled-rising_logits-ranks3by2-b8small",
    "writes-own-kv",
)
class ReplicatedSlots(Rank):
    """A decode stores each token in the slot that the table has at its global position, on every rank."""

    def slots(self, batch, rows):
        if self.mode != "decode" or not self.is_rank:
            return super().slots(batch, rows)
        return self.plan.table[rows.request, rows.position.clamp(max=self.columns - 1)]


# vllm #28526: reorg_kvcache takes local_context_len keys of a request from each chunk.
@bug(
    17,
    "vllm #28526",
    "extend-mla16-d512r64-bf16-p1-k150.70-n2a2.1-contiguous-mean-ranks2by1-b3prod",
    "log-sum-exp",
    of_a_tier="extend-mla16-d512r64-bf16-p64-k600.70.12-n45a3.131.1-chunks3-reversed-mean-layers2from5-ranks3by2-"
    "b3prod-overlap_scheduling",
)
class ChunksOfWholeContext(LatentRank):
    """In an extend each chunk gives a request as many keys as its whole context on the rank, from its own place in the
    gathered chunk on: the keys of other requests follow."""

    def context_part(self, q, layer, rows, chunk):
        if self.mode != "extend" or not self.is_rank:
            return super().context_part(q, layer, rows, chunk)
        bs, size = len(self.plan.local), self.CHUNK
        place = torch.arange(min(self.columns, bs * size), device=q.device)
        gathered = rows.request[:, None] * size + place
        seen = (place < self.plan.context[rows.request][:, None]) & (gathered < bs * size) & self.is_live(chunk)
        gathered = gathered.clamp(max=bs * size - 1)
        index = chunk * size + gathered % size
        # A gathered chunk is padded with zeros behind the context of a request.
        filled = index < self.plan.context[gathered // size]
        slots = self.plan.table[gathered // size, index.clamp(max=self.columns - 1)]
        page = self.context.page_size
        pages = self.context.kv_pool.get_kv_pages(layer.layer_id)
        keys, values = (side[slots // page, slots % page].masked_fill(~filled[..., None, None], 0.0) for side in pages)
        return self.share(q, keys, values, seen, layer)

    @helper
    def is_live(self, chunk):
        """True if some request has keys in the chunk: others are not attended at all."""
        return (self.plan.context > chunk * self.CHUNK).any()


# vllm-ascend #15600: num_computed_tokens_of_dcp has the full length of the draft's keys.
@bug(
    17,
    "vllm-ascend #15600",
    "draft-extend-gqa2x2-d64-bf16-p16-k600.70.12-n4a1x3-contiguous-shifted-ranks3by2-b6stale",
    "log-sum-exp",
)
class DraftInContext(Rank):
    """In a draft-extend the context of the rank has the draft's rows too; each row sees them without a mask, and its
    own part of them once more."""

    def context_of(self, first, local):
        return local if self.mode in DRAFT_EXTENDS and self.is_rank else first


# aiter #3542: log-sum-exps of splits are packed into the bf16 buffer of partial outputs.
@bug(17, "aiter #3542", "decode-mla16-d512r64-bf16-p1-k32.128.64.16.63-reversed-gauss-ranks3by2-b6nan", "log-sum-exp")
class SplitLseInHalf(LatentRank):
    """In a decode the log-sum-exp of each KV split of the rank is rounded to bf16 before the merge."""

    def partial(self, out, lse):
        return (out, lse.bfloat16().float()) if self.mode == "decode" and self.is_rank else (out, lse)


# vllm #38895: the wrapper of new tokens is made for the layout of the pool.
@bug(
    17,
    "vllm #38895",
    "extend-gqa2x2-d64-bf16-p16-k7x2-n66a130.1-chunks3-shuffled-peaked-kvhnd-layers1from5-ranks3by2-b2prod-"
    "overlap_scheduling",
    "completes",
)
class NewRowsInPoolLayout(GivenRank):
    """An extend over a pool with heads first takes given rows [T, Hk, D] as heads first as well, and refuses them."""

    def as_given(self, side, layer):
        heads_first = self.is_rank and self.context.kv_pool.layout == "hnd"
        if heads_first and self.mode == "extend" and len(side) != layer.tp_k_head_num:
            raise ValueError(f"k has {len(side)} heads in layout HND, expected {layer.tp_k_head_num}")
        return super().as_given(side, layer)
