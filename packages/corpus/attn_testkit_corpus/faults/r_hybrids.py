"""Class R: hybrid models. One plan for two backends, slots of the other kind, layers counted over both."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionBackend, BackendContext, ForwardBatch, StateLayer

from .catalogue import fault
from .hybrids import HybridParent
from .states import StateParent


class _ByKVSlots(StateParent):
    @override
    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        first = self.context.req_to_token[batch.req_pool_indices, 0].long()
        return (first // self.context.page_size).clamp(max=self.states.pool.num_slots - 1)


@fault("general", "writes-own-state reads-own-state matches-oracle", modes="decode")
class StatesBySlotsOfKeys(HybridParent):
    """The slot of a state is looked up in the request table of the softmax layers."""

    def of_states(self, context: BackendContext) -> StateParent:
        return _ByKVSlots(context)


class _CountedOverAll(StateParent):
    every: tuple[int, ...] = ()

    @override
    def pools(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        place = self.every.index(layer.layer_id)
        return super().pools(self.states.layers[place % len(self.states.layers)])


@fault(
    "general",
    "state-matches-oracle matches-oracle conv-window-exact",
    modes="decode",
    modelled="a place beyond the list is counted from its start",
)
class LayersWithAStateCountedOverAll(HybridParent):
    """The pool of a layer is looked up by its place among all layers, not among those that keep a state."""

    def of_states(self, context: BackendContext) -> StateParent:
        made = _CountedOverAll(context)
        made.every = tuple(layer.layer_id for layer in self.context.layers)
        return made


@fault("general", "replay-follows-batch", modes="decode target-verify", executions="graph")
class ReplayPlansOneOfTwoBackends(HybridParent):
    """The wrapper passes a replay on only to the backend of states, so softmax layers read the plan of the capture."""

    def planned(self, in_capture: bool) -> tuple[AttentionBackend, ...]:
        return super().planned(in_capture) if in_capture else (self.states,)


@fault("general", "replay-follows-batch matches-oracle finite", modes="decode target-verify", executions="graph")
class PlansOfTwoBackendsInOneBuffer(HybridParent):
    """Both backends plan in the server's one buffer of integers per request: slots overwrite lengths."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        assert batch.state is not None
        self.softmax.buffers.kv_lens[: batch.batch_size] = batch.state.indices.clamp(min=1)


@fault("general", "writes-own-kv matches-oracle finite", modes="decode", executions="eager")
class KeysBySlotsOfStates(HybridParent):
    """Keys and values of a token are stored in the slot of its request's state."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        assert batch.state is not None
        assert self.softmax.metadata is not None
        self.softmax.metadata.slots = batch.state.indices.long() + self.context.page_size
