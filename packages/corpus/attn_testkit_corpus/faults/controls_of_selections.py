"""Healthy controls of sparse attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import BackendContext, Indexer, KernelPlan, Sparse
from attn_testkit.contract.row_format import in_tiles

from .catalogue import control
from .indexer import FusedIndexer, IndexerOfPrefixes, IndexerOnRanks, IndexerParent
from .packed_pages import Fp4RowsParent, PackedPagesParent
from .s_draft_selections import DraftIndexer
from .s_non_causal import NonCausalIndexer
from .s_rotated_indexers import RotatingIndexerParent
from .s_shared_selections import SelectionInABuffer
from .s_wider_buffers import IndexerOfViews, SparseOfViews
from .sparse import (
    GroupedSparse,
    PackedRowsParent,
    SparseBlocks,
    SparseOfHeads,
    SparseOfVLLM,
    SparseOfWidePages,
    SparseOnRanks,
    SparsePagesOfHeads,
    SparseParent,
    SparseWithSums,
    UnionOfRows,
)


@control()
class SparseByPositions(SparseParent):
    """Positions, with holes and empty rows: the parent of the faults of sparse attention."""


@control()
class SparseOfColumns(SparseOfViews):
    """Selected keys that are columns of a buffer that the server keeps."""


@control()
class IndexerOfColumns(IndexerOfViews):
    """Weights of an indexer that are columns of a buffer that the server keeps."""


@control()
class SparseBySlots(SparseParent):
    """Slots of the KV pool, as a fused top-k writes them, and no holes (sglang PAGED)."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={16, 64}, index_space="slots"))

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.clamp(min=0).long()


@control()
class SparseSortedFirst(SparseParent):
    """Indices are sorted before they are gathered, so that -1 comes first."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.sort(1).values


@control()
class SparseOneWidth(SparseParent):
    """A kernel that supports only one width of the selection, a wide one."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={64}, holes=True))


@control()
class SparseUnionOfRows(UnionOfRows):
    """Two rows share a tile of keys, and padded rows hold -1: the other keys that they gather are finite (sglang)."""


@control()
class IndexerThatRotates(RotatingIndexerParent):
    """An indexer that rotates queries and keys, and quantizes queries, as vLLM's and aiter's fused kernels."""


@control()
class IndexerByPages(IndexerParent):
    """Store and select with keys gathered page by page: the parent of the faults of indexers."""


@control()
class SelectionsOfBlocksInBothDirections(NonCausalIndexer):
    """Rows of a draft block or an encoder select from all keys of their request, later ones included."""


