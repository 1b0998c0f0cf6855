"""Class A: batches of several widths on one instance, whose graphs were captured for each."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, VerifyInput

from .b_empty_batches import LEAN
from .catalogue import fault
from .multi_step import MultiStepBackend, spec_of
from .parent import Metadata, PlannedBackend

_VERIFY = (ForwardMode.TARGET_VERIFY,)
_DRAFT = (ForwardMode.DRAFT_DECODE,)


class PerWidthBackend(PlannedBackend):
    """Healthy parent: target-verify of several widths. Graphs share buffers, and are kept by batch size and width."""

    capabilities = LEAN.with_changes(
        eager=_VERIFY, graph=_VERIFY, bounds={"max_topk": 1}, windows=(), server={"narrower_widths": _VERIFY}
    )

    def __init__(self, context: BackendContext) -> None:
        self.nodes = context.num_draft_tokens
        """N of the batch that was planned last."""
        super().__init__(context)

    @override
    def max_q_len(self, mode: ForwardMode) -> int:
        return self.nodes

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.nodes = self.nodes_of(batch)
        super().init_forward_metadata(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.nodes = self.nodes_of(batch)
        super().init_forward_metadata_out_graph(batch, in_capture)

    def nodes_of(self, batch: ForwardBatch) -> int:
        """N of a batch."""
        assert isinstance(batch.spec_info, VerifyInput)
        return batch.spec_info.draft_token_num

    @override
    def key(self, batch: ForwardBatch) -> tuple[ForwardMode, int]:
        return batch.forward_mode, batch.batch_size * (self.context.num_draft_tokens + 1) + self.nodes_of(batch)

    @override
    def views(self, batch: ForwardBatch) -> Metadata:
        views, n = super().views(batch), self.nodes_of(batch)
        assert views.mask is not None
        return replace(views, mask=views.mask.view(-1)[: batch.batch_size * n * n].view(batch.batch_size, n, n))


@fault(
    "general; speculative_num_draft_tokens read from the configuration (sglang)",
    "matches-oracle replay-follows-batch",
    "width that is not the batch",
    modes="target-verify",
    slug="rows-lie-at-the-configured-width",
)
class RowsAtTheConfiguredWidth(PerWidthBackend):
    """The first row of each request is a multiple of num_draft_tokens, however narrow the batch is."""

    def plan_offsets(self, counts: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        starts = self.index[: len(counts)] * self.context.num_draft_tokens
        return torch.cat([starts, starts[-1:] + counts[-1:]]).to(torch.int32)


@fault(
    "general; a metadata buffer of the widest graph, reused for the narrow ones",
    "matches-oracle buckets-independent finite reads-own-kv",
    "width that is not the batch",
    modes="target-verify",
    executions="graph",
    slug="mask-rows-as-long-as-the-widest",
)
class MaskRowsOfTheWidest(PerWidthBackend):
    """The plan fills masks in rows of num_draft_tokens, and a narrow graph reads rows of its own width."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name == "mask":
            assert self.buffers.mask is not None
            rows = self.buffers.mask[: len(target), : target.shape[1], : target.shape[2]]
            rows.copy_(source)
        else:
            super().copy_in(name, target, source)


@fault(
    "general; a width that is kept on the instance at capture",
    "matches-oracle replay-follows-batch buckets-independent",
    "width that is not the batch",
    modes="target-verify",
    executions="graph",
)
class KeysOfTheWidthCapturedLast(PerWidthBackend):
    """The plan of a replay adds to the prefix the width that was captured last, which is the narrowest."""

    captured = 0

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        if self.capturing:
            self.captured = self.nodes
        wrong = torch.full_like(counts, self.captured) if self.in_graph else counts
        return super().plan_lengths(batch, wrong)


class PerDepthBackend(MultiStepBackend):
    """Healthy parent: draft-decode of several numbers of steps, with a plan for each forward that a batch has."""

    capabilities = MultiStepBackend.capabilities.with_changes(windows=(), server={"narrower_widths": _DRAFT})

    def __init__(self, context: BackendContext) -> None:
        self.depth = context.speculative_num_steps
        """S of the batch that was planned last."""
        super().__init__(context)

    @override
    def key(self, batch: ForwardBatch) -> tuple[ForwardMode, int]:
        steps = self.context.speculative_num_steps
        return batch.forward_mode, batch.batch_size * (steps + 1) + spec_of(batch).num_steps

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        key, forwards = self.key(batch), self.steps[: spec_of(batch).num_steps - 1]
        if in_capture:
            self.drafts[key] = [self.rows_of(whole, batch) for whole in forwards]
        self.draft = self.drafts[key]
        for views, plan in zip(self.draft, self.plan_draft(batch), strict=True):
            self.fill(views, plan, batch)

    @override
    def plan_draft(self, batch: ForwardBatch) -> list[Metadata]:
        self.depth = self.depth_of(batch)
        return [self.plan_forward(batch, step) for step in range(spec_of(batch).num_steps - 1)]

    def depth_of(self, batch: ForwardBatch) -> int:
        """S by which branches are laid out in the request table."""
        return spec_of(batch).num_steps

    @override
    def branch_regions(self, prefix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, last = self.context.page_size, prefix % self.context.page_size
        return prefix - last, (last + self.depth + page - 1) // page * page


@fault(
    "general; speculative_num_steps read from the configuration (sglang)",
    "matches-oracle reads-own-kv finite",
    "width that is not the batch",
    modes="draft-decode",
    slug="branches-lie-at-the-configured-depth",
)
class BranchesAtTheConfiguredDepth(PerDepthBackend):
    """Regions of branches are as long as drafts of speculative_num_steps need, and a shorter draft has shorter ones."""

    def depth_of(self, batch: ForwardBatch) -> int:
        return self.context.speculative_num_steps


@fault(
    "vLLM #56734, in a draft's forwards",
    "writes-own-kv",
    "slot",
    modes="draft-decode",
    executions="graph",
    modelled="the column is the first of the request, as a length of 0 gives it",
)
class PaddedDraftRowsWriteLiveSlots(PerDepthBackend):
    """Slots of padded requests are looked up in the request table, through rows that an earlier batch left."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.rows = torch.zeros(max_bs, dtype=torch.int64, device=self.context.device)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        live, bs, each = batch.batch_size - getattr(batch, "num_padding", 0), batch.batch_size, self.context
        self.rows[:live].copy_(batch.req_pool_indices[:live])
        stale = each.req_to_token[self.rows[live:bs], 0].long().repeat_interleave(each.draft_branches)
        for forward in self.draft:
            forward.slots[live * each.draft_branches :] = stale
