"""Attention in plain torch: slow, short, and right in every mode, eager and under CUDA graphs, on any device.

Read it as the smallest complete backend. Its only persistent metadata is a mask buffer: everything else is rebuilt on
the device at the start of each step from the batch's tensors, with shapes that never depend on lengths.

Shapes: T query rows, B requests (padding included), W most rows per request, C = columns of the request table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..contract import (
    KV_LAYOUTS,
    NON_CAUSAL_WINDOWS,
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Bounds,
    Capabilities,
    CrossAttention,
    DraftDecodeInput,
    DraftExtendInput,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    KVSplit,
    LayerOptions,
    LogSumExp,
    Needs,
    Precision,
    Promises,
    ServerConventions,
    Spans,
    TreeMaskMode,
    VerifyInput,
    VerifyMask,
    Windows,
)

_IN_SPLITS = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}


@dataclass(frozen=True)
class _Seen:
    """Keys that the rows of a step see in a layer."""

    hidden: torch.Tensor
    """[B, 1, 1, W, C] bool: True for keys that a row does not see."""
    blind: torch.Tensor
    """[B, W, 1, 1, 1] bool: True for rows that see no key."""
    values: tuple[torch.Tensor, ...]
    """Indices of [B, C] values into the KV pool: of a key that a row sees, or of the request's last key."""