@control()
class IndexerPowerOfTwoScales(IndexerParent):
    """Scales of index keys are powers of two, and selections are slots (UE8M0; sglang PAGED)."""

    capabilities = IndexerParent.capabilities.with_changes(
        sparse=Sparse(topk={16}, index_space="slots", indexer=Indexer(heads={4, 8}, scale="power_of_two"))
    )

    def scales(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.exp2(super().scales(rows).log2().ceil())

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.clamp(min=0).long()

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        found = super().run_select(q_index, weights, plan)
        table = plan.slot_table[self.request_of_row(q_index, plan)]
        return torch.where(found < 0, found, table.gather(1, found.clamp(min=0).long())).to(torch.int32)


@control("indexer-of-prefixes")
class IndexerBehindTheContext(IndexerOfPrefixes):
    """Drafts of a request at the end of its context come after ``max_context_len``, and are scored there (sglang)."""


@control()
class IndexerUnsorted(IndexerParent):
    """Keys are listed from the lowest score to the highest, with -1 first: top-k kernels sort nothing."""

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().run_select(q_index, weights, plan).flip(1).contiguous()


@control()
class IndexerOneBuffer(IndexerParent):
    """All layers and steps have their selections in one buffer, and ties go to the newest key (TensorRT-LLM)."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        rows, topk = max(context.max_num_tokens, 1) * 4, context.layers[0].topk
        self.buffer = torch.empty(rows, topk, dtype=torch.int32, device=context.device)

    def best(self, scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
        places = scores.shape[1]
        place = torch.arange(places, device=scores.device)
        seen = torch.where(place < lengths[:, None], scores, -torch.inf).flip(1)
        order = places - 1 - seen.sort(1, descending=True).indices[:, :topk]
        order = torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=places)
        return torch.where(order < lengths[:, None], order, -1)

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        found = super().run_select(q_index, weights, plan)
        if len(found) > len(self.buffer):
            return found
        return self.buffer[: len(found)].copy_(found)


@control("selection-in-a-buffer")
class SlotsOfSelectionsInABuffer(SelectionInABuffer):
    """Layers that use the selection of another read its slots from a buffer of their instance (vLLM, ATOM)."""


@control("draft-indexer")
class DraftsThatSelect(DraftIndexer):
    """Each forward of a draft selects, or later ones use what the first selected, in a buffer (vLLM, ATOM)."""


@control("sparse-with-sums")
class SparseWithLogSumExps(SparseWithSums):
    """Log-sum-exps of selected keys, and fewer selections than rows of q."""


@control()
class SparseOfGroups(GroupedSparse):
    """Several KV heads, each with a group of query heads."""


@control()
class SparseTwoThousand(SparseParent):
    """The width of DeepSeek V3.2."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={2048}, holes=True))


@control()
class IndexerFused(FusedIndexer):
    """The indexer is a part of ``forward``: one kernel scores, selects and attends."""


@control("sparse-blocks")
class SparseByBlocks(SparseBlocks):
    """Blocks of 16 keys, with holes; a row's own block ends with it."""


@control()
class SparsePackedRows(PackedRowsParent):
    """Packed rows with scales: dequantized in float32."""


@control()
class SparsePackedRowsInBf16(PackedRowsParent):
    """Keys are rounded to bf16 before both products, and scales come from a reciprocal (FlashMLA; sglang)."""

    def rounded(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.bfloat16().float()

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        packed = self.packed(plan.layer)
        rows, (first, last) = packed.pack(k), packed.offsets["scales"]
        if packed.format.name == "fp8_ds_mla":
            tiles = k[..., : plan.layer.kv_lora_rank].float().reshape(*k.shape[:-1], -1, 128)
            rows[..., first:last] = (tiles.abs().amax(-1) * (1 / 448)).clamp(min=1e-38).view(torch.uint8)
        self.context.kv_pool.get_key_buffer(plan.layer.layer_id).index_put_((plan.out_cache_loc.long(),), rows)


@control()
class SparsePackedPages(PackedPagesParent):
    """Scales after the numbers of a page are found by their first byte in it (FlashMLA, SGLang, vLLM)."""


@control()
class SparsePackedPagesInBf16(PackedPagesParent):
    """Rows of such pages are stored by reciprocals and logarithms, with 0 as unused byte (vLLM). Keys are rounded to
    bf16 before both products (FlashMLA)."""

    def rounded(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.bfloat16().float()

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        layer, slot = plan.layer, plan.out_cache_loc.long()
        page, place = slot // self.context.page_size, slot % self.context.page_size
        count, key = self.numbers(layer), k[:, 0]
        tiles = in_tiles(key[:, :count].float(), self.tile)
        exponents = (tiles.abs().amax(-1).clamp(min=1e-4) * (1 / 448)).log2().ceil()
        numbers = (tiles * torch.exp2(-exponents)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
        # An unused byte is stored as 0.
        scales = torch.nn.functional.pad((exponents + 127).to(torch.uint8), (0, int(self.is_v4)))
        rows = torch.cat([numbers.view(torch.uint8), key[:, count:].contiguous().view(torch.uint8)], -1)
        pages = self.context.kv_pool.get_layer_buffer(layer.layer_id)
        for held, first in ((rows, self.numbers_at(place, layer)), (scales, self.scales_at(place, layer))):
            pages[page[:, None], first[:, None] + torch.arange(held.shape[1], device=page.device)] = held


@control()
class SparseFp4Rows(Fp4RowsParent):
    """FP4 rows of 352 bytes, with scales of every fourth tile together (vLLM)."""


@control("sparse-of-wide-pages")
class SparseInWidePages(SparseOfWidePages):
    """Pages with memory between them, and pages of all layers in one block (vLLM's packed blocks)."""


@control("sparse-of-vllm")
class SparseWithPaddedRequestsWithoutKeys(SparseOfVLLM):
    """Padded requests have a length of 0, and lengths of a verify count the step's own keys (vLLM)."""


@control()
class SelectedKeysOfRank(SparseOnRanks):
    """A rank of decode context parallelism filters and localizes the indices of one global selection, as in SGLang (the
    parent of the faults of selected keys on ranks)."""


@control()
class IndexerOfRank(IndexerOnRanks):
    """Index keys are on every rank of decode context parallelism, keys and values on one, as in SGLang."""


@control()
class BlocksOfEachKvHead(SparseOfHeads):
    """KV heads of a row attend to different blocks (NSA, MoBA, MiniMax-M3): the parent of faults about them."""


@control()
class PagesOfEachKvHead(SparsePagesOfHeads):
    """Each KV head has a list of pages, which replaces the page table (FlashInfer's block-sparse decode)."""


@control()
class PagesOfARow(SparsePagesOfHeads):
    """All heads of a row have one list of pages, which replaces the page table (sglang-jax's decode of MiniMax-M3)."""

    capabilities = SparsePagesOfHeads.capabilities.with_changes(sparse={"per_kv_head": False})

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        sets = plan.selected[:, None].expand(-1, plan.layer.tp_k_head_num, -1)
        return super().run(q, kv, replace(plan, selected=sets))


@control()
class BlocksByScore(SparseBlocks):
    """Blocks are selected by their scores, so a row may leave out its own (quest)."""

    capabilities = SparseBlocks.capabilities.with_changes(sparse={"without_own_block": True})


@control()
class UnionOfKvHeads(SparseOfHeads):
    """A row loads the blocks of all its KV heads at once, and those of other heads have a weight of 0."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        out = super().run(q, kv, plan)
        assert plan.selected is not None
        for sets in plan.selected.unbind(1):
            selected = self.prepared(sets, plan)
            values = kv[1].flatten(0, 1)[self.slots(selected, plan)]
            values = values.masked_fill(~self.is_key(selected, plan)[..., None, None], 0.0)
            out = out + 0.0 * values.sum((1, 2))[:, None]
        return out
