"""Class G: ALiBi: wrong slopes of query heads, or wrong distances of rows."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .dense import DenseBackend

_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY)


class AlibiBackend(DenseBackend):
    """Healthy parent: the bias is added to scaled logits, before the mask."""

    capabilities = LEAN.with_changes(
        eager=_MODES, graph=_MODES, bounds={"max_topk": 1}, windows=_MODES, options={"alibi": _MODES}
    )

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return self.with_bias(super().logits(rows, keys, layer), layer)

    def with_bias(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, G, W, C] of scaled logits, likewise, and the bias of each row and key."""
        slopes = self.slopes(layer)
        return logits if slopes is None else logits + slopes[..., None, None] * self.distance()[:, None, None]

    def slopes(self, layer: AttentionLayer) -> torch.Tensor | None:
        """[Hk, G] float32; None without ALiBi."""
        found = layer.alibi_slopes
        return None if found is None else found.view(layer.tp_k_head_num, layer.q_per_kv)

    def distance(self) -> torch.Tensor:
        """[B, W, C] int64: position of each key less that of each row."""
        return self.key_position - self.position[..., None]


@fault("general; slopes indexed by the head inside its group", "matches-oracle", "order turned", modes=_MODES)
class SlopesOfAnotherGroup(AlibiBackend):
    """Slopes are laid out as [G, Hk], so most query heads use the slope of another head."""

    def slopes(self, layer: AttentionLayer) -> torch.Tensor | None:
        found = layer.alibi_slopes
        return None if found is None else found.view(layer.q_per_kv, layer.tp_k_head_num).t()


@fault(
    "general; slopes made from the number of heads on the rank (FlashInfer's ALIBI with tensor parallelism)",
    "matches-oracle",
    "number of heads",
    modes=_MODES,
)
class SlopesOfTheFirstRank(AlibiBackend):
    """The kernel makes slopes from the number of its heads, as if the rank had all of them."""

    def slopes(self, layer: AttentionLayer) -> torch.Tensor | None:
        found = super().slopes(layer)
        if found is None:
            return None
        heads = layer.tp_q_head_num
        return (2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=found.device))).view_as(found)


@fault(
    "general; distances to the longest row of the batch, clamped",
    "matches-oracle",
    modes=_MODES,
    modelled="distances of more than 64 are clamped, where the longest request sets the bound",
)
class BiasByTheLongestRequest(AlibiBackend):
    """Distances are counted from the end of the longest request and clamped, so keys of short requests have equal
    bias."""

    def distance(self) -> torch.Tensor:
        return (self.key_position - self.kv_lens.max()).clamp(min=-64).expand(-1, self.position.shape[1], -1)


@fault("general; the bias is added to q.k, and the sum is scaled", "matches-oracle", "scaled slopes", modes=_MODES)
class BiasBeforeTheScale(AlibiBackend):
    """The scale is applied to the bias as well."""

    def distance(self) -> torch.Tensor:
        return super().distance() * self.scaling

    def with_bias(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        self.scaling = layer.scaling
        return super().with_bias(logits, layer)


@fault("general; slopes kept by the plan of the first layer", "matches-oracle", "slopes of layer 0", modes=_MODES)
class BiasOfTheFirstLayer(AlibiBackend):
    """Slopes are read from the first layer once, and used in all layers."""

    def slopes(self, layer: AttentionLayer) -> torch.Tensor | None:
        return super().slopes(self.context.layers[0])
