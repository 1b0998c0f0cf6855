"""Class I: layers that differ in their heads, found in the KV pool by the strides of the first."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardMode

from .by_layer import ByLayerBackend
from .catalogue import fault

_MODES = tuple(mode for mode in ForwardMode if not mode.is_draft_decode())


@fault(
    slug="strides-of-the-first-layer",
    source="general; vLLM #48710",
    modes=_MODES,
    checks=("matches-oracle", "reads-own-kv", "finite"),
    hint="the first layer",
)
class StridesOfTheFirstLayer(ByLayerBackend):
    """The kernel's strides of slots and heads are set once, for the first layer, and all layers are read by them."""

    @override
    def reads_from(self, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        return self.addresses(layer, slots, self.context.layers[0])


@fault(
    slug="rows-stored-by-strides-of-the-first-layer",
    source="general",
    modes=_MODES,
    checks=("writes-own-kv",),
    hint="",
)
class RowsStoredByStridesOfTheFirstLayer(ByLayerBackend):
    """The cache writer keeps the strides of the first layer that it stored rows of; the kernel has each layer's own."""

    @override
    def writes_to(self, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        return self.addresses(layer, slots, self.context.layers[0])
