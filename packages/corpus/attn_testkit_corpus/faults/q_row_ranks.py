"""Class Q: prefill context parallelism, rows of prompts that are dealt among ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .catalogue import fault
from .with_row_ranks import GatheringRankBackend, RankOfAllModesBackend, RowRankBackend

_CHECKS = "matches-oracle keys-counted-once finite reads-own-kv"
_WRITES = "writes-own-kv"
_TAKEN = r"rank \d of \d took its row \d+ of request \d for row -?\d+ of the prompt's new rows; it is row \d+"


@fault("sglang #28463, #29161, #32098", _CHECKS, rf"{_TAKEN}: its rows are not the first ones", modes="extend",
       modelled="upstream the local positions turn the rows, here they mask them")  # fmt: skip
class RowsOfRankFollowThePrefix(RowRankBackend):
    """The rows of a rank are counted from the end of the prefix, as if the rank computed the first rows."""

    def rows_in_prompt(self, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return index + new * 0


@fault("general; a causal mask that ends at the last key", _CHECKS, rf"{_TAKEN}: its rows are not the last ones",
       modes="extend")  # fmt: skip
class RowsOfRankEndThePrompt(RowRankBackend):
    """A causal mask is aligned to the last key of the request, as if the rank computed the last rows."""

    def rows_in_prompt(self, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new - self.split.lens(new) + index


@fault("general; two zigzag blocks under one causal mask", _CHECKS, rf"{_TAKEN}: its second block does not follow",
       modes="extend")  # fmt: skip
class SecondBlockFollowsTheFirst(RowRankBackend):
    """Both blocks of a rank are masked as one block of consecutive rows."""

    def rows_in_prompt(self, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if len(self.split.blocks) < 2:
            return super().rows_in_prompt(index, new)
        return self.split.start(self.split.blocks[0], new) + index


@fault("sglang #19820, #27276", _CHECKS, rf"{_TAKEN}: the first blocks have the rows that are left over",
       modes="extend")  # fmt: skip
class LastBlockHasTheRest(RowRankBackend):
    """Blocks are planned with n // 2R rows, as if the last block had the rows that are left over."""

    def rows_in_prompt(self, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        blocks = self.split.blocks
        if not blocks:
            return super().rows_in_prompt(index, new)
        size = new // (self.split.ranks * len(blocks))
        after = blocks[-1] * size + index - size * (len(blocks) > 1)
        return torch.where(index < size, blocks[0] * size + index, after)


@fault("sglang #24560", _CHECKS, _TAKEN, modes="extend")
class RankOfAnotherGroup(RowRankBackend):
    """Rank and size are those of another group, in which each rank is the first."""

    def rows_in_prompt(self, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return replace(self.split, rank=0).row(index, new)


@fault("sglang #30439", _CHECKS, rf"{_TAKEN}: the rows are dealt in the order", modes="extend",
       modelled="the mechanism is a plan for the other of two orders")  # fmt: skip
class RoundRobinIsPlannedAsZigzag(RowRankBackend):
    """Rows that are dealt in turn are planned as blocks."""

    def rows_in_prompt(self, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        split = self.split
        return (replace(split, order="zigzag") if split.order == "roundrobin" else split).row(index, new)


@fault("sglang #23415", _CHECKS, rf"{_TAKEN}: the prefix is the length", modes="extend")
class PrefixOfPaddedRows(RowRankBackend):
    """The prefix is the length less the rows that are padded to a multiple of R, and so is too short."""

    def prefix_lens(self, batch: ForwardBatch) -> torch.Tensor:
        new, ranks = self.new_lens(batch), self.split.ranks
        return (batch.seq_lens - (new + ranks - 1) // ranks * ranks).clamp(min=0)


@fault("sglang #20531, #23269", _CHECKS, rf"{_TAKEN}: the blocks are planned for", modes="extend")
class RowsOfTheFirstRequestsLength(RowRankBackend):
    """The blocks of all requests are planned for the length of the first one."""

    def rows_in_prompt(self, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return super().rows_in_prompt(index, new[:1].expand_as(new))


@fault("general; a ring that ends too early", _CHECKS, "each rank attends to the prefix and to the keys of its own",
       modes="extend")  # fmt: skip
class RankAttendsToItsOwnRows(RowRankBackend):
    """A rank attends to the prefix and to the keys of its own rows, and to none of other ranks."""

    def gathered(self, prefix: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        row = self.key - prefix[:, None]
        return ((row < 0) | self.split.holds(row, new[:, None]))[:, None]


@fault("sglang #27928", _WRITES, r"rank \d stored only the rows that it computes", modes="extend")
class RankStoresItsOwnRows(RowRankBackend):
    """The gather of k and v is left out, so a rank stores only the rows that it computes."""

    def keep(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        own = slice(None) if batch.pcp_rows is None else batch.pcp_rows
        self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc[own], k[own], v[own])


@fault("sglang #27276", _WRITES, "in the order of requests and positions", modes="extend",
       modelled="here all ranks but the first store the rows in this order")  # fmt: skip
class RowsAreStoredInTheOrderOfRanks(RowRankBackend):
    """Gathered k and v are stored in the order of the ranks, as if that were the order of positions."""

    def keep(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        if batch.pcp_rows is not None and self.split.rank:
            own = torch.zeros(len(k), dtype=torch.bool, device=k.device)
            own.index_fill_(0, batch.pcp_rows, True)
            order = torch.argsort((~own).to(torch.int8), stable=True)
            k, v = k[order], v[order]
        super().keep(k, v, layer, batch)


@fault("vllm-ascend #12009, #13779", _WRITES, r"on rank \d a slot of this step's tokens does not hold", modes="extend")
class RankWithoutRowsReturnsAtOnce(RowRankBackend):
    """A rank without rows returns before it stores k and v of the rows of others."""

    def keep(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        if len(batch.input_ids):
            super().keep(k, v, layer, batch)


@fault("vllm-ascend #11807; TensorRT-LLM's helix test", "completes output-contract", modes="extend")
class RankPadsItsRows(RowRankBackend):
    """The output has the rows of the rank with the most, padding included."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        most = -(-len(batch.out_cache_loc) // self.split.ranks)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, max(0, most - len(out))))


@fault(
    "vllm-ascend #12009, #12036",
    "completes",
    r"rank \d returned, rank \d waits in all_gather \(with_row_ranks.py:\d+\)",
    modes="extend",
)
class RankWithoutRowsSkipsTheGather(GatheringRankBackend):
    """A rank without rows returns before the gather, in which the other ranks wait for it."""

    def keep(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        if len(k):
            super().keep(k, v, layer, batch)


@fault("general; a gather that is not put in order", _WRITES, "in the order of requests and positions", modes="extend")
class GatheredRowsKeepTheOrderOfRanks(GatheringRankBackend):
    """Gathered k and v keep the order of the ranks, without the rows that filled up each part."""

    def order_of(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.argsort((rows == self.total).to(torch.int8), stable=True)[: self.total]


@fault("general; collectives in another order on one rank", _WRITES, modes="extend")
class OneRankGathersValuesFirst(GatheringRankBackend):
    """The last rank gathers v before k, so each rank gets its values for keys."""

    def gathered_kv(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.split.rank < self.split.ranks - 1 or k.shape != v.shape:
            return super().gathered_kv(k, v)
        of_v = self.gather(v, 0)[self.order]
        return self.gather(k, 0)[self.order], of_v


@fault(
    "sglang #34443",
    "completes",
    modes="target-verify",
    modelled="upstream the kernel refuses metadata that is longer than q; here the error is raised",
)
class VerifyPaddedToRanks(RankOfAllModesBackend):
    """The metadata of a verify has a multiple of R rows, as that of a prompt whose rows are dealt; q has its own."""

    def queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        # The instance is a rank in cases with ``zigzag_rank``, ``roundrobin_rank`` or ``blocks_rank``.
        if ForwardMode.TARGET_VERIFY in self.context.modes and len(q) % self.split.ranks:
            raise RuntimeError("num_splits must have shape (b+1)")
        return super().queries(q, layer)
