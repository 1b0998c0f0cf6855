"""Class I: layers that differ in their heads, but are read from the KV pool with the strides of the first."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardMode

from .by_layer import ByLayerBackend
from .catalogue import fault

_MODES = tuple(mode for mode in ForwardMode if not mode.is_draft_decode())


@fault("general; vLLM #48710", "matches-oracle reads-own-kv finite", "the first layer", modes=_MODES)
class StridesOfTheFirstLayer(ByLayerBackend):
    """The kernel's strides of slots and heads are set once, for the first layer, and used for all layers."""

    def reads_from(self, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        return self.addresses(layer, slots, self.context.layers[0])


@fault("general", "writes-own-kv", modes=_MODES)
class RowsStoredByStridesOfTheFirstLayer(ByLayerBackend):
    """The cache writer keeps the strides of the first layer that it stored; the kernel uses each layer's own."""

    def writes_to(self, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        return self.addresses(layer, slots, self.context.layers[0])
