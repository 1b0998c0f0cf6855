"""Class S, selections of KV heads: sets of other heads, counts of one head for all, and pages that are not full."""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, KernelPlan

from .catalogue import fault
from .sparse import SparseOfHeads, SparsePagesOfHeads


def _number(sets: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """[T, topk]: sets of these ``numbers`` [T], counted in the order of memory, or the last one."""
    every = sets.flatten(0, 1)
    return every[numbers.clamp(max=len(every) - 1)]


def _rows(sets: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(sets), device=sets.device)


@fault(
    "transformers #46762",
    "matches-oracle",
    "all KV heads use the selection of KV head 0",
    modelled="upstream the scores of all heads are pooled, so that there is one list; here all heads use the first",
)
class SelectionOfKvHeadZero(SparseOfHeads):
    """All heads attend to the blocks that KV head 0 selected."""

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return sets[:, 0]


@fault(
    "flash-sparse-attention #355 (the KV head of a rank is off)",
    "matches-oracle",
    "the selection of the KV head (before|after) it|attends to what KV head . selected",
    modelled="upstream an offset of ranks that share KV heads; here each head uses the selection of the next one",
)
class SelectionOfTheNextKvHead(SparseOfHeads):
    """A KV head attends to the blocks of the next one."""

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().set_of(head, sets.roll(-1, 1), plan)


@fault(
    "flashinfer #4593 (kv_head = q_head); LMCache #3092",
    "matches-oracle reads-own-kv finite",
    "as if `selected` had one per query head",
    modelled="upstream other memory follows the last set; here the last set is read",
)
class SetOfTheQueryHead(SparseOfHeads):
    """`selected` is indexed by the query head, so heads after the first few read the sets of later rows."""

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return _number(sets, _rows(sets) * sets.shape[1] + head)


@fault(
    "vLLM #49149; TensorRT-LLM #17284",
    "matches-oracle reads-own-kv finite",
    r"read as \[Hk, T, topk\]",
)
class HeadMajorSelectionAssumed(SparseOfHeads):
    """The kernel reads `selected` as [Hk, T, topk], and the caller does not transpose it."""

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return _number(sets, head // plan.layer.q_per_kv * len(sets) + _rows(sets))


@fault(
    "TileOPs #141 (block counts at the row of a sequence, and not of the batch)",
    "matches-oracle reads-own-kv finite",
)
class SelectionAtTheRowOfItsRequest(SparseOfHeads):
    """`selected` is indexed by the number of a row in its request, so that all requests use that of the first."""

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        first = plan.cu_seqlens_q[self.request_of_row(sets, plan)]
        return super().set_of(head, sets[(_rows(sets) - first).clamp(max=len(sets) - 1)], plan)


@fault(
    "sglang-jax #1376 (review: the page size is the block size)",
    "matches-oracle reads-own-kv finite",
    "block numbers are multiplied",
)
class PageSizeTakenForBlockSize(SparseOfHeads):
    """A block has as many keys as a page, and blocks of the selection are smaller than pages."""

    capabilities = SparseOfHeads.capabilities.with_changes(kv_pool={"page_sizes": {64}})

    def keys_of(self, selected: torch.Tensor) -> torch.Tensor:
        page = self.context.page_size
        return selected[..., None].long() * page + torch.arange(page, device=selected.device)


@fault(
    "ATOM #1426 (the top-k that later layers reuse)",
    "replay-follows-batch buckets-independent",
    "capture",
    executions="graph",
    modelled="upstream memory of the graph pool that others use; here what was selected while the graph was captured",
)
class SelectionOfHeadsOfTheCapture(SparseOfHeads):
    """A replay attends to the blocks that the second half of the heads selected while the graph was captured."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def read_by(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        kept = self.kept.setdefault((len(sets), plan.layer.layer_id), sets.clone())
        if not torch.cuda.is_current_stream_capturing():
            kept.copy_(sets)
        return super().read_by(head, kept if 2 * head >= plan.layer.tp_q_head_num else sets, plan)


@fault(
    "flashinfer #3955 (the reduction reads the lengths of KV head 0)",
    "matches-oracle",
    "as many entries as another row or KV head has",
    modelled="upstream the lengths in a reduction of several CTAs; here the number of pages of a head",
)
class CountOfKvHeadZero(SparsePagesOfHeads):
    """Each head attends to as many of its pages as KV head 0 has."""

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        count = (sets[:, 0] >= 0).sum(-1, keepdim=True)
        column = torch.arange(sets.shape[2], device=sets.device)
        return super().set_of(head, sets, plan).masked_fill(column >= count, -1)


@fault(
    "flashinfer #3955 (lengths count the last page that is listed as partial; its tests keep the last page)",
    "matches-oracle",
    "cuts off a block",
)
class LastListedPageIsCutOff(SparsePagesOfHeads):
    """The last page of a row's list has the keys of the row's own page, also if that page is not listed."""

    def keys_in(self, pages: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        last = (self.keys_seen(pages, plan) - 1).clamp(min=0).long()
        count, column = (pages >= 0).sum(-1, keepdim=True), torch.arange(pages.shape[1], device=pages.device)
        return torch.where(column == count - 1, (last % self.block + 1)[:, None], self.block)


@fault(
    "vllm-ascend #13391; pegainfer #291 (a page is read past seq_lens)",
    "matches-oracle reads-own-kv finite",
    modelled="upstream a page more, or keys past the last one; here all keys of the own page",
)
class OwnPageIsCountedWhole(SparsePagesOfHeads):
    """Keys of the row's own page after the row are attended to."""

    def keys_in(self, pages: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return torch.full_like(pages, self.block)


@fault(
    "sglang-jax #1376 (review: -1 becomes page 0); vLLM #54597",
    "reads-own-kv matches-oracle finite",
)
class NoPageIsPageZero(SparsePagesOfHeads):
    """An entry of -1 is clamped to page 0, whose keys count."""

    def is_block(self, selected: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(selected, dtype=torch.bool)

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().set_of(head, sets, plan).clamp(min=0)


@fault(
    "general; llama.cpp #24908 (review: positions and places of memory are mixed)",
    "reads-own-kv matches-oracle finite",
)
class PagesTakenForBlocks(SparsePagesOfHeads):
    """Pages are looked up in the page table, as if they were blocks of the request."""

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        pages = super().set_of(head, sets, plan)
        table = plan.page_table[self.request_of_row(pages, plan)]
        found = table.gather(1, pages.clamp(min=0, max=table.shape[1] - 1).long())
        return torch.where(pages < 0, -1, found)


@fault(
    "flashinfer #2802",
    "completes",
    modes="decode",
    modelled="upstream numbers are copied into a tensor that is too short; here the error is raised",
)
class LengthsOf32768Lists(SparseOfHeads):
    """The buffer of a plan has room for the lengths of 32,768 lists, and each row has a list for each KV head."""

    capabilities = SparseOfHeads.capabilities.with_changes(heads={"families": {"mha"}, "gqa_ratios": {1}})

    def set_of(self, head: int, sets: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        if sets.shape[0] * sets.shape[1] > 32_768:
            raise RuntimeError("The size of tensor a (32768) must match the size of tensor b")
        return super().set_of(head, sets, plan)
