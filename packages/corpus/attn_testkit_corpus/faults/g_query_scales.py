"""Class G: wrong scales of queries that are scaled before they are rounded to FP8, as in servers."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext

from .catalogue import fault
from .g_narrow_numbers import Fp8Probabilities
from .parent import Metadata, PlannedBackend

_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
_LEAST_SCALE = 1 / (_LARGEST * 512)
"""Smallest scale, as in kernels, so that a row of zeros is not divided by zero."""


class Fp8QueriesScaled(Fp8Probabilities):
    """Healthy parent: queries are divided by a scale per token (its largest number over 448), and rounded."""

    capabilities = Fp8Probabilities.capabilities.with_changes(precision={"q_scale": "per_token"})
    scales_of_rows: torch.Tensor
    """[B, W, Hk, G, 1] float32: factors on the logits of a row."""

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        scales = self.scales(q.float(), meta, layer).expand(*q.shape[:2], 1)
        by_group = self.multiplied_back(scales).reshape(len(q), layer.tp_k_head_num, layer.q_per_kv, 1)
        self.scales_of_rows = by_group[self.row_of(meta, len(q))]
        rounded = (q.float() / scales).clamp(-_LARGEST, _LARGEST).to(_E4M3)
        return super().attend(rounded.to(q.dtype), layer, meta)

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return PlannedBackend.logits(self, rows * self.scales_of_rows, keys, layer)

    def scales(self, q: torch.Tensor, meta: Metadata, layer: AttentionLayer) -> torch.Tensor:
        """[T or 1, Hq or 1, 1] float32: scales of ``q`` [T, Hq, D] float32."""
        return (q.abs().amax((1, 2), keepdim=True) / _LARGEST).clamp(min=_LEAST_SCALE)

    def multiplied_back(self, scales: torch.Tensor) -> torch.Tensor:
        """[T, Hq, 1] float32: the factor of each row."""
        return scales


class Fp8QueriesScaledPerTensor(Fp8QueriesScaled):
    """Healthy parent: one scale for all live rows of a forward (sglang #28144)."""

    capabilities = Fp8QueriesScaled.capabilities.with_changes(precision={"q_scale": "per_tensor"})

    @override
    def scales(self, q: torch.Tensor, meta: Metadata, layer: AttentionLayer) -> torch.Tensor:
        return (self.sizes(q, meta).amax().view(1, 1, 1) / _LARGEST).clamp(min=_LEAST_SCALE)

    def sizes(self, q: torch.Tensor, meta: Metadata) -> torch.Tensor:
        """[T, Hq, D]: values from which the scale is computed. Padding rows, whose slot is 0, hold anything."""
        return q.abs().masked_fill((meta.slots == 0)[:, None, None], 0.0)


@fault("general", "matches-oracle", "scale")
class Fp8QueryScaleNotMultipliedBack(Fp8QueriesScaled):
    """Queries are divided by their scale, but logits are not multiplied by it."""

    def multiplied_back(self, scales: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(scales)


@fault("general", "matches-oracle", "scale")
class Fp8QueryScaleOfAnotherToken(Fp8QueriesScaled):
    """Logits of a row are multiplied by the scale of the token before it."""

    def multiplied_back(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.roll(1, 0)


@fault(
    "general; scales that are calibrated in the first forward",
    "replay-follows-batch matches-oracle finite",
    executions="graph",
)
class Fp8QueryScaleOfTheCapture(Fp8QueriesScaled):
    """Scales in a graph are those of the last warm-up before its capture."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[tuple[int, int, int], torch.Tensor] = {}

    def scales(self, q: torch.Tensor, meta: Metadata, layer: AttentionLayer) -> torch.Tensor:
        fresh = super().scales(q, meta, layer)
        if not self.in_graph:
            return fresh
        return self.kept.setdefault((len(q), meta.max_q_len, layer.layer_id), fresh)


@fault("general; sglang #28144", "padding-inert finite matches-oracle", executions="graph")
class Fp8QueryScaleOfPaddedRows(Fp8QueriesScaledPerTensor):
    """The scale of all live rows is computed from padding rows too."""

    def sizes(self, q: torch.Tensor, meta: Metadata) -> torch.Tensor:
        return q.abs()


@fault("aiter #4195, of queries", "finite matches-oracle", "queries of zeros")
class Fp8QueryScaleOfZeros(Fp8QueriesScaled):
    """The scale of a token whose queries are zeros is 0, and zeros are divided by it."""

    def scales(self, q: torch.Tensor, meta: Metadata, layer: AttentionLayer) -> torch.Tensor:
        return q.abs().amax((1, 2), keepdim=True) / _LARGEST


@fault("general", "matches-oracle", "q_scale")
class Fp8QueriesSaturate(Fp8QueriesScaled):
    """Queries are rounded to FP8 unscaled, so those beyond 448 become 448; q_scale declares a scale."""

    def scales(self, q: torch.Tensor, meta: Metadata, layer: AttentionLayer) -> torch.Tensor:
        return torch.ones_like(q[..., :1])


@fault("general", "matches-oracle")
class Fp8SmallQueriesVanish(Fp8QueriesScaled):
    """Scales below 1 are replaced by 1, so small queries round to zero in FP8."""

    def scales(self, q: torch.Tensor, meta: Metadata, layer: AttentionLayer) -> torch.Tensor:
        return super().scales(q, meta, layer).clamp(min=1.0)


@fault("general", "matches-oracle", "q_scale='per_tensor'")
class Fp8QueryScalePerTensorAsPerToken(Fp8QueriesScaledPerTensor):
    """Queries have one scale for all rows, but q_scale declares one per token."""

    capabilities = Fp8QueriesScaled.capabilities


@fault("sglang #28144", "matches-oracle", "q_scale='per_t")
class Fp8QueryScaleNotDeclared(Fp8QueriesScaled):
    """Queries are scaled before they are rounded to FP8, but q_scale declares no scale."""

    capabilities = Fp8Probabilities.capabilities


class Fp8QueriesOfTheCheckpoint(Fp8QueriesScaled):
    """Healthy parent: queries are divided by the layer's ``q_scale``, and rounded."""

    capabilities = Fp8QueriesScaled.capabilities.with_changes(precision={"q_scale": "static"})

    @override
    def scales(self, q: torch.Tensor, meta: Metadata, layer: AttentionLayer) -> torch.Tensor:
        return torch.full_like(q[..., :1], layer.q_scale)


@fault("vLLM #42080", "matches-oracle", "not multiplied by layer.q_scale")
class Fp8StaticQueryScaleNotMultipliedBack(Fp8QueriesOfTheCheckpoint):
    """Queries are divided by the checkpoint's scale, and the kernel ignores it."""

    def multiplied_back(self, scales: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(scales)


@fault("vLLM #46148, without its assert", "matches-oracle", "queries are not divided by it")
class Fp8StaticQueryScaleOfUnscaledQueries(Fp8QueriesOfTheCheckpoint):
    """Queries reach the kernel undivided, and their logits are multiplied by the checkpoint's scale."""

    def multiplied_back(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.square()


@fault("vLLM #51534", "matches-oracle", "q_scale='none'")
class Fp8StaticQueryScaleIsOne(Fp8QueriesOfTheCheckpoint):
    """The checkpoint's scale is replaced by 1, so large queries become 448 and small ones vanish."""

    def scales(self, q: torch.Tensor, meta: Metadata, layer: AttentionLayer) -> torch.Tensor:
        return torch.ones_like(q[..., :1])


@fault("general; a wrapper that is planned once for all layers", "matches-oracle", "q_scale of the first layer")
class Fp8StaticQueryScaleOfTheFirstLayer(Fp8QueriesOfTheCheckpoint):
    """Logits of all layers are multiplied by the first layer's scale."""

    def multiplied_back(self, scales: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scales, self.context.layers[0].q_scale)


@fault("general; one scale for keys and queries", "matches-oracle", "k_scale in place of layer.q_scale")
class Fp8StaticQueryScaleIsThatOfKeys(Fp8QueriesOfTheCheckpoint):
    """The kernel gets the scale of keys as that of queries, too."""

    layer: AttentionLayer

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        self.layer = layer
        return super().attend(q, layer, meta)

    def multiplied_back(self, scales: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scales, self.layer.k_scale)
