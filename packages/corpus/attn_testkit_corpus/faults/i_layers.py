"""Class I: layers whose ids do not begin at 0, and a third layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_CAPABILITIES = PlannedBackend.capabilities.with_changes(
    heads={"families": {"gqa"}, "head_dims": {64}},
    precision={"dtypes": {"bf16"}},
    kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16}},
    options={"sinks": False},
)


@fault("sglang #13837, #30340", "completes", "no layer of id 0", slug="width-of-layer-0")
class WidthOfLayer0(PlannedBackend):
    """The constructor reads the width of values from layer 0 of the KV pool, which a later pipeline rank does not
    have."""

    capabilities = _CAPABILITIES

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.v_head_dim = context.kv_pool.get_value_buffer(0).shape[-1]


@fault("sglang #36331; vLLM #40776", "completes", "IndexError")
class LayersListedById(PlannedBackend):
    """Data of layers are in a list with one entry per layer of this rank, and are looked up by layer id."""

    capabilities = _CAPABILITIES

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.windows = [layer.sliding_window_size for layer in context.layers]

    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return position - self.windows[layer.layer_id]


@fault("general", "completes", "planned before", executions="eager", slug="plans-at-layer-0")
class PlansAtLayer0(PlannedBackend):
    """A step is planned by its first layer, which is assumed to have id 0."""

    capabilities = _CAPABILITIES

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.in_graph = self.capturing = False

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if layer.layer_id == 0 and not self.in_graph:
            self.metadata = self.plan(batch)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@fault("general", "steps-independent completes matches-oracle writes-own-kv finite", executions="eager")
class PlanOutlivesLastLayer(PlannedBackend):
    """A plan is kept until the last layer, which is known by its id: one less than the number of layers."""

    capabilities = _CAPABILITIES

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.in_graph = self.capturing = False
        if self.metadata is None or self.graphs:
            self.metadata = self.plan(batch)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        if layer.layer_id == len(self.context.layers) - 1 and not self.in_graph:
            self.metadata = None
        return out


@fault("general; models whose layers repeat", "matches-oracle", "only layer 7|for only two layers, or alternates")
class SettingsOfTwoLayersByTurns(PlannedBackend):
    """Settings of a windowed and a full layer are used alternately: right for two layers, from any id."""

    capabilities = _CAPABILITIES

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        kept = self.context.layers[(layer.layer_id - self.context.layers[0].layer_id) % 2]
        return super().attend(q, replace(kept, layer_id=layer.layer_id), meta)
