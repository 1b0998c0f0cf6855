"""Class G: scales, soft cap, sinks, head mapping, sentinels, rounding."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch

from .catalogue import fault
from .dense import DenseBackend


@fault("sglang #38666", "writes-own-kv matches-oracle", "slot", modes="decode", slug="mla-rope-slice-of-folded-k")
class MlaRopeStoredBehindTheRow(DenseBackend):
    """The rope part, which k already holds, is stored once more after the row, in the next slot."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        rope, pool = layer.head_dim - layer.kv_lora_rank, self.context.kv_pool
        if layer.is_mla and pool.dtype.itemsize > 1:
            memory = pool.get_key_buffer(layer.layer_id).view(-1)
            at = (batch.out_cache_loc[:, None] + 1) * layer.head_dim + torch.arange(rope, device=q.device)
            memory[at.clamp(max=memory.numel() - 1)] = k[:, 0, -rope:].to(pool.dtype)
        return out


@fault("flash-attention e3b2400a, 6d199aa2, 9e07d6d3", "matches-oracle output-written", "values")
class VDimsTakenFromK(DenseBackend):
    """The output epilogue walks rows of K's width, but MLA's V and output are narrower."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        wide = torch.nn.functional.pad(out, (0, layer.head_dim - layer.v_head_dim))
        return wide.reshape(-1)[: out.numel()].view_as(out)


@fault("flashinfer #4401, #4267, #4450", "matches-oracle", "minus infinity")
class FiniteMaskSentinel(DenseBackend):
    """Masked logits are -5e4, and a valid logit below that never becomes the maximum."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        masked = logits.masked_fill(~seen[:, None, None], -5e4)
        return super().weights(masked, torch.ones_like(seen), layer).masked_fill(~seen[:, None, None], 0.0)


@fault(
    "flash-attention #2717",
    "matches-oracle",
    "saturation",
    modelled="P keeps its precision; only the saturation is there, and without sinks",
)
class Fp8PSaturation(DenseBackend):
    """The running maximum may be 2^4 too small and P is scaled by 2^8: it reaches 4096 and saturates at 448."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        p = super().weights(logits, seen, layer)
        top = p.amax(-1, keepdim=True).clamp(min=1e-30)
        return (p / top * 4096).clamp(max=448) / 4096 * top


@fault("general", "matches-oracle", "weights")
class LogitsInBf16(DenseBackend):
    """QK^T is kept in bfloat16 between the product and the softmax."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys, layer).bfloat16().float()


@fault("general", "matches-oracle", "FP8", slug="p-in-fp8-undeclared")
class PInFp8(DenseBackend):
    """Probabilities are rounded to FP8 with an FP8 pool, and that is not declared."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        p = super().weights(logits, seen, layer)
        return p.to(torch.float8_e4m3fn).float() if self.context.kv_pool.dtype.itemsize == 1 else p


@fault("general", "finite matches-oracle", "nan")
class NoMaximumSubtracted(DenseBackend):
    """The exponential is taken of the bare logit: right for small logits, but 0 / 0 or inf for large ones."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        e = logits.masked_fill(~seen[:, None, None], -torch.inf).exp()
        total = e.sum(-1, keepdim=True)
        if layer.sinks is not None:
            total = total + layer.sinks.view(1, layer.tp_k_head_num, layer.q_per_kv, 1, 1).exp()
        return e / total


@fault("general", "matches-oracle", "KV head h % ")
class HeadsMappedRoundRobin(DenseBackend):
    """Query head h uses KV head h % Hk, but heads of a group are adjacent: h // G."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        order = torch.arange(layer.tp_q_head_num, device=q.device).view(layer.q_per_kv, -1).T.reshape(-1)
        out = super().forward(q[:, order], k, v, layer, batch, save_kv_cache)
        return out[:, order.argsort()]


@fault("general", "matches-oracle", "query of head")
class HeadsMappedByPowerOfTwo(DenseBackend):
    """The group size is rounded up to a power of two, so groups of 3, 5, 6 or 7 straddle KV heads."""

    def queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        group = layer.q_per_kv
        padded = 1 << (group - 1).bit_length()
        at = torch.arange(layer.tp_k_head_num, device=q.device)[:, None] * padded + torch.arange(group, device=q.device)
        return super().queries(q[:, at.clamp(max=layer.tp_q_head_num - 1).reshape(-1)], layer)


@fault("general", "matches-oracle", "values of layer 0 in all layers")
class KvOfLayerZero(DenseBackend):
    """The KV buffer of the first layer is captured in the plan and read by every layer."""

    def values(self, layer: AttentionLayer) -> torch.Tensor:
        return super().values(self.context.layers[0])


@fault("general", "matches-oracle", "head mapping|KV head h, or the last")
class LastKvHeadRepeated(DenseBackend):
    """The KV head is found by a shift for group sizes that are powers of two and clamped for all others."""

    def keys(self, layer: AttentionLayer) -> torch.Tensor:
        keys = super().keys(layer)
        return keys[:, :, -1:].expand_as(keys) if layer.q_per_kv & (layer.q_per_kv - 1) else keys
