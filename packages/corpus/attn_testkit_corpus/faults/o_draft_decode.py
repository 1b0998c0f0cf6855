"""Class O: drafts that use the plan of another forward, the slots of another branch, or unshared pages."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch

from .catalogue import fault
from .multi_step import MultiStepBackend, spec_of
from .parent import Metadata, PlannedBackend
from .speculative import SpeculativeBackend


@fault("general", "matches-oracle", "missing|expected", modes="draft-decode", slug="draft-lengths-of-the-first-forward")
class FirstLengths(MultiStepBackend):
    """Every forward is planned with the keys of the first: a branch does not see its drafted tokens."""

    def branch_lengths(self, batch: ForwardBatch, step: int) -> torch.Tensor:
        return super().branch_lengths(batch, 0)


@fault(
    "sglang 0.5.23 (frozen_kv_mtp_cuda_graph_runner)",
    "reads-own-kv matches-oracle finite",
    "NaN|nan|page",
    modes="draft-decode",
    slug="draft-step-counted-twice",
)
class StepCountedTwice(MultiStepBackend):
    """The step is added to lengths that include it already, so each row reads a slot that no forward has written
    yet."""

    def branch_lengths(self, batch: ForwardBatch, step: int) -> torch.Tensor:
        return super().branch_lengths(batch, step) + 1


@fault("general", "matches-oracle", "attended", modes="draft-decode", slug="draft-reads-a-sibling")
class ReadsASibling(MultiStepBackend):
    """The page table belongs to the request, so every branch attends to the tokens that branch 0 drafted."""

    def branch_columns(self, prefix: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return super().branch_columns(prefix, key)[:, :1].expand(-1, self.context.draft_branches, -1)


@fault(
    "general",
    "writes-own-kv matches-oracle reads-own-kv finite",
    "slot|KV memory",
    modes="draft-decode",
    slug="draft-slots-by-step",
)
class SlotsByStep(MultiStepBackend):
    """The slots of a draft come by request, branch and step, and are read as if they came by step first."""

    def branch_slots(self, batch: ForwardBatch, step: int) -> torch.Tensor:
        return spec_of(batch).out_cache_loc.view(spec_of(batch).num_steps, -1)[step]


@fault(
    "general",
    "writes-own-kv matches-oracle reads-own-kv finite",
    "slot|KV memory",
    modes="draft-decode",
    slug="draft-branches-store-in-one",
)
class BranchesStoreInOne(MultiStepBackend):
    """All branches of a request store their rows in the slots of its first one."""

    def branch_slots(self, batch: ForwardBatch, step: int) -> torch.Tensor:
        slots = super().branch_slots(batch, step).view(-1, self.context.draft_branches)
        return slots[:, :1].expand_as(slots).reshape(-1)


@fault(
    "general",
    "matches-oracle reads-own-kv finite",
    "attended|slot",
    modes="draft-decode",
    slug="draft-region-without-the-last-page",
)
class RegionWithoutLastPage(MultiStepBackend):
    """A branch's region is assumed to have S tokens, without the copied tokens of the prefix's last page."""

    def branch_regions(self, prefix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, steps = self.context.page_size, self.context.speculative_num_steps
        return super().branch_regions(prefix)[0], torch.full_like(prefix, -(-steps // page) * page)


@fault(
    "general",
    "matches-oracle reads-own-kv finite",
    "attended|slot",
    modes="draft-decode",
    slug="draft-copied-page-left-out",
)
class CopiedPageLeftOut(MultiStepBackend):
    """The partly filled last page of the prefix is treated as shared, so its copies are missing."""

    def branch_regions(self, prefix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page = self.context.page_size
        return (prefix + page - 1) // page * page, super().branch_regions(prefix)[1]


@fault(
    "general",
    "replay-follows-batch matches-oracle reads-own-kv finite writes-own-kv",
    "eager",
    modes="draft-decode",
    executions="graph",
    slug="draft-forwards-share-a-plan",
)
class ForwardsShareAPlan(MultiStepBackend):
    """All forwards of a graph have one set of buffers: the plan of the last one overwrites those before it."""

    def new_buffers(self, rows: int) -> list[Metadata]:
        return [self.new_buffer(rows)] * self.forwards


@fault(
    "general",
    "replay-follows-batch matches-oracle reads-own-kv finite writes-own-kv",
    "eager",
    modes="draft-decode",
    executions="graph",
    slug="draft-forwards-counted-since-the-plan",
)
class ForwardsCounted(MultiStepBackend):
    """Forwards are counted from the plan on: warm-ups count too, so the captured graph has only the last plan."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.calls = 0

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.calls = 0
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.calls = 0
        super().init_forward_metadata_out_graph(batch, in_capture)

    def step_of(self, batch: ForwardBatch) -> int:
        return min(self.calls, self.forwards - 1)

    def finish(self, batch: ForwardBatch) -> None:
        self.calls += 1


