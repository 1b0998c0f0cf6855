"""Class S: indexers of sparse attention: index keys in the wrong bytes, wrong scores, and wrong selections."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, Indexer, KernelPlan, Sparse

from .catalogue import fault
from .indexer import INDEX_MODES, FusedIndexer, IndexerOfPrefixes, IndexerParent
from .pool_addresses import without_carry

_STORED, _FORM, _BEST = "index-stored", "selection-well-formed", "selects-best"
_PAGE_BYTES = 64 * 132


def _page_in_32_bits(page: torch.Tensor, pages: int) -> torch.Tensor:
    """Pages that are addressed instead of ``page`` if byte offsets of pages have 32 bits."""
    return (page.to(torch.int32) * _PAGE_BYTES).long().div(_PAGE_BYTES, rounding_mode="floor") % pages


@fault("ROCm/ATOM #1466", _STORED, "layers share a view of scales", modes=INDEX_MODES)
class IndexScalesOfFirstLayer(IndexerParent):
    """The view of scales has an offset into the whole memory, without the offset of its layer, so all layers share one
    view."""

    def scale_plane(self, layer_id: int) -> torch.Tensor:
        assert self.context.index_pool is not None
        return super().scale_plane(self.context.index_pool.layer_ids[0])


@fault(
    "ROCm/ATOM #1466",
    _BEST,
    "scales of the keys are those of the first layer",
    modes=INDEX_MODES,
    modelled="upstream the scales are written to the first layer's plane too; here only reads are wrong",
)
class IndexScalesOfFirstLayerRead(IndexerParent):
    """Scores of all layers have the scales of the first one."""

    def gathered(self, slots: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.context.index_pool is not None
        first = self.context.index_pool.layer_ids[0]
        return super().gathered(slots, layer_id)[0], super().gathered(slots, first)[1]


@fault("1CatAI/1Cat-vLLM #250", _STORED, "written token by token", modes=INDEX_MODES)
class IndexPageWrittenByToken(IndexerParent):
    """A key is stored with its scale right after it, in rows of 132 bytes."""

    def put(
        self, keys: torch.Tensor, scales: torch.Tensor, page: torch.Tensor, place: torch.Tensor, layer_id: int
    ) -> None:
        assert self.context.index_pool is not None
        rows = self.context.index_pool.get_index_buffer(layer_id).view(-1, 64, 132)
        rows[page, place] = torch.cat([keys, scales[:, None].view(torch.uint8)], 1)


@fault("1CatAI/1Cat-vLLM #250; vLLM #50576", _BEST, "read token by token", modes=INDEX_MODES)
class IndexPageReadByToken(IndexerParent):
    """A key is read at 132 times its place in the page, and four FP8 numbers are read as its scale."""

    def gathered(self, slots: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.context.index_pool is not None
        rows = self.context.index_pool.get_index_buffer(layer_id).view(-1, 64, 132)[slots // 64, slots % 64]
        keys = rows[..., :128].contiguous().view(torch.float8_e4m3fn).float()
        return keys.nan_to_num(0.0), rows[..., 128:].contiguous().view(torch.float32)[..., 0].nan_to_num(0.0)


@fault("1CatAI/1Cat-vLLM #250", _BEST, "ReLU", modes=INDEX_MODES)
class IndexerWithoutRelu(IndexerParent):
    """Negative products of a head count."""

    def products(self, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return q.float() @ keys.mT


@fault(
    "mlx-lm #1454",
    _BEST,
    "the last 16 keys",
    modes=INDEX_MODES,
    modelled="upstream from 128k keys on; here at any length",
)
class IndexerScoresAreZero(IndexerParent):
    """All scores are 0, and the last keys are selected."""

    def scored(self, q: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        scores = super().scored(q, weights, plan)
        return torch.arange(scores.shape[1], device=q.device).expand_as(scores).to(scores.dtype)


@fault("antirez/ds4 #358", _BEST, "top-k and the number of keys are exchanged", modes=INDEX_MODES)
class IndexerTopkAndLengthExchanged(IndexerParent):
    """Top-k gets its two numbers in the wrong order, and sorts the first topk keys."""

    def best(self, scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
        return super().best(scores, lengths.clamp(max=topk), topk)


@fault("tonyd2wild/DeepSeek-v4-Flash-DGX-Spark #2", (_FORM, "reads-own-kv", "matches-oracle"), modes=INDEX_MODES)
class IndexerStaleBehindTheCount(IndexerParent):
    """The output is a persistent buffer, and a row fills only as many columns as it has keys."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        rows, topk = max(context.max_num_tokens, 1) * 4, context.layers[0].topk
        self.buffer = torch.arange(topk, dtype=torch.int32, device=context.device).repeat(rows, 1)

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        found = super().run_select(q_index, weights, plan)
        mine = self.buffer[: len(found)]
        mine.copy_(torch.where(found >= 0, found, mine))
        return mine.clone()


