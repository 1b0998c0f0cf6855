"""Class I: layers that read the keys and values of an earlier layer."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch

from .catalogue import fault
from .parent import PlannedBackend


class SharingBackend(PlannedBackend):
    """Healthy parent: a layer may have no keys and values of its own, and stores nothing then."""

    capabilities = PlannedBackend.capabilities.with_changes(
        kv_pool={"kv_sharing": True, "kv_dtypes": {"same"}, "page_sizes": {16}},
        heads={"families": {"gqa"}, "head_dims": {64}, "gqa_ratios": {2}},
        precision={"dtypes": {"bf16"}},
    )

    def stores(self, layer: AttentionLayer, asked: bool) -> bool:
        """True if a forward of this layer stores its keys and values."""
        return asked

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
        return super().forward(q, k, v, layer, batch, self.stores(layer, save_kv_cache))


@fault(
    "vllm-ascend #11791",
    "writes-own-kv matches-oracle finite reads-own-kv",
    "layer 1|save_kv_cache was False|nan|NaN",
)
class ReaderStoresItsOwn(SharingBackend):
    """The writer of keys and values runs for every layer, so a reader's replace those of the layer that it reads."""

    @override
    def stores(self, layer: AttentionLayer, asked: bool) -> bool:
        return asked or layer.kv_sharing_target_layer_id >= 0


@fault("general; a flag that is read once per step", "writes-own-kv matches-oracle finite reads-own-kv")
class FlagOfTheLastLayer(SharingBackend):
    """The model's last layer decides if keys are stored, so a model with a reader stores none."""

    @override
    def stores(self, layer: AttentionLayer, asked: bool) -> bool:
        return asked and self.context.layers[-1].kv_sharing_target_layer_id < 0
