"""Class G: softmax scale, soft cap, sinks and FP8 scales: lost, doubled, of another layer, in the wrong order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch

from .catalogue import fault
from .dense import DenseBackend

_LONG = 1024
"""Number of keys above which a request uses the second path."""


def _long(kv_lens: torch.Tensor) -> torch.Tensor:
    """[B, 1, 1, 1, 1] bool: True for long requests, from [B] lengths."""
    return (kv_lens > _LONG)[:, None, None, None, None]


@fault("flashinfer #4014", "matches-oracle", "scale")
class ScaleMissingFromCacheKey(DenseBackend):
    """A compiled kernel has the softmax scale baked in, and the process-wide cache looks only at shapes."""

    compiled: ClassVar[dict[tuple[int, ...], float]] = {}

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scaling = self.compiled.setdefault((layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim), layer.scaling)
        return super().logits(rows, keys, replace(layer, scaling=scaling))


@fault(
    "flashinfer #1072; TensorRT-LLM #12089", "matches-oracle", r"1/sqrt\(head_dim\)", slug="scale-hardcoded-or-ignored"
)
class ScaleHardcoded(DenseBackend):
    """The kernel uses 1 / sqrt(head_dim) instead of the layer's scale."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys, replace(layer, scaling=layer.head_dim**-0.5))


@fault("general", "matches-oracle", "the scale is applied twice")
class ScaleAppliedTwice(DenseBackend):
    """q is scaled before the kernel, and the kernel scales again."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows * layer.scaling, keys, layer)


@fault("general", "matches-oracle", "scale")
class MlaScaleFromLatentDim(DenseBackend):
    """The scale of MLA is 1 / sqrt(latent + rope), the width of the absorbed row, not the model's."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        scaling = layer.head_dim**-0.5 if layer.is_mla else layer.scaling
        return super().logits(rows, keys, replace(layer, scaling=scaling))


@fault(
    "flashinfer #350",
    "matches-oracle reads-own-kv",
    "the soft cap probably comes after the mask|a soft cap comes before the mask",
    slug="softcap-after-mask",
)
class SoftCapAfterMask(DenseBackend):
    """The soft cap comes after the mask and turns -inf into -cap, so masked keys keep weight."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys, replace(layer, logit_cap=0.0))

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
        if layer.logit_cap:
            seen, logits = torch.ones_like(seen), layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        return super().weights(logits, seen, layer)


@fault("sglang #33915, #34093", "matches-oracle", "right without a soft cap", slug="softcap-passed-at-run-not-plan")
class SoftCapIgnored(DenseBackend):
    """The cap is plan-time state, but is passed to the deprecated run call, which accepts and ignores it."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys, replace(layer, logit_cap=0.0))


@fault("general", "matches-oracle", "of unscaled products", slug="softcap-before-scale")
class SoftCapBeforeScale(DenseBackend):
    """Q.k is capped first and scaled afterwards."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        raw = super().logits(rows, keys, replace(layer, scaling=1.0)) if layer.logit_cap else None
        return super().logits(rows, keys, layer) if raw is None else raw * layer.scaling


@fault("general", "matches-oracle", "only layer 1|soft cap of layer 0 in all layers", slug="softcap-of-first-layer")
class SoftCapOfFirstLayer(DenseBackend):
    """The soft cap is planned once for the first layer, which has no soft cap."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys, replace(layer, logit_cap=self.context.layers[0].logit_cap))


@fault("vLLM #52156", "matches-oracle", "right without sinks", slug="sink-swallowed-by-kwargs")
class SinkSwallowed(DenseBackend):
    """The adapter accepts the sinks in **kwargs and drops them."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(logits, seen, replace(layer, sinks=None))


@fault("general", "matches-oracle", "only layer 1|sinks of layer 0 in all layers")
class SinksOfFirstLayer(DenseBackend):
    """Sinks are read once, from the first layer, and used for all."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().weights(logits, seen, replace(layer, sinks=self.context.layers[0].sinks))