@fault(
    "vLLM #32175 (#32172)",
    _STORED,
    modes=INDEX_MODES,
    executions="graph",
    modelled="upstream the padded rows have the slots of an earlier step; here the slots after the first live row's",
)
class IndexKeysOfPaddingStored(IndexerParent):
    """Padded rows are stored too, in a slot that they do not own."""

    def pool_slots(self, plan: KernelPlan) -> torch.Tensor:
        slots = super().pool_slots(plan)
        assert self.context.index_pool is not None
        last = self.context.kv_pool.num_slots - 1
        return torch.where(slots < self.context.page_size, last - slots, slots)


@fault(
    "sglang #33059 (#32762)",
    (_FORM, _BEST),
    modes=INDEX_MODES,
    modelled="upstream padded rows shift the lengths; here each row has the length of the row before it",
)
class IndexerRowsAndLengthsDiffer(IndexerParent):
    """Scores and lengths have different numbers of rows, so a row uses the length of another."""

    def lengths(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().lengths(rows, plan).roll(1)


@fault(
    "vLLM #51538 (#51593); TensorRT-LLM #16290", (_FORM, _BEST), "of the capture", modes=INDEX_MODES, executions="graph"
)
class IndexerLengthOfTheCapture(IndexerParent):
    """Lengths are computed by the plan of the capture, and replays use them."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def lengths(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        found = super().lengths(rows, plan)
        kept = self.kept.setdefault((len(rows), plan.layer.layer_id), found.clone())
        return kept if torch.cuda.is_current_stream_capturing() else kept.copy_(found)


@fault(
    "general; TensorRT-LLM #16290 (an output that the allocator gives away)",
    "matches-oracle reads-own-kv finite",
    modes=INDEX_MODES,
    modelled="here the next operation clears the memory, where upstream another subsystem writes it",
)
class SelectionBufferOfAllLayers(IndexerParent):
    """The selection is in scratch memory, which the attention of the same layer clears before it reads the
    selection."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return torch.where(torch.arange(selected.shape[1], device=selected.device) < 1, selected, -1)


@fault("sglang #31218", _STORED, modes=INDEX_MODES, modelled="upstream cached keys are moved; here new keys are stored")
class IndexSlotTakenForPage(IndexerParent):
    """The pool's rows are pages, and a slot is used as the number of a row."""

    def put(
        self, keys: torch.Tensor, scales: torch.Tensor, page: torch.Tensor, place: torch.Tensor, layer_id: int
    ) -> None:
        pages = len(self.key_plane(layer_id))
        super().put(keys, scales, (page * 64 + place).clamp(max=pages - 1), place * 0, layer_id)


@fault(
    "TensorRT-LLM #18658",
    _BEST,
    "scales of the keys are left out",
    modes=INDEX_MODES,
    modelled="upstream the block scale of the key projection is dropped; here the scale of a key",
)
class IndexerKeyScaleDropped(IndexerParent):
    """Scores are products of FP8 numbers without their scale."""

    def gathered(self, slots: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, scales = super().gathered(slots, layer_id)
        return keys, torch.where(scales.isfinite(), 1.0, scales)


@fault(
    "tilelang #2069",
    "output-contract",
    modes=INDEX_MODES,
    executions="eager",
    modelled="upstream the width is the number of blocks; here that of the longest request of an eager step",
)
class SelectionClippedToTheKeys(IndexerParent):
    """The result has only as many columns as the longest request has keys if those are fewer than topk."""

    def select(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        found = super().select(q_index, weights, layer, batch)
        return found[:, : layer.topk - 1] if layer.topk > 1 else found


@fault(
    "ik_llama.cpp #2063, #2095 (layers that share a selection)",
    "matches-oracle steps-independent finite reads-own-kv replay-follows-batch",
    modes=INDEX_MODES,
    modelled="upstream such layers select by themselves; here they keep their own selection",
)
class SelectionReusedFromTheStepBefore(IndexerParent):
    """A layer that uses the selection of the layer before it keeps a copy, and attends to the keys of the step
    before."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        if not plan.layer.reuses_selection:
            return selected
        kept = self.kept.setdefault((len(selected), plan.layer.layer_id), selected.clone())
        old = kept.clone()
        kept.copy_(selected)
        return old


@fault("general; ROCm/ATOM #809 (an argument of another layout)", _BEST, modes=INDEX_MODES)
class IndexerGatesWithoutSign(IndexerParent):
    """The weights of the heads are assumed to be positive, like weights of a softmax."""

    def scored(self, q: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().scored(q, weights.abs(), plan)


@fault(
    "general; vllm-ascend #10827 (another number of tokens than were stored)",
    (_BEST, _FORM),
    "keys of this step are not selected",
    modes=INDEX_MODES,
)
class IndexerScoresBeforeTheStore(IndexerParent):
    """The new tokens are not among the keys that compete."""

    def lengths(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return plan.prefix_lens[self.request_of_row(rows, plan)].long()


@fault("general; DeepGEMM's UE8M0 scales", _STORED, "powers of two are declared", modes=INDEX_MODES)
class IndexScaleNotAPowerOfTwo(IndexerParent):
    """Scales are amax / 448, and the scoring kernel reads only their exponent."""

    capabilities = IndexerParent.capabilities.with_changes(
        sparse=Sparse(topk={16}, indexer=Indexer(heads={4}, scale="power_of_two"))
    )


@fault(
    "general; sglang dsa (skip_topk in a layer with its own index keys)",
    _BEST,
    "of the layer before",
    modes=INDEX_MODES,
)
class SelectionOfTheLayerBefore(IndexerParent):
    """Queries and index keys come from the layer before."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.of_before: dict[int, torch.Tensor] = {}

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        first = plan.layer.layer_id == self.context.layers[0].layer_id
        if first or len(q_index) not in self.of_before:
            self.of_before[len(q_index)] = super().run_select(q_index, weights, plan)
        return self.of_before[len(q_index)].clone()


@fault(
    "ROCm/ATOM #1466; mlx-lm #1454 (in a kernel that attends too)",
    "matches-oracle",
    "the first 16 keys are attended",
    modes=INDEX_MODES,
)
class FusedIndexerScoresAreZero(FusedIndexer):
    """All scores are 0 in a fused kernel, so the first keys are attended to."""

    def scored(self, q: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        scores = super().scored(q, weights, plan)
        return -torch.arange(scores.shape[1], device=q.device).expand_as(scores).to(scores.dtype)


@fault(
    "general; a fused kernel without a barrier between the store of index keys and their scores",
    "matches-oracle finite",
    "scored before they are stored",
    modes=INDEX_MODES,
    modelled="upstream a race; here the store always comes too late",
)
class FusedIndexerStoresAfterItReads(FusedIndexer):
    """The keys of the step are stored after the scores are computed, so they compete only in the next step."""

    def lengths(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return plan.prefix_lens[self.request_of_row(rows, plan)].clamp(min=1).long()


@fault(
    "sglang #34725",
    (_BEST, _FORM, "reads-own-kv", "finite"),
    "beyond 2",
    modes=INDEX_MODES,
    slug="index-page-offset-in-32-bits",
    modelled="upstream a negative offset leaves the pool; here it is taken modulo the pool",
)
class IndexPageOffsetIn32Bits(IndexerParent):
    """The byte at which a page of index keys begins is a product of 32-bit integers."""

    def gathered(self, slots: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        page = _page_in_32_bits(slots // 64, len(self.key_plane(layer_id)))
        return super().gathered(page * 64 + slots % 64, layer_id)


@fault(
    "sglang #34725 (in the kernel that stores)",
    _STORED,
    modes=INDEX_MODES,
    slug="index-store-offset-in-32-bits",
    modelled="upstream a negative offset leaves the pool; here it is taken modulo the pool",
)
class IndexStoreOffsetIn32Bits(IndexerParent):
    """New index keys beyond 2^31 bytes are stored elsewhere."""

    def put(
        self, keys: torch.Tensor, scales: torch.Tensor, page: torch.Tensor, place: torch.Tensor, layer_id: int
    ) -> None:
        super().put(keys, scales, _page_in_32_bits(page, len(self.key_plane(layer_id))), place, layer_id)


@fault(
    "general; aiter #3824 (of a KV pool)",
    (_BEST, _FORM, "reads-own-kv", "finite"),
    modes=INDEX_MODES,
    modelled="upstream it reads 4 GiB lower; here that is taken modulo the pool",
)
class IndexAddressWithoutCarry(IndexerParent):
    """The offset of a page is added to the lower word of the address of a layer's index keys, and the carry is lost."""

    def gathered(self, slots: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        page = without_carry(self.key_plane(layer_id), slots // 64)
        return super().gathered(page * 64 + slots % 64, layer_id)


@fault(
    "aiter #4376; sglang #31115; ROCm/ATOM #1832",
    "repeatable",
    "order of arrival",
    modes=INDEX_MODES,
    executions="eager",
    modelled="upstream atomics give the order of arrival; here it is another one in each call",
)
class IndexerTiesByArrival(IndexerParent):
    """Top-k takes tied keys in the order of arrival; the keys of a row are then sorted by place."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.calls = torch.zeros(1, dtype=torch.int64, device=context.device)

    def best(self, scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
        self.calls += 1
        place = torch.arange(scores.shape[1], device=scores.device)
        arrival = ((place + self.calls) * 40_503 % 65_537).argsort()
        behind = (place >= lengths[:, None])[:, arrival]
        seen = scores[:, arrival].masked_fill(behind, -torch.inf)
        best = arrival[seen.sort(dim=1, descending=True, stable=True).indices[:, :topk]]
        best = torch.nn.functional.pad(best, (0, topk - best.shape[1]), value=scores.shape[1]).sort(1).values
        return torch.where(best < lengths[:, None], best, -1)


@fault("sglang #30645", _FORM, modes="decode extend", slug="indexer-keeps-1024-ties")
class IndexerKeeps1024Ties(IndexerParent):
    """Top-k keeps at most 1,024 keys that tie at the threshold; the rest of the row is -1."""

    capabilities = IndexerParent.capabilities.with_changes(
        eager={"decode", "extend"}, graph={"decode", "extend"}, sparse=Sparse(topk={2048}, indexer=Indexer(heads={4}))
    )
    KEPT = 1024

    def best(self, scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
        found = super().best(scores, lengths, topk)
        there = found >= 0
        of_found = scores.gather(1, found.clamp(min=0)).masked_fill(~there, torch.inf)
        tied = there & (of_found == of_found.amin(1, keepdim=True)) & (lengths > topk)[:, None]
        return torch.where(tied & (tied.cumsum(1) > self.KEPT), -1, found)


@fault(
    "vLLM #46074",
    "completes",
    "must match",
    modes="target-verify draft-extend-v2",
    modelled="upstream one column is missing; here those of the drafts are",
)
class IndexerTableOfTheContext(IndexerOfPrefixes):
    """Page tables are repeated for each row in a buffer as wide as the context, but the request table is wider."""

    def scored(self, q: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        page = self.context.page_size
        table = plan.slot_table[self.request_of_row(q, plan), ::page]
        buffer = table.new_empty(len(table), -(-self.context.max_context_len // page))
        buffer.copy_(table)
        return super().scored(q, weights, plan)


@fault(
    "general; rows of scores with context_len columns, where the request table has num_draft_tokens more",
    (_BEST, _FORM),
    modes="target-verify draft-extend-v2",
)
class IndexerScoresEndWithTheContext(IndexerOfPrefixes):
    """Keys after the context, which belong to drafts, have no score and are never selected."""

    def lengths(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().lengths(rows, plan).clamp(max=self.context.max_context_len)


@fault(
    "aiter #4244",
    _BEST,
    modes="extend",
    slug="indexer-rows-behind-2-gib",
    modelled="rows have a float32 for each column of the request table, of which only those of keys are computed here",
)
class IndexerRowsBehind2GiB(IndexerParent):
    """Offsets of rows of scores have 32 bits: rows that begin at 2^31 bytes or later (``wide_scores``) are not stored,
    and are 0.
    """

    def scored(self, q: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        scores = super().scored(q, weights, plan)
        begins = torch.arange(len(scores), device=q.device) * plan.slot_table.shape[1] * scores.element_size()
        return scores.masked_fill((begins >= 1 << 31)[:, None], 0.0)


@fault(
    "sglang #36807; vLLM #52149 (of 16,384, for more than 32 rows)",
    _BEST,
    "late ones of one bin",
    modes="decode extend",
    slug="indexer-bin-of-4096",
)
class IndexerBinOf4096(IndexerKeeps1024Ties):
    """The bin of the threshold (8 bits of a half) keeps its first 4,096 keys; later keys are lost, even better ones."""

    KEPT = 4096

    def best(self, scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
        place = torch.arange(scores.shape[1], device=scores.device)
        seen = torch.where(place < lengths[:, None], scores, -torch.inf)
        bits = seen.half().view(torch.int16).int()
        bins = torch.where(bits < 0, ~bits, bits + (1 << 16)) >> 8
        last = bins.gather(1, seen.topk(min(topk, seen.shape[1]), 1).indices[:, -1:])
        inside = bins == last
        kept = scores.masked_fill(inside & (inside.cumsum(1) > self.KEPT), -torch.inf)
        return IndexerParent.best(self, kept, lengths, topk)


_NARROW = 64
"""Widest selection of a kernel for narrow selections."""
_NARROW_AND_WIDER = IndexerParent.capabilities.with_changes(
    eager={"decode", "extend"},
    graph={"decode", "extend"},
    sparse=Sparse(topk={_NARROW, 128}, indexer=Indexer(heads={4})),
)


@fault(
    "vLLM #52149; sglang #36807 (both of wide selections; here of a narrow one)",
    _BEST,
    "late ones of one bin",
    modes="decode extend",
)
class IndexerBinOfNarrowSelections(IndexerBinOf4096):
    """A top-k of 64 or less has its own kernel, whose bin of the threshold keeps its first 16,384 keys."""

    capabilities = _NARROW_AND_WIDER
    KEPT = 16_384

    def best(self, scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
        right = IndexerParent.best(self, scores, lengths, topk)
        return super().best(scores, lengths, topk) if topk <= _NARROW else right


@fault("sglang #30645 (of a wide selection; here of a narrow one)", _FORM, modes="decode extend")
class IndexerTiesOfNarrowSelections(IndexerParent):
    """A top-k of 64 or less has its own kernel, which selects none of the keys that tie at the threshold if there are
    more than 4,096.
    """

    capabilities = _NARROW_AND_WIDER
    KEPT = 4096

    def best(self, scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
        found = super().best(scores, lengths, topk)
        if topk > _NARROW or scores.shape[1] <= topk:
            return found
        of_found = scores.gather(1, found.clamp(min=0)).masked_fill(found < 0, torch.inf)
        last = of_found.amin(1, keepdim=True)
        seen = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
        many = ((scores == last) & seen).sum(1, keepdim=True) > self.KEPT
        return found.masked_fill((of_found == last) & many, -1)
