"""Class I: layers of several KV groups that use the tables, slots or metadata of the wrong group."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode, KVGroup

from .catalogue import fault
from .grouped import GroupedBackend
from .parent import Metadata, PlannedBackend

_MODES = tuple(mode for mode in ForwardMode if not mode.is_draft_decode())


@fault(
    "sglang #26531, #26957",
    "reads-own-kv matches-oracle finite",
    "only in layers of KV group 1",
    modes=_MODES,
    modelled="upstream the windowed layers read by the full layers' table; here all read by that of the first group",
)
class TableOfTheFirstKVGroup(GroupedBackend):
    """A flag for windowed layers is set once, before their pool exists: all layers read by one table."""

    def context_of(self, group: KVGroup) -> BackendContext:
        return replace(super().context_of(group), req_to_token=self.context.req_to_token)


@fault("general", "writes-own-kv", modes=_MODES)
class SlotsOfTheFirstKVGroup(GroupedBackend):
    """New keys and values are stored by ``out_cache_loc`` in every pool."""

    def batch_of(self, group: KVGroup, batch: ForwardBatch) -> ForwardBatch:
        return super().batch_of(self.context.groups[0], batch)


@fault(
    "sglang #29858", "replay-follows-batch writes-own-kv matches-oracle", "layer [67]", modes=_MODES, executions="graph"
)
class ReplayPlansFirstKVGroupOnly(GroupedBackend):
    """Only the first group's metadata are filled before a replay; those of the other group keep the values of the
    capture."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for child, own in list(self.each(batch))[: None if in_capture else 1]:
            child.init_forward_metadata_out_graph(own, in_capture)


class _MaximumBeforeTheWindow(PlannedBackend):
    @override
    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        assert self.metadata is not None
        held = self.index[: logits.shape[-1]] < self.metadata.kv_lens[:, None]
        top = logits.masked_fill(~held[:, None, None, None], -torch.inf).amax(-1, keepdim=True)[:, None]
        p = torch.exp(logits[:, None] - top).masked_fill(~seen[:, :, :, None, None], 0.0)
        total = p.sum(-1, keepdim=True)
        out = torch.einsum("bnwhgs,bshd->bnwhgd", p / total.clamp(min=1e-30), values)
        acc.copy_(out.flatten(3, 4))
        lse.copy_((top + total.log()).squeeze(-1).flatten(3, 4))


@fault("general", "matches-oracle finite", modes=_MODES)
class MaximumBeforeTheWindow(GroupedBackend):
    """The softmax subtracts the largest logit of all keys, including those in pages that a windowed group has freed."""

    child = _MaximumBeforeTheWindow


class FreedBackend(GroupedBackend):
    """Healthy parent: the tables of windowed groups may have -1 or slots of page 0 for keys in freed pages."""

    capabilities = GroupedBackend.capabilities.with_changes(
        server={"freed_pages": {"listed", "minus_one", "null_page"}}
    )

    @override
    def context_of(self, group: KVGroup) -> BackendContext:
        return replace(super().context_of(group), dialect=replace(self.context.dialect, freed_pages="listed"))


class _ReadsUpToTheLength(PlannedBackend):
    @override
    def mask_values(self, values: torch.Tensor, seen: torch.Tensor, meta: Metadata) -> torch.Tensor:
        held = self.index[: values.shape[1]] < meta.kv_lens[:, None]
        return values.masked_fill(~held[:, :, None, None], 0.0)


@fault("sglang #36477", "reads-own-kv finite matches-oracle", "request table of a windowed KV group has", modes=_MODES)
class FreedEntriesAreRead(FreedBackend):
    """Keys are bounded only by their number, so entries of freed pages index the pool, with a weight of 0."""

    child = _ReadsUpToTheLength


class _CountsPages(PlannedBackend):
    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        plan = super().plan(batch)
        pages = (plan.page_table > 0).sum(1).to(torch.int32)
        plan.kv_lens.clamp_(max=pages * self.context.page_size)
        return plan


@fault(
    "general",
    "reads-own-kv matches-oracle finite",
    "none of its own KV tokens is read|page 0 is read|are missing",
    modes=_MODES,
)
class FreedEntriesAreNotCounted(FreedBackend):
    """A request's keys are at most those of its entries that are neither -1 nor the null block, so freed pages count
    against its end."""

    child = _CountsPages
