"""Class S, rows and heads: the selection of a row, its number of keys, and the heads that read them."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardMode, KernelPlan, Sparse

from .catalogue import fault
from .sparse import GroupedSparse, SparseParent, SparseWithSums

_WITH_PADDING = tuple(set(ForwardMode) - {ForwardMode.DRAFT_DECODE})
_SEVERAL_ROWS = (
    ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.EXTEND,
)  # fmt: skip


@fault(
    "sglang #33059",
    "reads-own-kv matches-oracle finite",
    modes=_WITH_PADDING,
    modelled="upstream lengths and scores are counted from different rows; here selections are, in padded batches only",
)
class SelectionsAlignedWithTheLastRows(SparseWithSums):
    """Fewer selections than rows of q: the missing ones are added in front, so each row has that of an earlier row."""

    def of_all_rows(self, selected: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.nn.functional.pad(selected, (0, 0, rows - len(selected), 0), value=-1)


@fault(
    "general; sglang (_pad_topk_indices, and kernels whose grid is that of q)",
    "completes finite matches-oracle",
    modes=_WITH_PADDING,
)
class SelectionsAssumedForAllRows(SparseWithSums):
    """The backend assumes a selection for each row of q, but declares that there may be fewer."""

    def of_all_rows(self, selected: torch.Tensor, rows: int) -> torch.Tensor:
        return selected


@fault("vLLM #54541; FlashMLA (log-sum-exps of rows without a valid index)", "log-sum-exp", modes=_WITH_PADDING)
class LseOfARowWithoutKeysIsPlusInf(SparseWithSums):
    """A row that selects no key returns +inf, so a merge gives it all the weight."""

    def lse_without_keys(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.abs().where(lse == -torch.inf, lse)


@fault(
    "MoBA #26",
    "matches-oracle finite reads-own-kv",
    modelled="upstream a row attends its whole sequence, not its own block, where one block is selected",
)
class TopKOfOneIsDense(SparseParent):
    """Offsets of the sequence replace those of the selection if one key is selected."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        if selected.shape[1] > 1:
            return selected
        key = torch.arange(self.context.max_context_len, device=selected.device)
        return torch.where(key < self.keys_seen(selected, plan)[:, None], key, -1)


@fault("surogate #110", "reads-own-kv matches-oracle finite", modes=_SEVERAL_ROWS)
class BatchOffsetAddedTwice(SparseParent):
    """The offset of a selection already includes the first row of its request, which is added again."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        row = torch.arange(len(selected), device=selected.device)
        first = plan.cu_seqlens_q[self.request_of_row(selected, plan)].long()
        return selected[(row + first).clamp(max=len(selected) - 1)]


@fault(
    "FastVideo #1719", "matches-oracle finite", modelled="upstream blocks of queries and of keys; here rows and keys"
)
class CountOfKeysOfThePair(SparseParent):
    """The count of keys is read once for two adjacent rows: the count of the even row is used for both."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={16, 64}))

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        row = torch.arange(len(selected), device=selected.device)
        count = (selected >= 0).sum(1)[row // 2 * 2]
        return torch.arange(selected.shape[1], device=selected.device) < count[:, None]


@fault(
    "ATOM #649",
    "matches-oracle finite",
    modelled="upstream a draft's metadata; the sums are those of min(keys, topk) here too",
)
class CountOfKeysFromRunningSums(SparseParent):
    """The count of a row is the end of its keys in a packed list, less the start of the first row."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={16, 64}))

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        ends = (selected >= 0).sum(1).cumsum(0)
        return torch.arange(selected.shape[1], device=selected.device) < ends[:, None]


@fault("Primus-Turbo #417", "finite")
class NanWhereTheFirstTileHasNoKey(SparseParent):
    """The maximum of the first two columns is used as a bound: exp(logit - -inf) if both are -1."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        out, some = super().run(q, kv, plan), (plan.selected >= 0).any(1)
        nothing_first = (plan.selected[:, :2] < 0).all(1) & some
        return out.masked_fill(nothing_first[:, None, None], torch.nan)


@fault(
    "flashinfer #5090",
    "matches-oracle",
    modelled="upstream the lanes of the last block of 64; here those of the last 16 columns",
)
class LanesBehindTheKeysScoreZero(SparseParent):
    """Lanes of the last tile that have no key are read as zeros and not masked: their weight is exp(0)."""

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected >= 0

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        there = plan.selected >= 0
        slot = self.slots(plan.selected, plan)
        k, v = (each.flatten(0, 1)[slot][:, :, 0].float().masked_fill(~there[..., None], 0.0) for each in kv)
        column = torch.arange(there.shape[1], device=there.device)
        last = column.masked_fill(~there, -1).amax(1, keepdim=True)
        attended = there | ((column // 16 == last // 16) & (last >= 0))
        logits = (q.float() @ k.mT * plan.layer.scaling).masked_fill(~attended[:, None], -torch.inf)
        return (torch.softmax(logits, -1).nan_to_num(nan=0.0) @ v).to(q.dtype)


@fault(
    "FlagGems #3759",
    "matches-oracle",
    modelled="upstream program ids; here the group of a query head is its remainder and not its quotient",
)
class SelectedKeysOfTheWrongKvHead(GroupedSparse):
    """Program ids are split by the wrong factor: right with one KV head, which sparse MLA has."""

    def kv_head_of(self, heads: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return heads % plan.layer.tp_k_head_num


@fault(
    "LMCache #3092",
    "matches-oracle",
    modelled="upstream heads after the last KV head read other memory; here they read the last one",
)
class QueryHeadTakenForKvHead(GroupedSparse):
    """A query head reads the KV head of its own number."""

    def kv_head_of(self, heads: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return heads.clamp(max=plan.layer.tp_k_head_num - 1)


@fault(
    "b12x #24",
    "output-written matches-oracle finite",
    modelled="upstream partial results of graphs; here the output of graphs and of eager steps",
)
class HeadsFromTheEighthOnAreNotStored(GroupedSparse):
    """The epilogue writes eight heads of a group; the others keep the buffer's old contents."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        found = super().run(q, kv, plan)
        out, place = torch.empty_like(found), torch.arange(found.shape[1], device=q.device) % plan.layer.q_per_kv
        stored = (place < 8)[None, :, None].expand_as(found)
        return out.copy_(torch.where(stored, found, out))


@fault(
    "vLLM #42072; general (kernels whose tile is as wide as the selection once was)",
    "matches-oracle",
    "only the first 1024 of 2048",
    modelled="upstream another width is refused or slow; here columns past 1,024 are not attended to",
)
class HalfOfAWideSelection(SparseParent):
    """One tile has 1,024 columns, and a selection of 2,048 has two."""

    capabilities = SparseParent.capabilities.with_changes(
        heads={"families": {"mqa"}, "gqa_ratios": {4}, "head_dims": {64}}, sparse=Sparse(topk={2048})
    )

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return (selected >= 0) & (torch.arange(selected.shape[1], device=selected.device) < 1024)
