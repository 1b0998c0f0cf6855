"""Class M: state of a draft that a backend keeps until the next round, which only a greedy-equivalence loop runs."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, StateLayer

from .catalogue import fault
from .grouped import GroupedBackend
from .hybrids import HybridBySlotsParent, HybridParent
from .parent import PlannedBackend
from .states import StateParent
from .states_of_servers import SlotsParent


class _Continues(PlannedBackend):
    """Tracks the requests of a verify that continue one of the round before."""

    capabilities = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.before: dict[int, tuple[int, list[int]]] = {}
        """Row of the request table -> keys before its last draft, and their slots."""

    def rejected(self, batch: ForwardBatch) -> list[int]:
        """Tokens of each request's last draft that were rejected; 0 for one that does not continue."""
        n, lens, found = self.context.num_draft_tokens, batch.seq_lens_cpu, list[int]()
        assert lens is not None
        for row, prefix in zip(batch.req_pool_indices.tolist(), lens.tolist(), strict=True):
            last, held = self.before.get(row, (-1, []))
            slots = self.context.req_to_token[row, :prefix].tolist()
            continues = 0 < last < prefix <= last + n and slots[:last] == held
            found.append(last + n - prefix if continues else 0)
            self.before[row] = prefix, slots
        return found


class _KeepsRejectedKeys(_Continues):
    @override
    def plan_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots = super().plan_slots(batch)
        if not batch.forward_mode.is_target_verify() or self.in_graph:
            return slots
        slots = slots.view(-1, self.context.num_draft_tokens).clone()
        for new, stored in zip(slots, self.rejected(batch), strict=True):
            new[:stored] = 0
        return slots.view(-1)


@fault("general", "writes-own-kv reads-own-state lossless", modes="target-verify", executions="eager")
class HybridKeepsKeysOfARejectedDraft(HybridParent):
    """States are rolled back, and the softmax layers of the model keep the keys of the rejected tokens."""

    capabilities = HybridParent.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def of_softmax(self, context: BackendContext) -> PlannedBackend:
        return _KeepsRejectedKeys(context)


@fault("general", "lossless", "rejected draft", modes="target-verify", executions="eager")
class KVGroupKeepsKeysOfARejectedDraft(GroupedBackend):
    """The pools of KV groups are not overwritten if a request continues after a rejected draft."""

    capabilities = GroupedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})
    child = _KeepsRejectedKeys


class _WindowOfTheDraftBefore(_Continues):
    shift: torch.Tensor | None = None

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self.shift = None
        if batch.forward_mode.is_target_verify():
            self.shift = torch.tensor(self.rejected(batch), device=self.context.device)

    @override
    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        start = super().window_start(position, layer)
        return start if self.shift is None else start + self.shift[:, None]


@fault(
    "general",
    "lossless",
    modes="target-verify",
    executions="eager",
    modelled="upstream the length that a window is measured from is kept on the device from round to round",
)
class WindowBeginsBehindTheRejectedDraft(GroupedBackend):
    """The length from which windows are measured still includes the rejected tokens of the round before."""

    capabilities = GroupedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})
    child = _WindowOfTheDraftBefore


class _PromptsAtTheEnd(SlotsParent):
    @override
    def first_column_of_prompts(self, columns: int, layer: StateLayer) -> int:
        return columns - layer.conv_width + 1


@fault("general (vLLM causal_conv1d_fn with speculative columns)", "lossless", modes="target-verify")
class WindowOfAPromptInTheLastColumns(HybridBySlotsParent):
    """A prompt leaves its window in the last columns, and the first verify reads it from the first ones."""

    def of_states(self, context: BackendContext) -> StateParent:
        return _PromptsAtTheEnd(context)