@fault(
    "sglang #27338, #27460",
    "replay-follows-batch matches-oracle reads-own-kv finite",
    "eager",
    modes="draft-decode",
    executions="graph",
    slug="draft-table-without-branches",
    modelled="rows that do not fit are left out; the real one wrote them over what follows in the graph's memory",
)
class TableWithoutBranches(MultiStepBackend):
    """The graphs' table has a row for each request, and a plan one for each branch."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name == "page_table":
            rows = len(target) // self.context.draft_branches
            target, source = target[:rows], source[:rows]
        super().copy_in(name, target, source)


@fault(
    "sglang #23037",
    "inputs-unchanged",
    "seq_lens",
    modes="draft-decode",
    slug="draft-advances-the-batch",
    modelled="the tensor in place, from forward to forward; the real one wrote a padded batch back",
)
class AdvancesTheBatch(MultiStepBackend):
    """Lengths advance in the batch's tensor, so the next round treats drafted tokens as accepted."""

    def finish(self, batch: ForwardBatch) -> None:
        batch.seq_lens[: batch.batch_size].add_(1)


@fault("general", "matches-oracle", "window", modes="draft-decode", slug="draft-window-of-the-first-forward")
class WindowOfTheFirst(MultiStepBackend):
    """All windows begin where the first forward's begins, so later forwards see one token too many per step."""

    step = 0

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        self.step = spec_of(batch).step
        return super().forward(q, k, v, layer, batch, save_kv_cache)

    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().window_start(position, layer) - self.step


class _SkipsWhatIsStored(PlannedBackend):
    """Verify leaves out tokens whose slots the round before wrote."""

    capabilities = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.before: dict[int, int] = {}

    @override
    def plan_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots = super().plan_slots(batch)
        if not batch.forward_mode.is_target_verify() or self.in_graph:
            return slots
        n, lens = self.context.num_draft_tokens, batch.seq_lens_cpu
        assert lens is not None
        slots = slots.view(-1, n).clone()
        for new, row, prefix in zip(slots, batch.req_pool_indices.tolist(), lens.tolist(), strict=True):
            stored = self.before.get(row, prefix) + n - prefix
            if stored < n:
                new[: max(0, stored)] = 0
            self.before[row] = prefix
        return slots.view(-1)


@fault(
    "general",
    "lossless",
    "rejected draft",
    modes="draft-decode",
    executions="eager",
    slug="verify-keeps-the-rejected-draft",
)
class KeepsTheRejectedDraft(SpeculativeBackend):
    """A request that continues has KV in the slots of its last tree, and verify does not store there again."""

    capabilities = SpeculativeBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})
    others = _SkipsWhatIsStored


@fault(
    "sglang 0.5.23 (TritonMultiStepDraftBackend)",
    "matches-oracle reads-own-kv finite",
    "only requests without a prefix are wrong",
    modes="draft-decode",
    slug="draft-counts-on-a-prefix",
)
class CountsOnAPrefix(MultiStepBackend):
    """An empty prefix is planned as a prefix of one key, although drafts without a prefix are declared."""

    def branch_lengths(self, batch: ForwardBatch, step: int) -> torch.Tensor:
        lens = batch.seq_lens[: batch.batch_size].to(torch.int32).clamp(min=1) + step + 1
        return lens.repeat_interleave(self.context.draft_branches)
