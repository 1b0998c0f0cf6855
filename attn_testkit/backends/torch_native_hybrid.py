"""``torch_native_hybrid``: layers that keep a state and softmax layers in one model, each run by its own backend. It is
a wrapper like those of servers: plans, captures and replays go to both backends, and a layer's forward to the backend
of its kind.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from ..contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    StateBackend,
    StateInput,
    StateLayer,
    VerifyMask,
)
from .torch_native import TorchNativeBackend
from .torch_native_state import TorchNativeStateBackend


class TorchNativeHybridBackend(StateBackend):
    """``TorchNativeStateBackend`` and ``TorchNativeBackend``, for all kinds of state layers, with softmax
    layers."""

    capabilities = TorchNativeStateBackend.capabilities.with_changes(state={"hybrid": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.softmax, self.states = self.parts(context)

    def parts(self, context: BackendContext) -> tuple[AttentionBackend, StateBackend]:
        """The backend of the softmax layers, and the backend of the layers that keep a state."""
        states = tuple(layer for layer in context.layers if isinstance(layer, StateLayer))
        softmax = tuple(layer for layer in context.layers if not isinstance(layer, StateLayer))
        return (
            TorchNativeBackend(replace(context, layers=softmax, state=None)),
            TorchNativeStateBackend(replace(context, layers=states)),
        )

    @property
    def both(self) -> tuple[AttentionBackend, ...]:
        """The backends that plan each batch."""
        return self.softmax, self.states

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        for each in self.both:
            each.init_forward_metadata(batch)

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for each in self.both:
            each.init_cuda_graph_state(max_bs, max_num_tokens)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for each in self.both:
            each.init_forward_metadata_out_graph(batch, in_capture)

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        for each in self.both:
            each.init_forward_metadata_in_graph(batch)

    @override
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.softmax.get_cuda_graph_seq_len_fill_value()

    @property
    @override
    def verify_mask(self) -> VerifyMask | None:
        """Mask of the softmax layers."""
        return self.softmax.verify_mask

    @override
    def forward(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Run the backend of the layer's kind. A layer that keeps a state is given ``mixed``, ``a`` and ``b``."""
        if isinstance(layer, StateLayer):
            return self.states.forward(q, k, v, layer, batch)
        assert k is not None
        assert v is not None
        return self.softmax.forward(q, k, v, layer, batch)

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        """Commit states. Keys of rejected nodes are overwritten later."""
        self.states.commit(steps, state)
