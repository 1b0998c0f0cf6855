"""Class Q: decode context parallelism, ranks with KV pools of their own."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, KVSplit

from .catalogue import fault
from .with_kv_splits import MODES
from .with_ranks import MergingRankBackend, RankBackend, RankWithoutPositions

_CHECKS = "log-sum-exp reads-own-kv matches-oracle"
_WRITES = "writes-own-kv"
_WITH_ROWS = MODES - {"decode"}


@fault(
    "vllm #54541, #46514; vllm-ascend #14536",
    _WRITES,
    r"rank \d used the global position \d+ as a local slot; the local one is \d+",
    modes=MODES,
)
class RankStoresAtGlobalPosition(RankBackend):
    """A rank stores its rows where its request table has the global position, past its own keys."""

    def own_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.where(batch.out_cache_loc <= 0, 0, self.table_slots(batch, at_key=True))


@fault(
    "sglang #36886; vllm-ascend #14024",
    _CHECKS,
    r"rank \d used the global position \d+ of a key of request \d as a local slot; the local one is \d+",
    modes=MODES,
)
class RankLoadsAtGlobalPosition(RankBackend):
    """A rank looks its keys up at their global positions in its request table."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots = super().key_slots(batch)
        return slots[:, self.key.clamp(max=slots.shape[1] - 1)] if self.context.kv_splits else slots


@fault(
    "vLLM #28990; vllm-ascend #9724",
    _CHECKS,
    r"rank \d used the global length \d+ of request \d as its local one, which is \d+",
    modes="decode",
)
class RankUsesGlobalLength(RankWithoutPositions):
    """A rank attends to as many keys as the request has on all ranks."""

    def keys_on_rank(self, batch: ForwardBatch) -> torch.Tensor:
        return self.all_keys(batch)


@fault(
    "general; kernels that subtract a base from -1, or index with it",
    _WRITES,
    "as an index, which is the last slot: skip these rows|belongs to rank",
    modes=MODES,
)
class RankStoresRowsOfOthersInLastSlot(RankBackend):
    """The slot -1 of rows that belong to other ranks is used as an index: the last slot of the pool."""

    def own_slots(self, batch: ForwardBatch) -> torch.Tensor:
        last = self.context.kv_pool.num_slots - 1
        return torch.where(batch.out_cache_loc < 0, last, batch.out_cache_loc)


@fault(
    "vllm #57260",
    _WRITES,
    r"the token belongs to rank \d, because token j belongs to rank j // \d+ % \d|does not hold",
    modes=MODES,
)
class EveryRankStoresEveryRow(RankBackend):
    """A rank computes the slot of every row from its local index, and leaves out the question whose row it is."""

    def own_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return self.table_slots(batch)


@fault(
    "vllm #55802; RFC vllm #50391",
    _WRITES,
    r"as for I = 1, as a local slot; the local one is \d+|does not hold|was overwritten",
    modes=MODES,
)
class RankStoresAsForInterleaveOfOne(RankBackend):
    """Slots of new rows follow from position // R, as if each rank got one token at a time."""

    def own_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.where(batch.out_cache_loc <= 0, 0, self.table_slots(batch, interleave=1))


@fault(
    "vLLM #30309",
    _CHECKS,
    r"rank \d counts \d+ keys of request \d as for I = 1, but it has \d+",
    modes="decode",
)
class RankCountsAsForInterleaveOfOne(RankWithoutPositions):
    """The length on a rank is computed as if each rank got one token at a time."""

    def keys_on_rank(self, batch: ForwardBatch) -> torch.Tensor:
        keys = self.all_keys(batch)
        return replace(self.context.kv_splits[0], interleave=1).lens(keys, keys * 0)


@fault("vllm-ascend #11492", _CHECKS, modes=_WITH_ROWS)
class RowsOfRankAreMaskedAsForInterleaveOfOne(RankBackend):
    """The mask of drafts takes key i of a rank for the key i * R + rank of the request."""

    def key_numbers(self, own: KVSplit) -> torch.Tensor:
        return replace(own, interleave=1).key(self.index, torch.zeros_like(self.index))


@fault("tokenspeed #364; vllm-ascend #11849", _CHECKS, modes=_WITH_ROWS)
class RowsOfRankAreMaskedByLocalIndex(RankBackend):
    """Rows are compared with local indices of keys, so that they see keys after them."""

    def key_numbers(self, own: KVSplit) -> torch.Tensor:
        return self.index


@fault(
    "vllm-ascend #13779, #11807",
    _CHECKS,
    r"rank \d rounds the length of request \d up to \d+ keys",
    modes="decode",
    modelled="one of the two places in which padding at the border of a rank counted",
)
class PaddingOfRankCounts(RankWithoutPositions):
    """All ranks have as many keys as the first one: the padding at the border of a rank is attended to."""

    def keys_on_rank(self, batch: ForwardBatch) -> torch.Tensor:
        own = self.context.kv_splits[0]
        turn = own.ranks * own.interleave
        return (self.all_keys(batch) + turn - 1) // turn * own.interleave


