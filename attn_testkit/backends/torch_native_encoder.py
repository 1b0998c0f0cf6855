"""Attention of an encoder in plain torch: all rows of a sequence against each other, with a mask and without a cache.

Read it as the smallest backend of a vision or audio encoder. Its metadata are made on the device at the start of each
step, from the offsets of sequences and windows, with shapes that depend on no length.

Shapes: T rows, B sequences (padding included), W most rows of a sequence.
"""

from __future__ import annotations

import torch

from ..contract import (
    ENCODER_LAYERS,
    NON_CAUSAL_WINDOWS,
    AttentionBackend,
    AttentionLayer,
    Capabilities,
    EncoderOnly,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    LayerOptions,
    Needs,
    Precision,
    Promises,
    ServerConventions,
    Windows,
)

_MODES = frozenset({ForwardMode.EXTEND})


class TorchNativeEncoderBackend(AttentionBackend):
    """Attends from all rows of a sequence to all its rows, with a mask of [B, W, W]."""

    capabilities = Capabilities(
        eager=_MODES,
        graph=_MODES,
        heads=HeadShapes(
            families=frozenset({"mha", "gqa", "mqa"}),
            # 72 and 80 are the head dims of SigLIP and of Qwen2.5-VL.
            head_dims=frozenset({64, 72, 80, 128}),
            gqa_ratios=frozenset(range(1, 9)),
        ),
        precision=Precision(dtypes=frozenset({"fp16", "bf16", "fp32"})),
        windows=Windows(_MODES, non_causal=frozenset(NON_CAUSAL_WINDOWS)),
        options=LayerOptions(logit_cap=True, sinks=True, non_causal=_MODES),
        encoder_only=EncoderOnly(frozenset(ENCODER_LAYERS), in_graphs=True, only=True),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(
            takes_strided_heads=True,
            takes_empty_batches=True,
            takes_requests_without_rows=True,
            takes_out=True,
            finite_padding=True,
            output_lifetime="model",
            takes_more_rows=True,
            padded_requests=frozenset({"rows", "nothing"}),
        ),
        promises=Promises(deterministic=True),
    )

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute the places of the rows of each sequence, and the window of each row."""
        if not batch.batch_size:
            return
        assert batch.query_start_loc is not None
        starts, tokens = batch.query_start_loc, batch.input_ids.shape[0]
        row = torch.arange(tokens, device=starts.device)
        width = min(self.context.max_extend_tokens, tokens)
        # Rows are packed sequence by sequence; attention needs [B, W]. Places past a sequence's rows are computed on
        # another row and dropped, and rows past the last sequence get zeros.
        self._row = (starts[:-1, None] + row[:width]).clamp(max=tokens - 1)
        self._is_row = row[:width] < starts.diff()[:, None]
        self._live = row < starts[-1]
        sequence = torch.searchsorted(starts, row, right=True) - 1
        self._place = (sequence * width + row - starts[sequence]).clamp(0, self._row.numel() - 1)
        windows = getattr(batch, "cu_window_seqlens", None)
        if windows is not None:
            self._window = torch.searchsorted(windows, row, right=True)[self._row]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mask, softmax, sum; in float32. Shapes as in ``AttentionBackend.forward``; nothing is stored."""
        if not batch.batch_size:
            return q.new_empty(0, layer.tp_q_head_num, layer.v_head_dim) if out is None else out
        # [B, H, W, D]
        rows, keys, values = (each[self._row].float().transpose(1, 2) for each in (q, k, v))
        keys, values = (each.repeat_interleave(layer.q_per_kv, 1) for each in (keys, values))
        logits = rows @ keys.mT * layer.scaling
        if layer.logit_cap:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        logits = logits.masked_fill(~self._seen(layer)[:, None], -torch.inf)
        if layer.sinks is not None:
            logits = torch.cat([logits, layer.sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
        weights = torch.softmax(logits, -1)[..., : self._row.shape[1]]
        # Other rows hold anything, NaN included, and 0 * NaN is NaN.
        result = (weights @ values.masked_fill(~self._is_row[:, None, :, None], 0.0)).transpose(1, 2).flatten(0, 1)
        result = result[self._place].masked_fill(~self._live[:, None, None], 0.0).to(q.dtype)
        # Rows after those of the plan are of no request, too.
        result = torch.nn.functional.pad(result, (0, 0, 0, 0, 0, len(q) - len(result)))
        return result if out is None else out.copy_(result)

    def _seen(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, W] bool: True if a row may see another row of its sequence."""
        seen = self._is_row[:, None].expand(-1, self._row.shape[1], -1)
        if layer.encoder_window:
            return seen & (self._window[:, :, None] == self._window[:, None])
        if layer.sliding_window_size < 0 or layer.non_causal_window == "block":
            # The first row of a step is the first of its sequence: no key is before a window that begins there.
            return seen
        place = torch.arange(self._row.shape[1], device=seen.device)
        before = place[:, None] - place
        before = before.abs() if layer.non_causal_window == "both" else before
        return seen & (before <= layer.sliding_window_size)
