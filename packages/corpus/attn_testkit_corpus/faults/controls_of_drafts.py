"""Healthy backends for drafts, which differ in the time and inputs of their plans."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch

from .a_narrower_widths import PerDepthBackend, PerWidthBackend
from .catalogue import control
from .multi_step import MultiStepBackend, spec_of
from .o_draft_decode import CountsOnAPrefix
from .parent import Metadata
from .speculative import SpeculativeBackend


@control()
class DraftPlannedAtOnce(MultiStepBackend):
    """The parent of the faults of drafts: a plan for each forward before the first, as sglang's multi-step backends."""


@control()
class DraftPlannedStepByStep(MultiStepBackend):
    """One set of buffers; each forward is planned into it on the device, right before it, as vLLM's drafters do."""

    def new_buffers(self, rows: int) -> list[Metadata]:
        return [self.new_buffer(rows)] * self.forwards

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.draft = self.new_buffers(batch.batch_size * self.context.draft_branches)
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        step = spec_of(batch).step
        self.fill(self.draft[step], self.plan_forward(batch, step), batch)


@control()
class DraftLengthsFromPositions(MultiStepBackend):
    """A row's keys are counted from its position, which the server advances between forwards."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        plan, lens = self.draft[spec_of(batch).step], (batch.positions + 1).to(torch.int32)
        plan.kv_lens.copy_(lens)
        plan.chunk.copy_(self.plan_splits(lens))

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self.init_forward_metadata_in_graph(batch)


@control()
class DraftBesideItsTarget(SpeculativeBackend):
    """Drafts, verify and draft-extend on one instance, each planned by a separate child: it passes the loop."""

    capabilities = SpeculativeBackend.capabilities.with_changes(heads={"families": {"gqa"}}, windows=())


@control()
class DraftBehindAPrefill(CountsOnAPrefix):
    """A draft without a prefix gives wrong results, and is not declared (sglang's multi-step backends)."""

    capabilities = CountsOnAPrefix.capabilities.with_changes(server={"drafts_without_prefix": False})


@control()
class GraphsOfSeveralWidths(PerWidthBackend):
    """Verify graphs of each width share their buffers, and are kept by batch size and width (vLLM's dynamic drafts)."""


@control()
class GraphsOfSeveralDepths(PerDepthBackend):
    """Draft graphs of fewer forwards use the first plans (vLLM's dynamic drafts)."""
