"""Class I: layers whose ids do not begin at 0, and a third layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)
_CAPABILITIES = PlannedBackend.capabilities.with_changes(
    families={"gqa"}, dtypes={"bf16"}, head_dims={64}, kv_dtypes={"same"}, page_sizes={16}, sinks=False
)


@fault(
    slug="width-of-layer-0",
    source="sglang #13837, #30340",
    modes=_ALL,
    checks=("completes",),
    hint="no layer of id 0",
)
class WidthOfLayer0(PlannedBackend):
    """The constructor asks the KV pool for layer 0, to know the width of values; a later pipeline rank does not have
    one."""

    capabilities = _CAPABILITIES

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.v_head_dim = context.kv_pool.get_value_buffer(0).shape[-1]


@fault(
    slug="layers-listed-by-id",
    source="sglang #36331; vLLM #40776",
    modes=_ALL,
    checks=("completes",),
    hint="IndexError",
)
class LayersListedById(PlannedBackend):
    """Data of layers are in a list with one entry per layer of this rank, and are looked up by layer id."""

    capabilities = _CAPABILITIES

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.windows = [layer.sliding_window_size for layer in context.layers]

    @override
    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return position - self.windows[layer.layer_id]


@fault(
    slug="plans-at-layer-0",
    source="general",
    modes=_ALL,
    executions=("eager",),
    checks=("completes",),
    hint="planned before",
)
class PlansAtLayer0(PlannedBackend):
    """A step is planned by its first layer, which is taken to be the one of id 0."""

    capabilities = _CAPABILITIES

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.in_graph = self.capturing = False

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
        if layer.layer_id == 0 and not self.in_graph:
            self.metadata = self.plan(batch)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@fault(
    slug="plan-outlives-last-layer",
    source="general",
    modes=_ALL,
    executions=("eager",),
    checks=("steps-independent", "completes", "matches-oracle", "writes-own-kv", "finite"),
    hint="",
)
class PlanOutlivesLastLayer(PlannedBackend):
    """A plan is kept until the last layer, which is known by its id: one less than the number of layers."""

    capabilities = _CAPABILITIES

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.in_graph = self.capturing = False
        if self.metadata is None or self.graphs:
            self.metadata = self.plan(batch)

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
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        if layer.layer_id == len(self.context.layers) - 1 and not self.in_graph:
            self.metadata = None
        return out


@fault(
    slug="settings-of-two-layers-by-turns",
    source="general; models whose layers repeat",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="only layer 7|for only two layers, or alternates",
)
class SettingsOfTwoLayersByTurns(PlannedBackend):
    """Settings of a windowed and a full layer are used alternately: right for two layers, from any id."""

    capabilities = _CAPABILITIES

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        kept = self.context.layers[(layer.layer_id - self.context.layers[0].layer_id) % 2]
        return super().attend(q, replace(kept, layer_id=layer.layer_id), meta)
