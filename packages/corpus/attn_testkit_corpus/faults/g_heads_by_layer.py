"""Class G: values that depend on a layer's heads, taken from the first layer: group, scale, plan, splits."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardMode

from .by_layer import ByLayerBackend
from .catalogue import fault
from .parent import Metadata

_MODES = tuple(mode for mode in ForwardMode if not mode.is_draft_decode())
_FIRST = "the first layer"


@fault("general", "matches-oracle", _FIRST, modes=_MODES)
class GroupOfTheFirstLayer(ByLayerBackend):
    """The number of query heads per KV head is kept from the first layer, and used in all layers to find KV heads."""

    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = next(each for each in self.context.layers if each.layer_id == layer.layer_id)
        head = self.index[: own.tp_q_head_num] // self.context.layers[0].q_per_kv
        key, value = super().gather(own, slots)
        of = head.clamp(max=own.tp_k_head_num - 1)
        return key[:, :, of], value[:, :, of]

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        # With a KV head for each query head, of which several are the same.
        return super().attend(q, replace(layer, tp_k_head_num=layer.tp_q_head_num), meta)


@fault("general", "matches-oracle", _FIRST, modes=_MODES)
class ScaleByHeadDimOfTheFirstLayer(ByLayerBackend):
    """The kernel divides by the square root of the head dim of the first layer."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        off = (layer.head_dim / self.context.layers[0].head_dim) ** 0.5
        return super().logits(rows, keys, replace(layer, scaling=layer.scaling * off))


@fault(
    "sglang #32625, #32062; vLLM #41651",
    "output-written matches-oracle finite",
    _FIRST,
    modes=_MODES,
    modelled="upstream the plan counts a model's heads; here those of its first layer",
)
class PlannedForHeadsOfTheFirstLayer(ByLayerBackend):
    """A plan has work for the query heads of the first layer. A layer with more heads loses the rows of the others."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        whole = super().attend(q, layer, meta)
        planned = len(q) * self.context.layers[0].tp_q_head_num
        out = torch.empty_like(whole)
        out.flatten(0, 1)[:planned] = whole.flatten(0, 1)[:planned]
        return out


@fault(
    "vLLM #39775",
    "matches-oracle",
    modes=_MODES,
    modelled="upstream the number of heads is the target model's, and the draft's layers have others",
)
class SplitsForHeadsOfTheFirstLayer(ByLayerBackend):
    """Keys are split for the heads of the first layer, so a layer with more heads starts fewer splits."""

    def in_split(self, meta: Metadata) -> torch.Tensor:
        first = self.context.layers[0].tp_q_head_num
        splits = -(-self.max_splits * first // self.heads)
        return super().in_split(meta) & (self.index[: self.max_splits, None] < splits)

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        self.heads = layer.tp_q_head_num
        return super().attend(q, layer, meta)
