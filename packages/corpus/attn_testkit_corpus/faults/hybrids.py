"""The parent of faults of hybrid models: a wrapper around a backend of states and one of softmax attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    StateBackend,
    StateInput,
    StateLayer,
)

from .parent import PlannedBackend
from .states import StateParent
from .states_of_servers import SlotsParent


class HybridParent(StateBackend):
    """A right wrapper: each hook goes to both backends, and each layer to that of its kind."""

    capabilities = StateParent.capabilities.with_changes(state={"hybrid": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        own = tuple(layer for layer in context.layers if isinstance(layer, StateLayer))
        others = tuple(layer for layer in context.layers if not isinstance(layer, StateLayer))
        self.states = self.of_states(replace(context, layers=own))
        self.softmax = self.of_softmax(replace(context, layers=others, state=None))

    def of_states(self, context: BackendContext) -> StateParent:
        """The backend of the layers that keep a state."""
        return StateParent(context)

    def of_softmax(self, context: BackendContext) -> PlannedBackend:
        """The backend of the softmax layers."""
        return PlannedBackend(context)

    def planned(self, in_capture: bool) -> tuple[AttentionBackend, ...]:
        """Backends that plan a capture or a replay."""
        return self.states, self.softmax

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        for each in (self.states, self.softmax):
            each.init_forward_metadata(batch)

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for each in (self.states, self.softmax):
            each.init_cuda_graph_state(max_bs, max_num_tokens)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for each in self.planned(in_capture):
            each.init_forward_metadata_out_graph(batch, in_capture)

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        for each in (self.states, self.softmax):
            each.init_forward_metadata_in_graph(batch)

    @override
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.softmax.get_cuda_graph_seq_len_fill_value()

    @override
    def forward(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        if isinstance(layer, StateLayer):
            return self.states.forward(q, k, v, layer, batch)
        return self.softmax.forward(q, k, v, layer, batch)

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        self.states.commit(steps, state)


class HybridBySlotsParent(HybridParent):
    """A right wrapper whose layers with a state have a slot for each node of a draft."""

    capabilities = SlotsParent.capabilities.with_changes(state={"hybrid": True})

    @override
    def of_states(self, context: BackendContext) -> StateParent:
        return SlotsParent(context)
