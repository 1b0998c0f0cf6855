"""Class A: modes that run only in graphs, so a replay cannot be compared with an eager run of the same batch."""

from __future__ import annotations

import contextlib

import torch
from typing_extensions import override

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, Unsupported

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}


class GraphsAlone(PlannedBackend):
    """Healthy parent: modes that are declared only for graphs never run eagerly."""

    capabilities = LEAN.with_changes(eager=(), graph=_ALL)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.forward_mode not in self.capabilities.eager:
            raise RuntimeError(f"{batch.forward_mode} has no eager plan")
        super().init_forward_metadata(batch)


@fault("general", "matches-oracle reads-own-kv finite", "declared only in graphs", modes=_ALL, executions="graph")
class CapturedLengthsInGraphsAlone(GraphsAlone):
    """Lengths stay those of the capture, and there is no eager run to compare with."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "kv_lens" or self.capturing:
            super().copy_in(name, target, source)


@fault("general", "padding-inert", "bucket of exactly", modes="decode", executions="graph")
class PaddedRowsCountInGraphsAlone(GraphsAlone):
    """The last live request loses a key if the batch has padded ones, and there is no eager run to compare with."""

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        live = batch.out_cache_loc.shape[0]
        if not self.capturing and 0 < live < len(views.kv_lens):
            views.kv_lens[live - 1].sub_(1).clamp_(min=1)


@fault(
    "general",
    "refuses-undeclared",
    "the constructor accepted it",
    modes=_ALL,
    executions="graph",
    slug="graphs-alone-and-a-constructor-that-checks-nothing",
)
class GraphsAloneAndNothingChecked(GraphsAlone):
    """The constructor accepts undeclared contexts, in a class of which no mode runs eagerly."""

    def __init__(self, context: BackendContext) -> None:
        with contextlib.suppress(Unsupported):
            super().__init__(context)