@fault(
    "sglang #29161, #27276",
    _CHECKS,
    r"rank \d attends to -?\d+ keys of request \d, a part of \d+ consecutive ones, but it has \d+",
    modes="decode",
    modelled="the real ones are shards of a prompt, in another order than the keys are stored in",
)
class RankHasABlockOfKeys(RankWithoutPositions):
    """The length on a rank is that of one block of consecutive keys per rank, but keys are dealt in turn."""

    def keys_on_rank(self, batch: ForwardBatch) -> torch.Tensor:
        own, keys = self.context.kv_splits[0], self.all_keys(batch)
        block = (keys + own.ranks - 1) // own.ranks
        return torch.minimum(block, keys - own.rank * block).clamp(min=0)


@fault("vllm #55879", _CHECKS, modes="decode")
class EmptyRankAttendsToOneKey(RankWithoutPositions):
    """A kernel that takes no length of 0 gets 1, and a rank without keys attends to whatever is in its first slot."""

    def keys_on_rank(self, batch: ForwardBatch) -> torch.Tensor:
        return super().keys_on_rank(batch).clamp(min=1)


@fault("flashinfer #4975; the helix test of TensorRT-LLM", "log-sum-exp finite", r"0 \* NaN is NaN", modes=MODES)
class EmptyRankOutputIsNan(RankBackend):
    """A rank without keys of a request leaves its output unwritten, and returns a correct log-sum-exp of -inf."""

    def outputs(self, out: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return out.masked_fill(~seen.any(-1)[..., None, None, None], torch.nan)


@fault(
    "general; metadata of a rank that is computed outside the graph",
    "log-sum-exp replay-follows-batch reads-own-kv matches-oracle",
    modes=MODES,
    executions="graph",
)
class RankHasLengthsOfTheCapture(RankBackend):
    """The lengths on a rank are computed at the capture of a graph, and not at replays."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.fresh: torch.Tensor | None = None
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.fresh = None
        if in_capture and self.context.kv_splits:
            self.fresh = super().keys_on_rank(batch).clone()
            self.all_fresh = [*getattr(self, "all_fresh", []), self.fresh]

    def keys_on_rank(self, batch: ForwardBatch) -> torch.Tensor:
        return super().keys_on_rank(batch) if self.fresh is None else self.fresh


@fault("vllm-ascend #11849", _CHECKS, modes=MODES)
class RankHasNoKeysOfTheStep(RankBackend):
    """The lengths on a rank are those before the step: rows do not see the new keys of their own request there."""

    def keys_on_rank(self, batch: ForwardBatch) -> torch.Tensor:
        _, counts = self.rows_of_requests(batch)
        before = (self.all_keys(batch) - counts).clamp(min=0)
        return self.context.kv_splits[0].lens(before, before * 0)


@fault("rocm-libraries #12229, on ranks", _CHECKS, "the sink is counted once more", modes=MODES)
class SinkOnEveryRank(RankBackend):
    """Each rank adds the sink to its own sum, so the merge counts it once per rank."""

    def layer_of_part(self, layer: AttentionLayer) -> AttentionLayer:
        return layer


@fault(
    "sglang #33064, #33926, #34240; vllm #47079",
    _CHECKS,
    "KV splits are merged as if they were in the other base than declared",
    modes=MODES,
)
class RanksAreMergedInBase2(MergingRankBackend):
    """The natural log-sum-exps of ranks are merged as if they were in base 2, so each rank has a wrong weight."""

    def weight(self, lse: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        return torch.exp2(lse - top)

    def merged_lse(self, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return top + total.log2()


@fault("vllm #39148, on ranks; flash-attention 26d7d92f", "log-sum-exp finite matches-oracle", modes=MODES)
class RanksWithoutKeysAreMergedToNan(MergingRankBackend):
    """Two ranks without keys of a request are merged to -inf minus -inf, and no other rank repairs it."""

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logaddexp(lse_a, lse_b)
        of_a, of_b = (torch.exp(each - lse)[..., None] for each in (lse_a, lse_b))
        return (of_a * out_a.float() + of_b * out_b.float()).to(out_a.dtype), lse


@fault(
    "general; a gather of the results of all other ranks",
    _CHECKS,
    modes=MODES,
    modelled="ranks merge one after the other, and the first gets what all others merged",
)
class FirstRankIsLeftOut(MergingRankBackend):
    """The rank that gathers the results of all others leaves out its own."""

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.context.dcp_rank == 0:
            return out_b, lse_b
        return super().merge_state(out_a, lse_a, out_b, lse_b)
