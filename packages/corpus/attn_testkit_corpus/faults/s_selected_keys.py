"""Class S: sparse attention: wrong keys, keys of another row, layer or step, and -1 used as a key."""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, ForwardMode, KernelPlan, Sparse

from .catalogue import fault
from .sparse import SparseParent, UnionOfRows

_ALL = tuple(ForwardMode)
_SEVERAL_ROWS = (
    ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.EXTEND,
)  # fmt: skip
_NO_HOLES = SparseParent.capabilities.with_changes(sparse=Sparse(topk={16, 64}))


@fault("general; sglang (the dense path for lengths up to topk)", "matches-oracle", "all keys the row may see")
class SelectionIgnored(SparseParent):
    """The dense path runs for every length, as if it were at most topk."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        key = torch.arange(self.context.max_context_len, device=selected.device)
        return torch.where(key < self.keys_seen(selected, plan)[:, None], key, -1)


@fault(
    "general; layers that share a selection (sglang dsa, skip_topk)",
    "matches-oracle",
    "of the first layer|of the layer before",
)
class SelectionOfFirstLayer(SparseParent):
    """The indices of the first layer serve all layers."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.of_first: dict[int, torch.Tensor] = {}

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        if plan.layer.layer_id == self.context.layers[0].layer_id:
            self.of_first[len(selected)] = selected
        return self.of_first[len(selected)]


@fault(
    "general; vLLM (decode kernels with next_n rows)",
    "matches-oracle",
    "of its first row|of the row before it in its request",
    modes=_SEVERAL_ROWS,
)
class OneSelectionPerRequest(SparseParent):
    """All rows of a request attend to the keys of its first row."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        first = plan.cu_seqlens_q[self.request_of_row(selected, plan)].long()
        return selected[first.clamp(max=len(selected) - 1)]


@fault(
    "sglang #32762",
    "matches-oracle",
    "expected the selected .*(?s:.*)selection of the row before it",
    modelled="upstream rows are padded before the indexer and not after it, so that later rows are shifted",
)
class SelectionOfTheRowBefore(SparseParent):
    """Rows and selections are counted from different starts, and each row gets the selection of the row before it."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        shifted = selected.roll(1, 0)
        # A key that the row may not see is dropped, as the causal mask of the kernel does.
        return torch.where(shifted < self.keys_seen(selected, plan)[:, None], shifted, -1)


@fault(
    "general; sglang (PAGED and RAGGED top-k)", "reads-own-kv matches-oracle finite", "treated as slots|used as slots"
)
class PositionsTakenForSlots(SparseParent):
    """The page table is left out: an index is used as a slot."""

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.clamp(min=0).long()


@fault(
    "general; sglang (PAGED and RAGGED top-k), zml #808",
    "matches-oracle finite reads-own-kv",
    "taken for positions|as if they were positions",
    modes="decode target-verify draft-extend draft-extend-v2 extend",
)
class SlotsTakenForPositions(SparseParent):
    """The page table is read again: an index that is a slot is used as a position, and dropped if it exceeds the
    length."""

    capabilities = SparseParent.capabilities.with_changes(
        eager=set(_ALL) - {ForwardMode.DRAFT_DECODE},
        graph=set(_ALL) - {ForwardMode.DRAFT_DECODE},
        sparse=Sparse(topk={16, 64}, holes=True, empty_rows=True, index_space="slots"),
    )

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return (selected >= 0) & (selected < plan.kv_lens[self.request_of_row(selected, plan)][:, None])

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().slots(selected.clamp(max=plan.slot_table.shape[1] - 1), plan)


@fault(
    "general; sglang (dsa_cache_seqlens_int32, which is min(keys, top-k)), sglang #31128",
    "matches-oracle reads-own-kv finite",
    "as many entries as it may see keys|not clipped to top-k",
)
class LengthsNotClippedToTopK(SparseParent):
    """A row reads as many indices as it may see keys, so those of the next rows are attended to as well."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        step = torch.arange(self.context.max_context_len, device=selected.device)
        at = torch.arange(len(selected), device=selected.device)[:, None] * selected.shape[1] + step
        there = (step < self.keys_seen(selected, plan)[:, None]) & (at < selected.numel())
        return torch.where(there, selected.flatten()[at.clamp(max=selected.numel() - 1)], -1)


@fault(
    "flashinfer #5095 (#5075)",
    "matches-oracle finite reads-own-kv",
    modelled="upstream lanes after topk_length hold what is there; here -1 is used as the first key",
)
class CountOfKeysFromLengths(SparseParent):
    """A row is assumed to have min(topk, length) keys, although some entries are -1."""

    capabilities = _NO_HOLES

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        column = torch.arange(selected.shape[1], device=selected.device)
        return column < plan.kv_lens[self.request_of_row(selected, plan)][:, None]


@fault("general; vLLM #51538", "matches-oracle", "after its first -1")
class FirstHoleEndsTheRow(SparseParent):
    """The loop over a row's keys stops at the first -1, and the backend declares holes."""

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return (selected < 0).cumsum(1) == 0


