"""Class G: softmax scale, soft cap, sinks and FP8 scales: lost, doubled, of another layer, in the wrong order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import AttentionLayer, ForwardBatch, ForwardMode
from .catalogue import fault

_ALL = tuple(ForwardMode)


@fault(
    slug="scale-missing-from-cache-key",
    bug_class="G",
    source="flashinfer #4014",
    modes=_ALL,
    mechanism="a compiled kernel has the softmax scale baked in, and the process-wide cache looks at shapes alone",
    promises=("matches-oracle",),
    hint="scale",
)
class ScaleMissingFromCacheKey(TorchNativeBackend):
    _compiled: ClassVar[dict[tuple[int, ...], float]] = {}

    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scaling = self._compiled.setdefault((layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim), layer.scaling)
        return super()._logits(rows, keys, replace(layer, scaling=scaling))


@fault(
    slug="scale-hardcoded-or-ignored",
    bug_class="G",
    source="flashinfer #1072; TensorRT-LLM #12089",
    modes=_ALL,
    mechanism="the kernel uses 1 / sqrt(head_dim) whatever the layer's scale is",
    promises=("matches-oracle",),
    hint="scale",
)
class ScaleHardcoded(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._logits(rows, keys, replace(layer, scaling=layer.head_dim**-0.5))


@fault(
    slug="scale-applied-twice",
    bug_class="G",
    source="general",
    modes=_ALL,
    mechanism="q is scaled before the kernel, and the kernel scales again",
    promises=("matches-oracle",),
    hint="scale",
)
class ScaleAppliedTwice(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._logits(rows * layer.scaling, keys, layer)


@fault(
    slug="mla-scale-from-latent-dim",
    bug_class="G",
    source="general",
    modes=_ALL,
    mechanism="for MLA the scale is 1 / sqrt(latent + rope), the width of the absorbed row, not the model's",
    promises=("matches-oracle",),
    hint="scale",
)
class MlaScaleFromLatentDim(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scaling = layer.head_dim**-0.5 if layer.is_mla else layer.scaling
        return super()._logits(rows, keys, replace(layer, scaling=scaling))


@fault(
    slug="softcap-after-mask",
    bug_class="G",
    source="flashinfer #350",
    modes=_ALL,
    mechanism="the soft cap comes after the mask and turns -inf into -cap, so masked keys keep weight",
    promises=("matches-oracle", "reads-own-kv"),
    hint="soft cap",
)
class SoftCapAfterMask(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._logits(rows, keys, replace(layer, logit_cap=0.0))

    def _weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
        if layer.logit_cap:
            seen, logits = torch.ones_like(seen), layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        return super()._weights(logits, seen, layer)


@fault(
    slug="softcap-passed-at-run-not-plan",
    bug_class="G",
    source="sglang #33915, #34093",
    modes=_ALL,
    mechanism="the cap is plan-time state, and is passed to the deprecated run call, which accepts and ignores it",
    promises=("matches-oracle",),
    hint="soft cap",
)
class SoftCapIgnored(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._logits(rows, keys, replace(layer, logit_cap=0.0))


@fault(
    slug="softcap-before-scale",
    bug_class="G",
    source="general",
    modes=_ALL,
    mechanism="q.k is capped first and scaled afterwards",
    promises=("matches-oracle",),
    hint="soft cap",
)
class SoftCapBeforeScale(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        raw = super()._logits(rows, keys, replace(layer, scaling=1.0)) if layer.logit_cap else None
        return super()._logits(rows, keys, layer) if raw is None else raw * layer.scaling


@fault(
    slug="softcap-of-first-layer",
    bug_class="G",
    source="general",
    modes=_ALL,
    mechanism="the cap is planned once with the first layer's, which has none",
    promises=("matches-oracle",),
    hint="only layer 1",
)
class SoftCapOfFirstLayer(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._logits(rows, keys, replace(layer, logit_cap=self.context.layers[0].logit_cap))


@fault(
    slug="sink-swallowed-by-kwargs",
    bug_class="G",
    source="vLLM #52156",
    modes=_ALL,
    mechanism="the adapter takes the sinks in **kwargs and drops them",
    promises=("matches-oracle",),
    hint="sinks",
)
class SinkSwallowed(TorchNativeBackend):
    def _weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._weights(logits, seen, replace(layer, sinks=None))


@fault(
    slug="sinks-of-first-layer",
    bug_class="G",
    source="general",
    modes=_ALL,
    mechanism="sinks are read once, from the first layer, and used for all",
    promises=("matches-oracle",),
    hint="only layer 1",
)
class SinksOfFirstLayer(TorchNativeBackend):
    def _weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._weights(logits, seen, replace(layer, sinks=self.context.layers[0].sinks))


@fault(
    slug="sink-scaled-like-a-logit",
    bug_class="G",
    source="rocm-libraries #12229",
    modes=_ALL,
    mechanism="the sink joins before the scale and is multiplied by it",
    promises=("matches-oracle",),
    hint="sinks",
)
class SinkScaled(TorchNativeBackend):
    def _weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        sinks = layer.sinks * layer.scaling if layer.sinks is not None else None
        return super()._weights(logits, seen, replace(layer, sinks=sinks))


@fault(
    slug="sink-per-kv-head",
    bug_class="G",
    source="general",
    modes=_ALL,
    mechanism="all query heads of a group use the sink of the group's first head",
    promises=("matches-oracle",),
    hint="sinks",
)
class SinkPerKvHead(TorchNativeBackend):
    def _weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        group = layer.q_per_kv
        sinks = layer.sinks[::group].repeat_interleave(group) if layer.sinks is not None else None
        return super()._weights(logits, seen, replace(layer, sinks=sinks))


@fault(
    slug="sink-in-base-two",
    bug_class="G",
    source="general",
    modes=_ALL,
    mechanism="logits are multiplied by log2(e) for exp2, and the sink is not",
    promises=("matches-oracle",),
    hint="sinks",
)
class SinkInBaseTwo(TorchNativeBackend):
    def _weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        sinks = layer.sinks * math.log(2) if layer.sinks is not None else None
        return super()._weights(logits, seen, replace(layer, sinks=sinks))


@fault(
    slug="kv-scale-lost-in-positional-args",
    bug_class="G",
    source="flashinfer #1023, #1254, #1416, #4979",
    modes=_ALL,
    mechanism="scales are passed by position into *args, and the V scale is dropped",
    promises=("matches-oracle",),
    hint="FP8 scales",
)
class VScaleLost(TorchNativeBackend):
    def _values(self, layer: AttentionLayer) -> torch.Tensor:
        return super()._values(layer) / layer.v_scale


@fault(
    slug="k-scale-lost",
    bug_class="G",
    source="flashinfer #1023",
    modes=_ALL,
    mechanism="the K scale of an FP8 pool never reaches the kernel",
    promises=("matches-oracle",),
    hint="FP8 scales",
)
class KScaleLost(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super()._logits(rows, keys, replace(layer, k_scale=1.0))


@fault(
    slug="kv-scale-host-copy-never-set",
    bug_class="G",
    source="sglang #20705",
    modes=_ALL,
    mechanism="the float that the backend reads keeps its default of 1.0 when scales are loaded, for writing and for "
    "reading",
    promises=("writes-own-kv", "matches-oracle"),
    hint="scale",
)
class ScaleHostCopyNeverSet(TorchNativeBackend):
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return super().forward(q, k, v, replace(layer, k_scale=1.0, v_scale=1.0), batch, save_kv_cache)


@fault(
    slug="k-scale-used-for-v",
    bug_class="G",
    source="general",
    modes=_ALL,
    mechanism="one scale, K's, is applied to both",
    promises=("matches-oracle",),
    hint="FP8 scales",
)
class KScaleUsedForV(TorchNativeBackend):
    def _values(self, layer: AttentionLayer) -> torch.Tensor:
        return super()._values(layer) * (layer.k_scale / layer.v_scale)