@fault("rocm-libraries #12229", "matches-oracle", "scaled like logits", slug="sink-scaled-like-a-logit")
class SinkScaled(DenseBackend):
    """The sink joins before the scale and is multiplied by it."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        sinks = layer.sinks * layer.scaling if layer.sinks is not None else None
        return super().weights(logits, seen, replace(layer, sinks=sinks))


@fault("general", "matches-oracle", "sink of a group's first head")
class SinkPerKvHead(DenseBackend):
    """All query heads of a group use the sink of the group's first head."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        group = layer.q_per_kv
        sinks = layer.sinks[::group].repeat_interleave(group) if layer.sinks is not None else None
        return super().weights(logits, seen, replace(layer, sinks=sinks))


@fault("general", "matches-oracle", "sinks in base 2")
class SinkInBaseTwo(DenseBackend):
    """Logits are multiplied by log2(e) for exp2, but the sink is not."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        sinks = layer.sinks * math.log(2) if layer.sinks is not None else None
        return super().weights(logits, seen, replace(layer, sinks=sinks))


@fault(
    "flashinfer #1023, #1254, #1416, #4979",
    "matches-oracle",
    "right without v_scale",
    slug="kv-scale-lost-in-positional-args",
)
class VScaleLost(DenseBackend):
    """Scales are passed by position into *args, and the V scale is dropped."""

    def values(self, layer: AttentionLayer) -> torch.Tensor:
        return super().values(layer) / layer.v_scale


@fault("flashinfer #1023", "matches-oracle", "right without k_scale")
class KScaleLost(DenseBackend):
    """The K scale of an FP8 pool never reaches the kernel."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys, replace(layer, k_scale=1.0))


@fault("sglang #20705", "writes-own-kv matches-oracle", "scale", slug="kv-scale-host-copy-never-set")
class ScaleHostCopyNeverSet(DenseBackend):
    """The float that the backend reads keeps its default of 1.0 when scales are loaded, for writing and for reading."""

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


@fault("general", "matches-oracle", "k_scale in place of v_scale")
class KScaleUsedForV(DenseBackend):
    """The scale of K is applied to both K and V."""

    def values(self, layer: AttentionLayer) -> torch.Tensor:
        return super().values(layer) * (layer.k_scale / layer.v_scale)


@fault("flash-attention 2.6; sgl-kernel-xpu #491", "matches-oracle", "right without a soft cap")
class LongPathWithoutSoftCap(DenseBackend):
    """Requests of more than 1024 keys use the path with split keys, which was built without the soft cap."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        plain = super().logits(rows, keys, replace(layer, logit_cap=0.0))
        return torch.where(_long(self.kv_lens), plain, super().logits(rows, keys, layer))


@fault("sgl-kernel-xpu #491", "matches-oracle", "right without sinks")
class LongPathWithoutSinks(DenseBackend):
    """Requests of more than 1024 keys use the path with split keys, whose combine ignores sinks."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        plain = super().weights(logits, seen, replace(layer, sinks=None))
        return torch.where(_long(self.kv_lens), plain, super().weights(logits, seen, layer))


@fault(
    "general; models with a window and a soft cap in one layer (Gemma 2)", "matches-oracle", "right without a soft cap"
)
class SoftCapLostOnWindowedLayers(DenseBackend):
    """The kernel is chosen only by the window, and the windowed kernel was built without a soft cap."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys, replace(layer, logit_cap=0.0) if layer.sliding_window_size >= 0 else layer)


@fault("general", "matches-oracle", "scale", modes="decode")
class ScalesOfACheckpointForAnUnscaledPool(DenseBackend):
    """K and V are stored unscaled, in the model's dtype, and multiplied by the scales of an FP8 checkpoint all the
    same. vLLM sets them to 1 in this case.
    """

    capabilities = DenseBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"same"}}, server={"takes_unused_scales": True}
    )
