"""Class C: stores that make one plane of the KV pool wrong: scales that are reset, or missing for some heads."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .catalogue import fault
from .parent import Metadata, PlannedBackend
from .row_formats import RowFormatsBackend

_ALL = tuple(mode for mode in ForwardMode if mode is not ForwardMode.DRAFT_DECODE)


@fault(
    "general; scales per token that a step clears before it stores, whether it stores or not",
    "writes-own-kv",
    r"only K scales changed, and K values, V values, V scales did not: all of them are 1, as if they were reset\. "
    "save_kv_cache was False",
    modes=_ALL,
    executions="eager",
    modelled="the scales are reset when attention is through, so that only the memory shows it",
)
class ScalesOfStoredKeysReset(RowFormatsBackend):
    """A step that stores nothing resets the scales of its keys to 1."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"int8_per_token_head", "fp8_per_token_head"}}
    )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out, meta = super().forward(q, k, v, layer, batch, save_kv_cache), self.metadata
        assert meta is not None
        if not save_kv_cache:
            scales = self.context.kv_pool.get_planes(layer.layer_id)[0]["scales"]
            at = self.at(meta.slots.long())
            scales.index_put_(at, torch.ones_like(scales[at]))
        return out


@fault(
    "general; a scale that a store applies to the heads of its first tile",
    "writes-own-kv matches-oracle",
    "only a scale is wrong",
    modes=_ALL,
)
class ScaleOfTheFirstKvHeadAlone(PlannedBackend):
    """Only the first KV head of an FP8 pool is divided by the scale of its layer; the others are stored unscaled."""

    capabilities = PlannedBackend.capabilities.with_changes(
        heads={"families": {"gqa"}, "gqa_ratios": {2, 4}}, kv_pool={"kv_dtypes": {"fp8_e4m3"}}
    )

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        key = self.context.kv_pool.get_key_buffer(layer.layer_id).view(torch.uint8)
        own = key[meta.slots, :1].clone()
        super().write_kv(replace(layer, k_scale=1.0), k, v, meta)
        key[meta.slots, :1] = own
