"""Healthy controls of layers that differ."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch

from .by_layer import ByLayerBackend
from .catalogue import control
from .dense import DenseBackend, Visibility
from .encoder_decoder import EncoderDecoderBackend, EncoderInItsOwnGroup
from .g_alibi import AlibiBackend
from .g_qq_bias import QQBiasBackend
from .g_server_ranks import HeadsOfRanksParent
from .grouped import GroupedBackend
from .i_kv_groups import FreedBackend
from .i_kv_sharing import SharingBackend
from .i_wider_keys import WIDER_KEYS, WiderKeysBackend
from .parent import PlannedBackend


@control()
class BackendPerKVGroup(GroupedBackend):
    """A backend for each KV group, as vLLM has a metadata builder for each."""


@control()
class HeadsOfEachLayer(ByLayerBackend):
    """Layers of one instance differ in head counts and head dims (Gemma 4): strides and splits are the layer's own."""


@control()
class HeadsOfAttentionRanks(HeadsOfRanksParent):
    """Heads of a layer are those of the model divided by the ranks of attention, as in SGLang's Triton class."""


@control()
class FreedPagesAreNotListed(FreedBackend):
    """Tables whose entries for freed pages are -1 (sglang's unified pool) or those of the null block (vLLM)."""


@control()
class LayersThatReadAnEarlierOne(SharingBackend):
    """A last layer without keys and values of its own, which reads those of the first (Gemma 3n, YOCO)."""


@control()
class HeadsOfEachKVGroup(GroupedBackend):
    """A backend for each KV group, whose layers differ in their heads from those of the other group."""

    capabilities = GroupedBackend.capabilities.with_changes(
        heads={"heads_by_layer": True, "head_dims": {64, 128}, "gqa_ratios": {2, 4}}
    )
    child = ByLayerBackend


@control()
class HeadsOfEachLayerInEveryFamily(DenseBackend):
    """Layers differ in their heads, with sinks, soft caps, FP8 pools and every family, without a plan."""

    capabilities = DenseBackend.capabilities.with_changes(
        heads={
            "heads_by_layer": True,
            "families": {"mha", "gqa", "mqa"},
            "head_dims": {32, 64},
            "gqa_ratios": {1, 2, 4},
        },
        kv_pool={"page_sizes": {4}},
        bounds={"max_q_rows": 6, "max_topk": 2, "max_context_len": 1 << 12},
    )


@control()
class KeysWiderThanValues(WiderKeysBackend):
    """Keys of 128 next to values of 64, in separate buffers (MiMo-V2; DeepSeek's models as MHA)."""

    capabilities = WIDER_KEYS.with_changes(
        eager=PlannedBackend.capabilities.eager,
        graph=PlannedBackend.capabilities.graph,
        bounds={"max_topk": 4},
        windows=PlannedBackend.capabilities.eager,
        options={"sinks": True},
        kv_pool={"kv_dtypes": {"same", "fp8_e4m3"}},
    )


@control()
class Alibi(AlibiBackend):
    """Logits with a slope for each query head of the rank (BLOOM, MPT, Baichuan)."""


@control()
class AlibiFromTheEndOfARequest(AlibiBackend):
    """The bias uses the distance to the end of the request, which differs by a constant per row (vLLM)."""

    def distance(self) -> torch.Tensor:
        return (self.key_position - self.kv_lens[:, None, None]).expand(-1, self.position.shape[1], -1)


@control()
class QQBias(QQBiasBackend):
    """A bias of each request among its rows, added to capped logits."""


@control()
class QQBiasIsTheMask(QQBiasBackend):
    """Rows of a request are masked only by -inf in the bias (vLLM's tree attention)."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        if self.context.qq_bias == "none":
            return position, key, visible
        held = self.key < self.kv_lens[:, None, None]
        return position, key, held.expand(-1, len(offset), -1)


@control()
class QQBiasOfAllRequests(QQBiasBackend):
    """One bias matrix for all requests, as large as the longest one needs (vLLM's ``unified_attention``)."""

    capabilities = QQBiasBackend.capabilities.with_changes(options={"shared_qq_bias": True})

    def of_rows(self, bias: torch.Tensor) -> torch.Tensor:
        row = self.starts[self.counts.argmax()[None]] + torch.arange(self.row.shape[1], device=bias.device)
        return bias[row.clamp(max=len(bias) - 1)][None].expand(len(self.counts), -1, -1)


@control()
class EncoderKeysFirst(EncoderDecoderBackend):
    """Encoder keys have the first columns of the request table, those of the decoder the next ones (SGLang)."""


@control("encoder-in-its-own-group")
class EncoderKeysInTheirOwnGroup(EncoderInItsOwnGroup):
    """Cross-attention layers are a KV group, with their own pool and request table (vLLM)."""