class TorchNativeBackend(AttentionBackend):
    """Attends from all rows of a request to all slots in its row of the request table, with a mask."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(
            families=frozenset({"mha", "gqa", "mqa", "mla"}),
            head_dims=frozenset({32, 64, 128, 256, 512}),
            mla_rope_dims=frozenset({32, 64}),
            wider_keys=frozenset({64}),
            gqa_ratios=frozenset(range(1, 129)),
            heads_by_layer=True,
        ),
        precision=Precision(dtypes=frozenset({"fp16", "bf16", "fp32"})),
        kv_pool=KVPools(
            kv_dtypes=frozenset({"same", "fp8_e4m3"}),
            page_sizes=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
            kv_layouts=frozenset(KV_LAYOUTS) - {"custom"},
            kv_groups=True,
            kv_sharing=True,
        ),
        bounds=Bounds(max_q_rows=128, max_topk=128, max_draft_branches=16),
        windows=Windows(
            frozenset(ForwardMode),
            in_trees=True,
            non_causal=frozenset(NON_CAUSAL_WINDOWS),
            chunked=frozenset(ForwardMode),
        ),
        options=LayerOptions(
            logit_cap=True,
            alibi=frozenset(ForwardMode),
            qq_bias=frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY}),
            sinks=True,
            non_causal=frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY}),
        ),
        spans=Spans(
            frozenset({ForwardMode.DECODE, ForwardMode.EXTEND}),
            in_graphs=True,
            of_prefix=True,
            wider_than_window=True,
            by_layer=True,
        ),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(
            takes_none_kv=True,
            takes_strided_heads=True,
            takes_unset_width=True,
            takes_empty_batches=True,
            takes_requests_without_rows=True,
            takes_bare_chains=True,
            takes_out=True,
            finite_padding=True,
            output_lifetime="model",
            takes_more_rows=True,
            padded_requests=frozenset({"rows", "nothing"}),
            verify_lens=frozenset({"prefix", "all"}),
            context_len=frozenset({"all", "prefix"}),
            freed_pages=frozenset({"listed", "minus_one", "null_page"}),
            padding_slots=frozenset({0, -1}),
            narrower_widths=frozenset(ForwardMode) - {ForwardMode.DECODE, ForwardMode.EXTEND},
        ),
        cross_attention=CrossAttention({ForwardMode.DECODE, ForwardMode.EXTEND}, {"first", "own_group"}),
        promises=Promises(deterministic=True),
        lse=LogSumExp(
            base="e", whole=frozenset(ForwardMode), prefix=_IN_SPLITS, pages=_IN_SPLITS, tokens=_IN_SPLITS, merges=True
        ),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._key = torch.arange(context.req_to_token.shape[1], device=context.device)
        self._mask: VerifyMask | None = None
        self._has_slot_views = context.kv_pool.layout in ("nhd", "side-by-side")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate one mask buffer for every graph; the draft stage fills it in place."""
        n = self.context.num_draft_tokens
        if self.context.topk:
            buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=self.context.device)
            self._mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The mask buffer; None before there are graphs, and without trees."""
        return self._mask

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute the places of each request's rows and keys, and the keys that each row sees."""
        if not batch.batch_size:
            return
        width, counts = self._rows_of_requests(batch)
        starts = self._row_starts(counts)
        offset = torch.arange(width, device=starts.device)
        tokens = batch.input_ids.shape[0]
        # Rows are packed request by request; attention needs [B, W]. Places past a request's count are computed on
        # another request's row and dropped. Rows past the last request are padding and get any result.
        self._row = (starts[:, None] + offset).clamp(max=tokens - 1)
        row = torch.arange(tokens, device=starts.device)
        request = torch.searchsorted(starts, row, right=True) - 1
        self._place = request * width + (row - starts[request]).clamp(max=width - 1)
        kinds = dict.fromkeys(map(self._keys_of, self.context.layers))
        self._slots = {keys: self._key_slots(batch, *keys) for keys in kinds}
        self._keys_at = {keys: self._index(slots) for keys, slots in self._slots.items()}
        kv_lens = self._kv_lens(batch, counts)
        self._prefix = (kv_lens - counts).clamp(min=0)
        self._held = kv_lens[:, None]
        self._last_key = (kv_lens - 1).clamp(min=0)[:, None]
        self._seen: dict[tuple[object, ...], _Seen] = {}
        self._encoder_lens = batch.encoder_lens[: batch.batch_size] if batch.encoder_lens is not None else None
        self._position, self._key_position, self._visible = self._visibility(batch, counts, offset)
        # An empty batch, and one whose layers have no spans, lack the attribute or have None.
        self._spans = getattr(batch, "mm_prefix_range_tensor", None)
        self._bias = None if self.context.qq_bias == "none" else self._bias_of_keys(batch.qq_bias, kv_lens)

    def _rows_of_requests(self, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
        """W, and [B] int64: query rows of each request. In draft-decode: of each branch, always 1."""
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

    def _keys_of(self, layer: AttentionLayer) -> tuple[int, bool]:
        """KV group of a layer, and True if its keys come from an encoder."""
        return self.context.group_of(layer).index, layer.is_cross_attention

    def _key_slots(self, batch: ForwardBatch, group: int, of_encoder: bool) -> torch.Tensor:
        """[B, C] int64: KV slot of each key, by the request table of a KV group."""
        table = self.context.groups[group].req_to_token[batch.req_pool_indices[: batch.batch_size].long()]
        if self.context.max_encoder_len and not self.context.kv_groups and not of_encoder:
            # The first columns are those of the encoder.
            assert batch.encoder_lens is not None
            column = batch.encoder_lens[: batch.batch_size, None] + self._key
            return table.gather(1, column.clamp(max=len(self._key) - 1)).long()
        if isinstance(batch.spec_info, DraftDecodeInput):
            lens = batch.seq_lens[: batch.batch_size]
            table = batch.spec_info.key_slots(table, lens, self.context.page_size, self._key)
        return table.long()

    def _kv_lens(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        """[B] int64: keys of each request, this step's own included."""
        seq_lens, spec = batch.seq_lens[: batch.batch_size], batch.spec_info
        if isinstance(spec, DraftDecodeInput):
            return (seq_lens + spec.step + 1).repeat_interleave(spec.topk)
        of_prefix = batch.forward_mode.is_target_verify() and self.context.dialect.verify_lens == "prefix"
        return seq_lens + counts if of_prefix else seq_lens

    def _visibility(
        self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, W] position of each row, [B, 1 or W, C] of each key, [B, W, C] True if the row may see it."""
        kv_lens = self._kv_lens(batch, counts)
        prefix = kv_lens - counts
        position, key = prefix[:, None] + offset, self._key[None, None]
        spec = batch.spec_info
        if not isinstance(spec, VerifyInput) or spec.custom_mask is None:
            held = (key < kv_lens[:, None, None]).expand(-1, len(offset), -1)
            return position, key, (key <= position[..., None]) & held if self.context.causal else held
        # Node c of the tree is key prefix + c, but its position is its depth: windows count positions.
        node = self._key - prefix[:, None]
        inside, node = (node >= 0) & (node < len(offset)), node.clamp(0, len(offset) - 1)
        position = batch.positions[: len(prefix) * len(offset)].view(len(prefix), -1)
        visible = (key < prefix[:, None, None]) | (inside[:, None] & self._tree(spec, prefix, offset, node))
        return position, torch.where(inside, position.gather(1, node), self._key)[:, None], visible

    def _bias_of_keys(self, qq_bias: torch.Tensor | None, kv_lens: torch.Tensor) -> torch.Tensor:
        """[B, W, C] float32: ``qq_bias`` [T, columns] at the keys of this step, and 0 at those of the prefix."""
        assert qq_bias is not None
        column = (self._key - self._prefix[:, None])[:, None].expand(-1, self._row.shape[1], -1)
        bias = qq_bias[self._row].gather(2, column.clamp(0, qq_bias.shape[1] - 1))
        return bias.masked_fill((column < 0) | (self._key >= kv_lens[:, None, None]), 0.0)

    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        """[B, N, C]: True if tree node ``offset[j]`` of a request may see its node ``node[b, c]``."""
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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store, gather, mask, softmax, sum; in float32. Shapes as in ``AttentionBackend.forward``."""
        if not batch.batch_size:
            return q.new_empty(0, layer.tp_q_head_num, layer.v_head_dim) if out is None else out
        self._store(k, v, layer, batch, save_kv_cache)
        place = (
            layer.sliding_window_size, layer.attention_chunk_size, layer.bidirectional_spans, self._keys_of(layer)
        )  # fmt: skip
        if place not in self._seen:
            self._seen[place] = self._seen_by(self._in_window(layer), layer)
        result, _ = self._attend(q, layer, self._seen[place])
        return result if out is None else out.copy_(result)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        part: KVSplit,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the keys of a KV split. Shapes as in ``AttentionBackend.forward_return_lse``."""
        self._store(k, v, layer, batch, save_kv_cache)
        held = part.holds(self._key, self._prefix[:, None])
        layer = layer if part.sinks else replace(layer, sinks=None)
        out, logits = self._attend(q, layer, self._seen_by(self._in_window(layer) & held[:, None], layer))
        # [B, Hk, G, W] -> [T, Hq]
        lse = torch.logsumexp(logits, -1).permute(0, 3, 1, 2)
        return out, lse.reshape(-1, layer.tp_q_head_num)[self._place]

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge by each split's share of the total sum; a padded row without any key gets weights of 0."""
        lse = torch.logaddexp(lse_a, lse_b)
        base = torch.where(lse == -torch.inf, 0.0, lse)
        of_a, of_b = (torch.exp(each - base)[..., None] for each in (lse_a, lse_b))
        return (of_a * out_a.float() + of_b * out_b.float()).to(out_a.dtype), lse

    def _store(
        self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool
    ) -> None:
        group = self.context.group_of(layer)
        if layer.is_cross_attention:
            if batch.encoder_out_cache_loc is not None:
                group.kv_pool.set_kv_buffer(layer, batch.encoder_out_cache_loc, k, v)
        elif save_kv_cache:
            # Padding of slot -1 goes where other padding goes: page 0.
            group.kv_pool.set_kv_buffer(layer, group.cache_loc(batch).clamp(min=0), k, v)

    def _attend(self, q: torch.Tensor, layer: AttentionLayer, seen: _Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, Hq, Dv] output, and [B, Hk, G, W, C] logits of the ``seen`` keys, followed by sinks."""
        logits = self._masked(self._logits(self._queries(q, layer), self._keys(layer), layer), seen, layer)
        out = self._sum(torch.softmax(logits, -1)[..., : len(self._key)], self._values(layer, seen), seen)
        if layer.v_scale != 1:
            out = out * layer.v_scale
        out = out.reshape(-1, layer.tp_q_head_num, layer.v_head_dim)[self._place].to(q.dtype)
        # Rows after the plan's rows are of no request: the first one's result may be that of a request without keys.
        more = q.shape[0] - len(self._place)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, more)) if more > 0 else out, logits

    def _queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, Hk, G, D] float32: G query heads in a row share a KV head."""
        return q.reshape(-1, layer.tp_k_head_num, layer.q_per_kv, layer.head_dim)[self._row].float()

    def _keys(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, C, D] float32, not yet multiplied by an FP8 pool's scale."""
        return _gather(self._buffers(layer)[0], self._keys_at[self._keys_of(layer)])

    def _values(self, layer: AttentionLayer, seen: _Seen) -> torch.Tensor:
        """[B, Hk, C, Dv] float32, not yet multiplied by an FP8 pool's scale."""
        return _gather(self._buffers(layer)[1], seen.values)

    def _buffers(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V by slot, or by page and slot if the layout has no view by slot."""
        pool = self.context.group_of(layer).kv_pool
        return (pool.get_kv_buffer if self._has_slot_views else pool.get_kv_pages)(layer.layer_id)

    def _index(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Slots int64 as indices into ``_buffers``."""
        page = self.context.page_size
        return (slots,) if self._has_slot_views else (slots // page, slots % page)

    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, G, W, C]: scaled, capped, not yet masked."""
        b, w, h, g, d = rows.shape
        rows = (rows * (layer.scaling * layer.k_scale)).permute(0, 2, 3, 1, 4).reshape(b, h, g * w, d)
        logits = rows.matmul(keys.transpose(2, 3)).view(b, h, g, w, -1)
        if layer.alibi_slopes is not None:
            distance = (self._key_position - self._position[..., None])[:, None, None]
            return logits + layer.alibi_slopes.view(1, h, g, 1, 1) * distance
        return layer.logit_cap * torch.tanh(logits / layer.logit_cap) if layer.logit_cap else logits

    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, C]: True for visible keys inside the layer's window, or in the row's chunk."""
        if layer.is_cross_attention:
            assert self._encoder_lens is not None
            return (self._key < self._encoder_lens[:, None, None]).expand(-1, self._position.shape[1], -1)
        visible = self._visible
        if layer.bidirectional_spans and self._spans is not None:
            visible = visible | self._in_spans(self._spans)
        if layer.attention_chunk_size:
            own, keys = (each // layer.attention_chunk_size for each in (self._position, self._key_position))
            return visible & (own[..., None] == keys)
        if layer.sliding_window_size < 0:
            return visible
        before = self._position[..., None] - self._key_position
        if layer.non_causal_window == "block":
            before = before[:, :1]
        elif layer.non_causal_window == "both":
            before = before.abs()
        return visible & (before <= layer.sliding_window_size)

    def _in_spans(self, spans: torch.Tensor) -> torch.Tensor:
        """[B, W, C]: True if row and key are in one of ``spans`` [B, R, 2]; a span of a single row changes nothing."""
        first, last = spans[..., 0, None], spans[..., 1, None]
        row, key = ((first <= at[:, None]) & (at[:, None] <= last) for at in (self._position, self._key[None]))
        held = self._key < self._held
        return (row[..., None] & key[:, :, None]).any(1) & held[:, None]

    def _seen_by(self, seen: torch.Tensor, layer: AttentionLayer) -> _Seen:
        """Masks and values that follow from ``seen`` [B, W, C]."""
        slots = self._slots[self._keys_of(layer)]
        # Slots that no row may see hold anything, NaN included, and 0 * NaN is NaN.
        last = self._last_key
        if layer.is_cross_attention:
            assert self._encoder_lens is not None
            last = (self._encoder_lens - 1).clamp(min=0)[:, None]
        values = torch.where(seen.any(1), slots, slots.gather(1, last))
        return _Seen(~seen[:, None, None], ~seen.any(2)[:, :, None, None, None], self._index(values))

    def _masked(self, logits: torch.Tensor, seen: _Seen, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, G, W, C]: logits, -inf for unseen keys, followed by the sinks, if any."""
        if self._bias is not None:
            logits = logits + self._bias[:, None, None]
        logits = logits.masked_fill(seen.hidden, -torch.inf)
        if layer.sinks is None:
            return logits
        sinks = layer.sinks.view(1, layer.tp_k_head_num, layer.q_per_kv, 1, 1)
        return torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)

    def _sum(self, p: torch.Tensor, values: torch.Tensor, seen: _Seen) -> torch.Tensor:
        """[B, W, Hk, G, Dv]: weighted sums. The softmax of a row that sees no key is NaN, so such a row gets zeros."""
        out = p.flatten(2, 3).matmul(values).view(*p.shape[:-1], -1).permute(0, 3, 1, 2, 4)
        return out.masked_fill(seen.blind, 0.0)


def _gather(buffer: torch.Tensor, places: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """[B, Hk, C, D] float32: ``buffer[places]`` with each head's rows contiguous, for a matrix product.

    Indexing is not implemented for FP8 everywhere, so its bytes are gathered.
    """
    if buffer.dtype.itemsize > 1:
        return buffer[places].transpose(1, 2).contiguous().float()
    return buffer.view(torch.uint8)[places].transpose(1, 2).contiguous().view(buffer.dtype).float()
