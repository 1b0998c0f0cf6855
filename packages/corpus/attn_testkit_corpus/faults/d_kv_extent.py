"""Class D: the number and places of a request's keys: lengths, page tables, slots, query rows."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .catalogue import fault
from .dense import DenseBackend, Visibility
from .pool_reads import read_slots

_EXTENDS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
_CHAINED = (ForwardMode.DECODE, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)


@fault("sglang #26512, reverted by #26628", "matches-oracle", "KV tokens? (is|are) missing", modes="draft-extend-v2")
class DraftExtendV2PrefixOnly(DenseBackend):
    """seq_lens is read as prefix + new, although it is only the prefix, so the step's own keys are skipped."""

    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return (super().kv_lengths(batch, counts) - counts).clamp(min=1)


@fault("sglang KNOWN_FAILURES.md C.1", "matches-oracle", "slots are assumed to increase", modes=_EXTENDS)
class NonMonotonicSlots(DenseBackend):
    """The step's keys are read in ascending slot order, as if out_cache_loc always increased inside a request."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots = super().key_slots(batch)
        lens = self.kv_lens[:, None]
        new = (self.key >= lens - self.counts[:, None]) & (self.key < lens)
        rank = torch.where(new, slots, torch.where(self.key < lens, self.key - 1_000_000, self.key + 1_000_000))
        return slots.gather(1, rank.argsort(1))


@fault(
    "sglang KNOWN_FAILURES.md C.1", "reads-own-kv matches-oracle", "read twice|unowned|other requests", modes=_EXTENDS
)
class NewSlotsAssumedConsecutive(DenseBackend):
    """Slots of the new tokens are counted up from the first one, which is right inside one page or in contiguous
    memory.
    """

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots = super().key_slots(batch)
        prefix = (self.kv_lens - self.counts).clamp(min=0)[:, None]
        guess = slots.gather(1, prefix) + self.key - prefix
        return torch.where(self.key < prefix, slots, guess.clamp(0, self.context.kv_pool.num_slots - 1))


@fault(
    "lightllm #743; flashinfer #4018",
    "reads-own-kv matches-oracle",
    "is indexed by cu_seqlens_q",
    modes=_EXTENDS,
)
class SecondRequestKvUsesQOffset(DenseBackend):
    """The flat list of KV slots is read from the request's query offset on, instead of its key offset."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots = super().key_slots(batch)
        lens = self.kv_lens.clamp(0, slots.shape[1])[:, None]
        at = torch.where(self.key < lens, (lens.cumsum(0) - lens) + self.key, slots.numel())
        flat = slots.new_zeros(slots.numel() + 1).scatter(0, at.reshape(-1), slots.reshape(-1))
        return flat[self.starts[:, None] + self.key]


@fault(
    "flashinfer #4059, #4382",
    "matches-oracle",
    "request 0 is right and all others are wrong|tiles of 16 pairs",
    modes="target-verify draft-extend-v2",
    modelled="offsets past the last row are clamped, where the kernel read and wrote past the tensor",
)
class PaddedTokenGroupStride(DenseBackend):
    """A request's query offset is counted in tiles of 16 (token, head) pairs although rows are packed."""

    def row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        group = self.context.layers[0].q_per_kv
        tiles = (counts * group + 15) // 16 * 16 // group
        return tiles.cumsum(0) - tiles


@fault("rtp-llm b3af7072d", "matches-oracle", "the last KV token is missing")
class LastPageLenTwoConventions(DenseBackend):
    """last_page_len is stored as (len - 1) % page in one array and as that plus one in another; the wrong array is
    used."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        lens, page = self.kv_lens[:, None, None], self.context.page_size
        return position, key, visible & (self.key < (lens - 1) // page * page + (lens - 1) % page)


@fault("aiter #4825", "reads-own-kv matches-oracle", "page")
class BlockTableIndexedByToken(DenseBackend):
    """The block table is indexed with the token position and the cache with the id found there: right for pages of
    1.
    """

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        page = self.context.page_size
        pages = super().key_slots(batch)[:, ::page] // page
        return pages[:, self.key.clamp(max=pages.shape[1] - 1)]


@fault("flashinfer #3022", "matches-oracle", "a page or a split is skipped")
class VTilePageNotAdvanced(DenseBackend):
    """Head dim 256 needs two V loads for a tile of 64 keys, and the second still uses the page ids of the first."""

    def values(self, layer: AttentionLayer) -> torch.Tensor:
        page, key = self.context.page_size, self.key
        if layer.v_head_dim < 256 or page >= 64:
            return super().values(layer)
        stale = torch.where(key % 64 >= 32, (key - 32) // page * page + key % page, key).clamp(max=len(key) - 1)
        return read_slots(self.context.kv_pool.get_value_buffer(layer.layer_id), self.slots[:, stale])


@fault("rtp-llm 668448b61", "reads-own-kv matches-oracle", "the table's stride|request 0 is right|a wrong page or slot")
class TableRowWidthFromMaxLen(DenseBackend):
    """The longest length is used as the stride between rows of the page table, instead of the table's width."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, page = super().key_slots(batch), self.context.page_size
        longest = self.kv_lengths(batch, self.counts).amax()
        width = (longest + page - 1) // page * page
        index = torch.arange(len(slots), device=slots.device)[:, None] * width + self.key
        return slots.reshape(-1)[index.clamp(max=slots.numel() - 1)]