@fault("general; DeepGEMM's and FlashInfer's top-k are not sorted", "matches-oracle", "largest index")
class SortedSelectionAssumed(SparseParent):
    """The loop stops after the largest index, as if indices were ascending."""

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        largest = selected.argmax(1, keepdim=True)
        return (selected >= 0) & (torch.arange(selected.shape[1], device=selected.device) <= largest)


@fault(
    "flashinfer #5095", "matches-oracle", "only the first 48 of 64", modelled="upstream a tile has 64 lanes, here 48"
)
class LastTileOfSelectionLost(SparseParent):
    """The number of tiles is rounded down, so keys after the last whole tile are not attended to."""

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        whole = selected.shape[1] // 48 * 48 or selected.shape[1]
        return (selected >= 0) & (torch.arange(selected.shape[1], device=selected.device) < whole)


@fault("tonyd2wild/DeepSeek-v4-Flash-DGX-Spark #2", "matches-oracle finite steps-independent reads-own-kv")
class StaleIndicesBehindTheCount(SparseParent):
    """A buffer of indices is made once; a row overwrites only its own entries, and also attends to the stale entries
    after them."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        rows = max(context.max_num_tokens, 1) * 4
        self.buffer = torch.full((rows, context.layers[0].topk), -1, dtype=torch.int32, device=context.device)

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        if len(selected) > len(self.buffer):
            return selected
        mine = self.buffer[: len(selected)]
        mine.copy_(torch.where(selected >= 0, selected, mine))
        return mine


@fault("general; block kernels that load a page and mask it", "reads-own-kv", "keys that no row selects")
class UnselectedKeysMultipliedByZero(SparseParent):
    """Every key of the request is loaded, and those that are not selected get the weight 0."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        out = super().run(q, kv, plan)
        request, key = self.request_of_row(q, plan), torch.arange(self.context.max_context_len, device=q.device)
        own = (key < plan.kv_lens[request][:, None])[..., None, None]
        values = kv[1].flatten(0, 1)[plan.slot_table[request].long()].float().masked_fill(~own, 0.0)
        return out + 0.0 * values.sum((1, 2))[:, None].to(out.dtype)


@fault(
    "vLLM #51538; sglang (a kernel that is given slot 0 in place of -1)", "reads-own-kv", "with zeros instead of NaN"
)
class MinusOneClampedToSlotZero(SparseParent):
    """An index of -1 reads slot 0, which holds NaN, and multiplies its value by a weight of 0."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        out = super().run(q, kv, plan)
        holes = (plan.selected < 0).sum(1)[:, None, None].to(out.dtype)
        slot_zero = kv[1].flatten(0, 1)[0].to(out.dtype).sum(0)
        return torch.where(holes > 0, out + 0.0 * slot_zero, out)


@fault("sglang (a kernel that gives NaN where all indices are -1)", "finite")
class NanForARowWithoutKeys(SparseParent):
    """The weights of a row are divided by their sum, which is 0 for a row that selects no key."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        out = super().run(q, kv, plan)
        return out.masked_fill((plan.selected < 0).all(1)[:, None, None], torch.nan)


@fault(
    "TensorRT-LLM #16290",
    "replay-follows-batch buckets-independent",
    "capture",
    executions="graph",
    modelled="upstream the indexer's output is allocated again in a graph; here the plan keeps that of the capture",
)
class SelectionOfTheCapture(SparseParent):
    """Replays attend to the keys that were selected while the graph was captured."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        kept = self.kept.setdefault((len(selected), plan.layer.layer_id), selected.clone())
        if torch.cuda.is_current_stream_capturing():
            return kept
        return kept.copy_(selected)


@fault(
    "sglang 0.5.23 (sparse_mla_prefill, union=2), run with stale indices in padded rows",
    "padding-inert buckets-independent",
    modes="decode target-verify draft-extend draft-extend-v2 extend",
    executions="graph",
    modelled="upstream the caller has to write -1 into padded rows; here the backend declares that it need not",
)
class UnionWithAPaddedRow(UnionOfRows):
    """A live row shares its tile with a padded one, whose stale indices are slots that hold NaN."""

    capabilities = UnionOfRows.capabilities.with_changes(
        sparse=Sparse(topk={16, 64}, holes=True, empty_rows=True, index_space="slots", any_padding=True)
    )
