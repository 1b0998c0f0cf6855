"""Healthy wrappers, as servers put around backends: one child for each layer, or one child that every hook calls."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    ForwardBatch,
    VerifyMask,
)

from .dense import DenseBackend
from .parent import PlannedBackend


class HybridBackend(AttentionBackend):
    """Healthy parent: a ``PlannedBackend`` for each layer, as a server wraps the backends of a hybrid model."""

    capabilities: ClassVar[Capabilities] = PlannedBackend.capabilities

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.children = [PlannedBackend(context) for _ in context.layers]

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self.children[self.context.layers.index(layer)].forward(q, k, v, layer, batch, save_kv_cache)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        for child in self.children:
            child.init_forward_metadata(batch)

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for child in self.children:
            child.init_cuda_graph_state(max_bs, max_num_tokens)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for child in self.children:
            child.init_forward_metadata_out_graph(batch, in_capture)

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        for child in self.children:
            child.init_forward_metadata_in_graph(batch)


class WrapperBackend(AttentionBackend):
    """Healthy parent: one ``DenseBackend``, to which every hook is passed on."""

    capabilities: ClassVar[Capabilities] = DenseBackend.capabilities

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.child: AttentionBackend = DenseBackend(context)

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self.child.forward(q, k, v, layer, batch, save_kv_cache)

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.child.init_cuda_graph_state(max_bs, max_num_tokens)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.child.init_forward_metadata_out_graph(batch, in_capture)

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.child.init_forward_metadata_in_graph(batch)

    @property
    @override
    def verify_mask(self) -> VerifyMask | None:
        return self.child.verify_mask
