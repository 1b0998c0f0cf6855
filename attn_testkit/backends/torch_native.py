"""Attention in plain torch: slow, short, and right in every mode, eager and under CUDA graphs, on any device.

Read it as the smallest complete backend. It has no persistent metadata but a mask buffer: everything is rebuilt on the
device at the head of each step from the batch's own tensors, with shapes that never depend on lengths.

Shapes: T query rows, B requests (padding included), W most rows a request, C = ``max_context_len``.
"""

from __future__ import annotations

import torch

from ..contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    DraftDecodeInput,
    DraftExtendInput,
    ForwardBatch,
    ForwardMode,
    TreeMaskMode,
    VerifyInput,
    VerifyMask,
)

__all__ = ["TorchNativeBackend"]


class TorchNativeBackend(AttentionBackend):
    """All rows of a request against all slots of its row of the request table, masked."""

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
        max_draft_branches=16,
        sliding_window=frozenset(ForwardMode),
        window_in_trees=True,
        logit_cap=True,
        sinks=True,
        needs_cpu_seq_lens=False,
        takes_none_kv=True,
        takes_unset_width=True,
        padding_slots=frozenset({0, -1}),
        kv_groups=True,
        deterministic=True,
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._key = torch.arange(context.max_context_len, device=context.device)
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
        """Where the rows of each request are, where its keys are, and which row sees which key."""
        width, counts = self._rows_of_requests(batch)
        starts = self._row_starts(counts)
        offset = torch.arange(width, device=starts.device)
        tokens = batch.input_ids.shape[0]
        # Rows are packed request by request; attention wants [B, W]. Places past a request's count are computed on a
        # neighbour's row and dropped. Rows past the last request are padding and get somebody's result.
        self._row = (starts[:, None] + offset).clamp(max=tokens - 1)
        row = torch.arange(tokens, device=starts.device)
        request = torch.searchsorted(starts, row, right=True) - 1
        self._place = request * width + (row - starts[request]).clamp(max=width - 1)
        self._slots = tuple(self._key_slots(batch, group.req_to_token) for group in self.context.groups)
        self._position, self._key_position, self._visible = self._visibility(batch, counts, offset)

    def _rows_of_requests(self, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
        """W and [B] int64: query rows of each request; in draft-decode a branch is one, with one row."""
        bs, spec = batch.batch_size, batch.spec_info
        if isinstance(spec, DraftDecodeInput):
            bs *= spec.topk
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            return min(self.context.max_extend_tokens, batch.input_ids.shape[0]), batch.extend_seq_lens.long()
        if batch.forward_mode is ForwardMode.DRAFT_EXTEND:
            assert isinstance(spec, DraftExtendInput)
            return self.context.speculative_num_steps + 1, spec.num_accept_tokens[:bs].long()
        width = batch.input_ids.shape[0] // bs
        return width, torch.full((bs,), width, device=batch.seq_lens.device)

    def _row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        """[B] int64: first query row of each request."""
        return counts.cumsum(0) - counts

    def _key_slots(self, batch: ForwardBatch, req_to_token: torch.Tensor) -> torch.Tensor:
        """[B, C] int64: KV slot of each key, by the request table of a KV group."""
        table = req_to_token[batch.req_pool_indices[: batch.batch_size].long()]
        if isinstance(batch.spec_info, DraftDecodeInput):
            lens = batch.seq_lens[: batch.batch_size]
            table = batch.spec_info.key_slots(table, lens, self.context.page_size, self._key)
        return table.long()

    def _kv_lens(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        """[B] int64: keys of each request, this step's own included."""
        seq_lens, spec = batch.seq_lens[: batch.batch_size], batch.spec_info
        if isinstance(spec, DraftDecodeInput):
            return (seq_lens + spec.step + 1).repeat_interleave(spec.topk)
        return seq_lens + counts if batch.forward_mode.is_target_verify() else seq_lens

    def _visibility(
        self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, W] position of each row, [B, 1 or W, C] position of each key, [B, W, C] whether the row may see it."""
        kv_lens = self._kv_lens(batch, counts)
        prefix = kv_lens - counts
        position, key = prefix[:, None] + offset, self._key[None, None]
        spec = batch.spec_info
        if not isinstance(spec, VerifyInput) or spec.custom_mask is None:
            return position, key, (key <= position[..., None]) & (key < kv_lens[:, None, None])
        # Node c of the tree is key prefix + c, but stands at its depth: windows count positions.
        node = self._key - prefix[:, None]
        inside, node = (node >= 0) & (node < len(offset)), node.clamp(0, len(offset) - 1)
        position = batch.positions[: len(prefix) * len(offset)].view(len(prefix), -1)
        visible = (key < prefix[:, None, None]) | (inside[:, None] & self._tree(spec, prefix, offset, node))
        return position, torch.where(inside, position.gather(1, node), self._key)[:, None], visible

    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        """[B, N, C]: whether tree node ``offset[j]`` of a request may see its node ``node[b, c]``."""
        assert spec.custom_mask is not None
        n, index = len(offset), torch.arange(len(prefix), device=prefix.device)[:, None]
        if spec.tree_mask_mode is TreeMaskMode.QLEN_ONLY:
            line = (index * n + offset) * n
        else:
            prefix = prefix[:, None]
            line = (prefix.cumsum(0) - prefix) * n + index * n * n + offset * (prefix + n) + prefix
        return spec.custom_mask.bool()[line[..., None] + node[:, None]]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Store, gather, mask, softmax, sum; in float32. Shapes as in ``AttentionBackend.forward``."""
        if save_kv_cache:
            # Padding of slot -1 goes where other padding goes: page 0.
            group = self.context.group_of(layer)
            group.kv_pool.set_kv_buffer(layer, group.cache_loc(batch).clamp(min=0), k, v)
        seen = self._in_window(layer)
        logits = self._logits(self._queries(q, layer), self._keys(layer), layer)
        out = self._sum(self._weights(logits, seen, layer), self._values(layer), seen) * layer.v_scale
        return out.reshape(-1, layer.tp_q_head_num, layer.v_head_dim)[self._place].to(q.dtype)

    def _queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, Hk, G, D] float32: G query heads in a row share a KV head."""
        return q.reshape(-1, layer.tp_k_head_num, layer.q_per_kv, layer.head_dim)[self._row].float()

    def _keys(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, C, Hk, D] float32, not yet multiplied by an FP8 pool's scale."""
        group = self.context.group_of(layer)
        return _gather(group.kv_pool.get_key_buffer(layer.layer_id), self._slots[group.index])

    def _values(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, C, Hk, Dv] float32, likewise."""
        group = self.context.group_of(layer)
        return _gather(group.kv_pool.get_value_buffer(layer.layer_id), self._slots[group.index])

    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, G, W, C]: scaled, capped, not yet masked."""
        logits = torch.einsum("bwhgd,bshd->bhgws", rows, keys) * (layer.scaling * layer.k_scale)
        return layer.logit_cap * torch.tanh(logits / layer.logit_cap) if layer.logit_cap else logits

    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, C]: visible, and no more than the layer's window back."""
        if layer.sliding_window_size < 0:
            return self._visible
        return self._visible & (self._position[..., None] - self._key_position <= layer.sliding_window_size)

    def _weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, G, W, C]: softmax over what is seen. A row that sees nothing is padding, and gets zeros, not NaN."""
        hidden = ~seen[:, None, None]
        logits = logits.masked_fill(hidden, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.view(1, layer.tp_k_head_num, layer.q_per_kv, 1, 1)
            logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
        return torch.softmax(logits, -1)[..., : hidden.shape[-1]].masked_fill(hidden, 0.0)

    def _sum(self, p: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[B, W, Hk, G, Dv]. Slots that no row may see hold anything, NaN included, and 0 * NaN is NaN."""
        values = values.masked_fill(~seen.any(1)[:, :, None, None], 0.0)
        return torch.einsum("bhgws,bshd->bwhgd", p, values)


def _gather(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``buffer[slots]`` in float32; indexing is not implemented for FP8 everywhere, so its bytes are gathered."""
    if buffer.dtype.itemsize > 1:
        return buffer[slots].float()
    return buffer.view(torch.uint8)[slots].view(buffer.dtype).float()
