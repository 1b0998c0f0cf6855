"""Healthy controls of encoders without a cache."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, EncoderOnly, ForwardBatch, KernelBackend, KernelPlan

from .catalogue import control, helper
from .e_non_causal import CAUSAL, BlockBackend
from .encoders import MODES, EncoderBackend


@control()
class OffsetsOfSequencesInBuffers(EncoderBackend):
    """Offsets of sequences and windows are copied into buffers, and the longest sequence is a number of the host
    (``VisionAttention`` of SGLang, ``MMEncoderAttention`` of vLLM).
    """


@control()
class EncoderAsAKernelCall(KernelBackend):
    """One kernel call over packed rows: offsets from the plan, keys and values from its rows, rows of no sequence get
    values of the last one.
    """

    capabilities = EncoderBackend.capabilities.with_changes(
        heads={"head_dims": {80}}, windows={"modes": (), "non_causal": ()}, server={"finite_padding": False}
    )

    @override
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        windows, row = plan.cu_window_seqlens, torch.arange(len(q), device=q.device)
        starts = plan.cu_seqlens_q if windows is None else windows
        assert plan.k is not None
        assert plan.v is not None
        number = torch.searchsorted(starts, row, right=True)
        seen, live = number[:, None] == number, row < starts[-1]
        keys, values = (each.float().repeat_interleave(plan.layer.q_per_kv, 1) for each in (plan.k, plan.v))
        logits = torch.einsum("thd,shd->hts", q.float(), keys) * plan.layer.scaling
        weights = torch.softmax(logits.masked_fill(~(seen & live), -torch.inf), -1).nan_to_num(0.0)
        return torch.einsum("hts,shd->thd", weights, values.masked_fill(~live[:, None, None], 0.0)).to(q.dtype)


@control()
class EncodersNextToADecoder(BlockBackend):
    """A class that serves models with a cache and encoders without one (SGLang's Triton class, ``ENCODER_ONLY`` of
    vLLM): encoder-only layers attend to the rows that they get.
    """

    capabilities = CAUSAL.with_changes(
        eager=MODES,
        graph=MODES,
        heads={"gqa_ratios": {2}},
        windows=(),
        bounds={"max_extend_tokens": 140},
        options={"non_causal": MODES},
        encoder_only=EncoderOnly(frozenset({"whole"}), in_graphs=True),
    )

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
        self.given = (k, v) if layer.encoder_only else None
        return super().forward(q, k, v, layer, batch, save_kv_cache)

    @override
    def keys(self, layer: AttentionLayer) -> torch.Tensor:
        return super().keys(layer) if self.given is None else self.of_rows(self.given[0])

    @override
    def values(self, layer: AttentionLayer) -> torch.Tensor:
        return super().values(layer) if self.given is None else self.of_rows(self.given[1])

    @helper
    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, C, Hk, D] float32: keys or values of the rows of each sequence, in its first places."""
        first = self.starts[:, None] + self.key
        return rows[first.clamp(max=len(rows) - 1)].float()
