"""Attention in plain torch: slow, short, and right in every mode, eager and under CUDA graphs, on any device.

Read it as the smallest complete backend. It has no persistent metadata but a mask buffer: everything is rebuilt on the
device at the head of each step from the batch's own tensors, with shapes that never depend on lengths.
"""

from __future__ import annotations

import torch

from ..contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    DraftExtendInput,
    ForwardBatch,
    ForwardMode,
    TreeMaskMode,
    VerifyInput,
    VerifyMask,
)

__all__ = ["TorchNativeBackend"]


class TorchNativeBackend(AttentionBackend):
    """One query row at a time against all slots of its request, masked."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        families=frozenset({"mha", "gqa", "mqa", "mla"}),
        dtypes=frozenset({"fp16", "bf16", "fp32"}),
        kv_dtypes=frozenset({"same", "fp8_e4m3"}),
        head_dims=frozenset({32, 64, 128, 256, 512}),
        mla_rope_dims=frozenset({32, 64}),
        page_sizes=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
        gqa_ratios=frozenset(range(1, 129)),
        max_q_rows=128,
        max_topk=128,
        sliding_window=frozenset(ForwardMode),
        window_in_trees=True,
        logit_cap=True,
        sinks=True,
        needs_cpu_seq_lens=False,
        deterministic=True,
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._key_index = torch.arange(context.max_context_len, device=context.device)
        self._mask: VerifyMask | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """One mask buffer for every graph; the draft stage fills it in place."""
        n = self.context.num_draft_tokens
        if self.context.topk:
            buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=self.context.device)
            self._mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The buffer above."""
        return self._mask

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Slots, positions and visibility of every row: [T, max_context_len] each."""
        context, bs, mode = self.context, batch.batch_size, batch.forward_mode
        rows = torch.arange(batch.input_ids.shape[0], device=context.device)
        spec, seq_lens = batch.spec_info, batch.seq_lens[:bs]
        width = batch.input_ids.shape[0] // bs
        if mode is ForwardMode.DRAFT_EXTEND:
            # Ragged and packed: a row belongs to the request whose range of the running sum it falls in. Rows past the
            # last request are padding; they are lent to it and see whatever they see.
            assert isinstance(spec, DraftExtendInput)
            ends = spec.num_accept_tokens[:bs].cumsum(0)
            request = torch.searchsorted(ends, rows, right=True).clamp(max=bs - 1)
        else:
            request = rows // width
        key = self._key_index
        if mode.is_target_verify():
            assert isinstance(spec, VerifyInput)
            prefix = seq_lens[request]
            visible = key < prefix[:, None]
            visible |= self._draft_block(spec, batch, request, rows % width, width, prefix)
            # Positions of draft keys, for windows: node c of the tree is key prefix + c but stands at its depth.
            node = (key - prefix[:, None]).clamp(0, width - 1) + request[:, None] * width
            key_position = torch.where(key < prefix[:, None], key, batch.positions[node])
        else:
            visible = key <= batch.positions[:, None]
            key_position = key.expand(rows.shape[0], -1)
        self._distance = batch.positions[:, None] - key_position
        self._visible = visible
        self._slots = context.req_to_token[batch.req_pool_indices[:bs].long()][request].long()

    def _draft_block(
        self,
        spec: VerifyInput,
        batch: ForwardBatch,
        request: torch.Tensor,
        node: torch.Tensor,
        n: int,
        prefix: torch.Tensor,
    ) -> torch.Tensor:
        """[T, max_context_len]: draft keys that each node may see."""
        column = self._key_index - prefix[:, None]
        inside = (column >= 0) & (column < n)
        column = column.clamp(0, n - 1)
        if spec.custom_mask is None:
            return inside & (column <= node[:, None])
        if spec.tree_mask_mode is TreeMaskMode.QLEN_ONLY:
            start, stride = (request * n + node) * n, 0
        else:
            lens = batch.seq_lens[: batch.batch_size]
            start = ((lens.cumsum(0) - lens) * n)[request] + request * n * n + node * (prefix + n)
            stride = 1
        return inside & spec.custom_mask.bool()[start[:, None] + prefix[:, None] * stride + column]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Gather, mask, softmax, sum."""
        pool = self.context.kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        visible = self._visible
        if layer.sliding_window_size >= 0:
            visible = visible & (self._distance <= layer.sliding_window_size)
        rows = q.shape[0]
        keys, values = (
            self._gather(pool.get_key_buffer(layer.layer_id)),
            self._gather(pool.get_value_buffer(layer.layer_id)),
        )
        grouped = q.reshape(rows, layer.tp_k_head_num, layer.q_per_kv, layer.head_dim).float()
        logits = torch.einsum("thgd,tshd->thgs", grouped, keys.float()) * (layer.scaling * layer.k_scale)
        if layer.logit_cap:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        hidden = ~visible[:, None, None]
        logits = logits.masked_fill(hidden, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.view(1, layer.tp_k_head_num, layer.q_per_kv, 1).expand(rows, -1, -1, 1)
            logits = torch.cat([logits, sinks], -1)
        # A row that sees nothing is padding. It gets zeros, not the NaN of a softmax over nothing.
        p = torch.softmax(logits, -1)[..., : hidden.shape[-1]].masked_fill(hidden, 0.0)
        # Slots that no row may see hold anything, NaN included, and 0 * NaN is NaN.
        values = values.float().masked_fill(~visible[:, :, None, None], 0.0)
        out = torch.einsum("thgs,tshd->thgd", p, values) * layer.v_scale
        return out.reshape(rows, layer.tp_q_head_num, layer.v_head_dim).to(q.dtype)

    def _gather(self, buffer: torch.Tensor) -> torch.Tensor:
        """[T, max_context_len, Hk, D] in a dtype that arithmetic knows."""
        if buffer.dtype.itemsize > 1:
            return buffer[self._slots]
        return buffer.view(torch.uint8)[self._slots].view(buffer.dtype).to(torch.float32)