@fault(
    "sglang KNOWN_FAILURES.md C.4",
    "completes",
    "leading dimensions",
    executions="graph",
    slug="piecewise-static-q-vs-live-index-shape",
    modelled="the kernel's assertion is raised while the replay is planned",
)
class StaticQAgainstLiveIndex(DenseBackend):
    """The index tensor is sized for the live tokens while q is padded to the bucket, and the kernel needs them
    equal.
    """

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        index, rows = batch.out_cache_loc, batch.positions.shape[0]
        assert index.shape[0] == rows, f"leading dimensions of index {index.shape[0]} and q {rows} must agree"


@fault(
    "lmdeploy #4685",
    "reads-own-kv",
    "of another owner",
    modes=_CHAINED,
    modelled="the doubled length reaches the kernel, where upstream it only sized grids and caches",
)
class KvLenDoubleCounted(DenseBackend):
    """seq_lens already counts the step's own tokens, and they are added a second time."""

    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return batch.seq_lens[: batch.batch_size] + counts


@fault(
    "aiter #3310",
    "reads-own-kv matches-oracle",
    "head 1|head 2|of its own KV tokens",
    modes="decode",
    modelled="folds any even number of heads in two",
)
class FoldedHeadsReadNextTokenKv(DenseBackend):
    """32 heads run as two virtual requests of 16, and the second one's KV is looked up by its virtual index."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out, own, half = super().forward(q, k, v, layer, batch, save_kv_cache), self.slots, layer.tp_q_head_num // 2
        self.slots = own.roll(-1, 0)
        folded = super().forward(q, k, v, layer, batch, save_kv_cache=False)
        self.slots = own
        return torch.cat([out[:, :half], folded[:, half:]], 1)


@fault("general", "reads-own-kv", "of another owner", modes=_CHAINED)
class LengthRoundedUpToPage(DenseBackend):
    """Every page counts as full, so slots after the last key are read."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        page = self.context.page_size
        # The row of the table ends in numbers of any size; a kernel reads on, wherever that is.
        slots = super().key_slots(batch)[:, self.key // page * page] + self.key % page
        return slots.clamp(max=self.context.kv_pool.num_slots - 1)

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        lens, page = self.kv_lens[:, None, None], self.context.page_size
        last = (key >= lens) & (key < (lens + page - 1) // page * page)
        return position, key, visible | last


@fault("general", "matches-oracle finite", "last page")
class PartialLastPageDropped(DenseBackend):
    """The number of pages is len // page: a partly filled last page is never read."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        lens, page = self.kv_lens[:, None, None], self.context.page_size
        return position, key, visible & (key < lens // page * page)


@fault("general", "reads-own-kv matches-oracle", "page id that is used as a slot")
class PageIdUsedAsSlot(DenseBackend):
    """A key's slot is page + offset, without the multiplication by the page size."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, page = super().key_slots(batch), self.context.page_size
        return slots // page + slots % page


@fault("general", "reads-own-kv matches-oracle", "counted as if they had")
class PageSizeBakedIn(DenseBackend):
    """The kernel was built for pages of 16 and finds every key through the first slot of its block of 16."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots = super().key_slots(batch)
        guess = slots[:, self.key // 16 * 16] + self.key % 16
        return guess.clamp(max=self.context.kv_pool.num_slots - 1)


@fault("general", "reads-own-kv matches-oracle", "the request row")
class BatchIndexInsteadOfPoolRow(DenseBackend):
    """Row i of the request table is read for request i, instead of row req_pool_indices[i]."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return self.context.req_to_token[1 : batch.batch_size + 1].long()


@fault("general", "matches-oracle", "the last KV token is missing", modes="decode")
class DecodeMissesItsOwnKey(DenseBackend):
    """seq_lens is read as the prefix, so the token of this step does not see its own key."""

    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return super().kv_lengths(batch, counts) - 1


@fault("sglang MUTATION_FIXES.md M15", "reads-own-kv matches-oracle", "of another owner", modes="target-verify")
class VerifyForgetsDraftTokens(DenseBackend):
    """The page table of verify covers only the prefix: draft keys on a separate page are looked up in a stale
    tail.
    """

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, page = super().key_slots(batch), self.context.page_size
        covered = (batch.seq_lens[: batch.batch_size, None] + page - 1) // page * page
        return torch.where(self.key < covered, slots, 0)


@fault("general", "reads-own-kv matches-oracle", "of another owner", modes=_EXTENDS)
class NewTokensOpenAPage(DenseBackend):
    """The step's keys are read from the start of a fresh page, not after the last key of the prefix."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots, page = super().key_slots(batch), self.context.page_size
        prefix = (self.kv_lens - self.counts)[:, None]
        moved = self.key + (-prefix) % page
        return slots.gather(1, torch.where(self.key < prefix, self.key, moved).clamp(0, slots.shape[1] - 1))
