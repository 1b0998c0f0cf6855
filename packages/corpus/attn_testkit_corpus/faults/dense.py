"""The other healthy parent: no plan, no splits. Each step is rebuilt from the batch, and softmax sees all keys at once.

``parent.py`` is built like the backends of servers, this parent like a reference: everything about a step is computed
at the start of the graph, from the batch's tensors; only a mask buffer persists. So bugs of extents, masks, windows,
scales and heads can be shown by themselves, in every family and at every declared size.

Every quantity is one small method, so that a bug is one override.

Shapes: T query rows, B requests (padding included), W most rows per request, N draft tokens per request, C =
``max_context_len`` keys, Hk KV heads, Hq = Hk * G query heads, D and Dv the widths of a key and a value.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Bounds,
    Capabilities,
    DraftExtendInput,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    LayerOptions,
    Needs,
    Precision,
    Promises,
    ServerConventions,
    TreeMaskMode,
    VerifyInput,
    VerifyMask,
    Windows,
)

from .pool_reads import read_slots

Visibility = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""[B, W] int64 position of each row, [B, 1 or W, C] int64 of each key, [B, W, C] bool: True if the row may see it."""


class DenseBackend(AttentionBackend):
    """Healthy parent: all rows of a request against all slots of its row of the request table, masked.

    Raises ``Unsupported`` for a context that its ``capabilities`` exclude. The attributes below are of the current
    step, set by ``init_forward_metadata_in_graph``.
    """

    capabilities = Capabilities(
        eager=frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE},
        graph=frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE},
        heads=HeadShapes(
            families={"mha", "gqa", "mqa", "mla"},
            head_dims={32, 64, 128, 256, 512},
            mla_rope_dims={32, 64},
            gqa_ratios=frozenset(range(1, 129)),
        ),
        precision=Precision(dtypes={"fp16", "bf16", "fp32"}),
        kv_pool=KVPools(kv_dtypes={"same", "fp8_e4m3"}, page_sizes={1, 2, 4, 8, 16, 32, 64, 128}),
        bounds=Bounds(max_q_rows=128, max_topk=128),
        windows=Windows(frozenset(ForwardMode), in_trees=True),
        options=LayerOptions(logit_cap=True, sinks=True),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_strided_heads=True, takes_unset_width=True),
        promises=Promises(deterministic=True),
    )

    counts: torch.Tensor
    """[B] int64: query rows of each request."""
    starts: torch.Tensor
    """[B] int64: first query row of each request."""
    kv_lens: torch.Tensor
    """[B] int64: keys of each request, this step's included."""
    row: torch.Tensor
    """[B, W] int64: query row of each place."""
    place: torch.Tensor
    """[T] int64: place of each query row, in B * W."""
    slots: torch.Tensor
    """[B, C] int64: KV slot of each key."""
    position: torch.Tensor
    """[B, W] int64: position of each row."""
    key_position: torch.Tensor
    """[B, 1 or W, C] int64: position of each key."""
    visible: torch.Tensor
    """[B, W, C] bool: True if the row may see the key, without windows."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.key = torch.arange(context.max_context_len, device=context.device)
        """[C] int64: 0, 1, 2, ..."""
        self.mask_buffer: VerifyMask | None = None
        """[max_bs * N * N] bool, as QLEN_ONLY. None before graphs are made, and without trees."""

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate one mask buffer for every graph; the draft stage fills it in place."""
        n = self.context.num_draft_tokens
        if self.context.topk:
            buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=self.context.device)
            self.mask_buffer = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)

    @property
    @override
    def verify_mask(self) -> VerifyMask | None:
        """``mask_buffer``."""
        return self.mask_buffer

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute the places of each request's rows and keys, and the keys that each row sees."""
        width, self.counts = self.rows_of_requests(batch)
        self.starts = self.row_starts(self.counts)
        self.kv_lens = self.kv_lengths(batch, self.counts)
        offset = torch.arange(width, device=self.starts.device)
        tokens = batch.input_ids.shape[0]
        # Rows are packed request by request; attention needs [B, W]. Places past a request's count are computed on
        # another request's row and dropped. Rows past the last request are padding and get any result.
        self.row = (self.starts[:, None] + offset).clamp(max=tokens - 1)
        row = torch.arange(tokens, device=self.starts.device)
        request = torch.searchsorted(self.starts, row, right=True) - 1
        self.place = request * width + (row - self.starts[request]).clamp(max=width - 1)
        self.slots = self.key_slots(batch)
        self.position, self.key_position, self.visible = self.visibility(batch, self.counts, offset)

    def rows_of_requests(self, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
        """Width W, and [B] int64: query rows of each request."""
        bs, spec = batch.batch_size, batch.spec_info
        if batch.forward_mode is ForwardMode.DRAFT_EXTEND:
            assert isinstance(spec, DraftExtendInput)
            return self.context.speculative_num_steps + 1, spec.num_accept_tokens[:bs].long()
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            return min(self.context.max_extend_tokens, batch.input_ids.shape[0]), batch.extend_seq_lens.long()
        width = batch.input_ids.shape[0] // bs
        return width, torch.full((bs,), width, device=batch.seq_lens.device)

    def row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        """[B] int64: first query row of each request, from ``counts`` [B] int64."""
        return counts.cumsum(0) - counts

    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        """[B] int64: keys of each request, this step's included."""
        seq_lens = batch.seq_lens[: batch.batch_size]
        return seq_lens + counts if batch.forward_mode.is_target_verify() else seq_lens

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        """[B, C] int64: KV slot of each key; stale entries of the request table past a request's keys."""
        return self.context.req_to_token[batch.req_pool_indices[: batch.batch_size].long()].long()

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        """Positions and visibility, without windows. ``counts`` [B] int64; ``offset`` [W] int64: 0, 1, 2, ..."""
        prefix = self.kv_lens - counts
        position, key = prefix[:, None] + offset, self.key[None, None]
        spec = batch.spec_info
        if not isinstance(spec, VerifyInput) or spec.custom_mask is None:
            return position, key, (key <= position[..., None]) & (key < self.kv_lens[:, None, None])
        # Node c of the tree is key prefix + c, but its position is its depth: windows count positions.
        node = self.key - prefix[:, None]
        inside, node = (node >= 0) & (node < len(offset)), node.clamp(0, len(offset) - 1)
        position = batch.positions[: len(prefix) * len(offset)].view(len(prefix), -1)
        visible = (key < prefix[:, None, None]) | (inside[:, None] & self.tree(spec, prefix, offset, node))
        return position, torch.where(inside, position.gather(1, node), self.key)[:, None], visible

    def tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        """[B, N, C] bool: whether tree node ``offset[j]`` of a request may see its node ``node[b, c]``.

        ``prefix`` [B], ``offset`` [N] and ``node`` [B, C] are int64.
        """
        assert spec.custom_mask is not None
        n, index = len(offset), torch.arange(len(prefix), device=prefix.device)[:, None]
        if spec.tree_mask_mode is TreeMaskMode.QLEN_ONLY:
            line = (index * n + offset) * n
        else:
            prefix = prefix[:, None]
            line = (prefix.cumsum(0) - prefix) * n + index * n * n + offset * (prefix + n) + prefix
        return spec.custom_mask.bool()[line[..., None] + node[:, None]]

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
        """[T, Hq, Dv] in q's dtype, from q [T, Hq, D], k [T, Hk, D] and v [T, Hk, Dv], which are stored first."""
        if save_kv_cache:
            self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        seen = self.in_window(layer)
        logits = self.logits(self.queries(q, layer), self.keys(layer), layer)
        out = self.weighted_sum(self.weights(logits, seen, layer), self.values(layer), seen) * layer.v_scale
        return out.reshape(-1, layer.tp_q_head_num, layer.v_head_dim)[self.place].to(q.dtype)

    def queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, Hk, G, D] float32 of q [T, Hq, D]: G query heads in a row share a KV head."""
        return q.reshape(-1, layer.tp_k_head_num, layer.q_per_kv, layer.head_dim)[self.row].float()

    def keys(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, C, Hk, D] float32, not yet multiplied by an FP8 pool's scale."""
        return read_slots(self.context.kv_pool.get_key_buffer(layer.layer_id), self.slots)

    def values(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, C, Hk, Dv] float32, not yet multiplied by an FP8 pool's scale."""
        return read_slots(self.context.kv_pool.get_value_buffer(layer.layer_id), self.slots)

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, G, W, C] float32: scaled, capped, not yet masked."""
        logits = torch.einsum("bwhgd,bshd->bhgws", rows, keys) * (layer.scaling * layer.k_scale)
        return layer.logit_cap * torch.tanh(logits / layer.logit_cap) if layer.logit_cap else logits

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, C] bool: visible keys inside the layer's window."""
        if layer.sliding_window_size < 0:
            return self.visible
        return self.visible & (self.key_position >= self.window_start(layer)[..., None])

    def window_start(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, W] int64: the oldest position that a row of a windowed layer may see."""
        return self.position - layer.sliding_window_size

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, G, W, C] float32: softmax over the keys ``seen`` [B, W, C] bool. A row that sees no key is padding,
        and gets zeros, not NaN.
        """
        hidden = ~seen[:, None, None]
        logits = logits.masked_fill(hidden, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.view(1, layer.tp_k_head_num, layer.q_per_kv, 1, 1)
            logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
        return torch.softmax(logits, -1)[..., : hidden.shape[-1]].masked_fill(hidden, 0.0)

    def weighted_sum(self, p: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[B, W, Hk, G, Dv] float32. Slots that no row may see hold anything, NaN included, and 0 * NaN is NaN."""
        values = values.masked_fill(~seen.any(1)[:, :, None, None], 0.0)
        return torch.einsum("bhgws,bshd->bwhgd", p, values)
