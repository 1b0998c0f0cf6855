"""A healthy backend built like those of servers, which faults override: plan outside the graph, kernel inside.

*Planning* runs before a capture and before every replay, outside the graph. It fills persistent buffers in place: page
table, key lengths, query offsets, write slots, mask, and sizes of splits. *The kernel* reads only these buffers, not
the batch; it splits the keys of a request, stores partial results in a workspace from the constructor, and combines
them.

Every step of the two is one small method, so that a bug is one override.

Shapes: T query rows, B requests (padding included), W most rows per request, N draft tokens per request, P pages per
request, C = P * page_size keys, S = ``max_splits``, Hk KV heads, Hq = Hk * G query heads, D and Dv the widths of key
and value.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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
    VerifyInput,
    Windows,
)

from .pool_reads import read_slots


@dataclass
class Metadata:
    """Inputs of the kernel for one step. Those of graphs are views of the persistent buffers."""

    page_table: torch.Tensor
    """[B, P] int32."""
    kv_lens: torch.Tensor
    """[B] int32: keys, this step's included."""
    cu_seqlens_q: torch.Tensor
    """[B + 1] int32: where the query rows of each request begin."""
    chunk: torch.Tensor
    """[B] int32: keys in one split."""
    slots: torch.Tensor
    """[T] int64: slots of the new rows; 0 for padding."""
    mask: torch.Tensor | None
    """[B, N, N] bool: node t of the draft tree may see node c. None: causal."""
    max_q_len: int = 1
    """W: a constant of the mode."""


class PlannedBackend(AttentionBackend):
    """Healthy parent: paged attention with a plan, in plain torch.

    Raises ``Unsupported`` for a context that its ``capabilities`` exclude.
    """

    capabilities = Capabilities(
        eager=frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE},
        graph=frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE},
        heads=HeadShapes(families={"mha", "gqa", "mqa"}, head_dims={64, 128}, gqa_ratios=frozenset(range(1, 9))),
        precision=Precision(dtypes={"bf16", "fp16"}),
        kv_pool=KVPools(kv_dtypes={"same", "fp8_e4m3"}, page_sizes={1, 4, 16, 64}),
        # The bound of a context leaves out the case of 66,000 keys, which costs each control a minute without a device.
        bounds=Bounds(max_q_rows=64, max_topk=8, max_context_len=1 << 14),
        windows=Windows(frozenset(ForwardMode), in_trees=True),
        options=LayerOptions(logit_cap=True, sinks=True),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_strided_heads=True, takes_unset_width=True),
        promises=Promises(deterministic=True),
    )
    max_splits = 3
    tile = 16
    """Splits begin at multiples of this many keys."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.pages = -(-self.most_keys(context) // context.page_size)
        self.index = torch.arange(
            max(self.pages * context.page_size, context.max_num_tokens) + 1, device=context.device
        )
        self.width = max([1] + [self.max_q_len(mode) for mode in context.modes])
        heads = max(layer.tp_q_head_num for layer in context.layers)
        dim = max(layer.v_head_dim for layer in context.layers)
        self.workspace = self.new_workspace(context.max_bs * self.max_splits * self.width * heads * (dim + 1))
        self.metadata: Metadata | None = None
        self.in_graph = False
        """True if the next forward is warmed up and captured."""
        self.capturing = False
        """True while a capture is planned, False for a replay."""
        self.graphs: dict[tuple[ForwardMode, int], Metadata] = {}

    def most_keys(self, context: BackendContext) -> int:
        """Most keys of a request in any step: columns of the request table, which new tokens need as well."""
        return context.req_to_token.shape[1]

    def new_workspace(self, numbers: int) -> torch.Tensor:
        """[numbers] float32 for partial results; they are written before they are read, so it is not cleared."""
        return torch.empty(numbers, dtype=torch.float32, device=self.context.device)

    # Planning: outside the graph

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers that every graph reads, at their largest size."""
        n, device = self.context.num_draft_tokens, self.context.device

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.buffers = Metadata(
            page_table=buffer(max_bs, self.pages),
            kv_lens=buffer(max_bs),
            cu_seqlens_q=buffer(max_bs + 1),
            chunk=buffer(max_bs) + self.tile,
            slots=buffer(max_num_tokens, dtype=torch.int64),
            mask=buffer(max_bs, n, n, dtype=torch.bool) if self.context.topk else None,
        )

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager step in new tensors."""
        self.in_graph = self.capturing = False
        self.metadata = self.plan(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Make the views of a bucket at a capture; fill them at a replay, whose batch has only live slots."""
        self.in_graph, self.capturing = True, in_capture
        key = self.key(batch)
        if in_capture:
            self.graphs[key] = self.views(batch)
        self.metadata = self.graphs[key]
        self.fill(self.metadata, self.plan(batch), batch)

    def key(self, batch: ForwardBatch) -> tuple[ForwardMode, int]:
        """Key of the graph of a batch: its mode and its bucket."""
        return batch.forward_mode, batch.batch_size

    def views(self, batch: ForwardBatch) -> Metadata:
        """The part of the persistent buffers that a bucket uses."""
        bs, whole, width = batch.batch_size, self.buffers, self.max_q_len(batch.forward_mode)
        return Metadata(
            page_table=whole.page_table[:bs],
            kv_lens=whole.kv_lens[:bs],
            cu_seqlens_q=whole.cu_seqlens_q[: bs + 1],
            chunk=whole.chunk[:bs],
            slots=whole.slots[: len(batch.input_ids) if batch.forward_mode is ForwardMode.EXTEND else bs * width],
            mask=whole.mask[:bs] if whole.mask is not None and batch.forward_mode.is_target_verify() else None,
            max_q_len=width,
        )

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        """Copy a plan into the buffers that the graph reads."""
        for field in fields(Metadata):
            target, source = getattr(views, field.name), getattr(plan, field.name)
            if isinstance(target, torch.Tensor):
                self.copy_in(field.name, target, source)

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy into one buffer. Live rows may be fewer than the bucket's: the slots of the others are 0."""
        if len(source) < len(target):
            target[len(source) :] = 0
        target[: len(source)].copy_(source)

    def plan(self, batch: ForwardBatch) -> Metadata:
        """Plan of a step, on the device, from the batch's device tensors."""
        counts = self.plan_counts(batch)
        lens = self.plan_lengths(batch, counts)
        return Metadata(
            page_table=self.plan_pages(batch),
            kv_lens=lens,
            cu_seqlens_q=self.plan_offsets(counts, batch),
            chunk=self.plan_splits(lens),
            slots=self.plan_slots(batch),
            mask=self.plan_mask(batch) if batch.forward_mode.is_target_verify() else None,
            max_q_len=self.max_q_len(batch.forward_mode),
        )

    def max_q_len(self, mode: ForwardMode) -> int:
        """Most rows W of a mode: a constant of the instance."""
        if mode is ForwardMode.DRAFT_EXTEND:
            return self.context.speculative_num_steps + 1
        if mode is ForwardMode.EXTEND:
            return self.context.max_extend_tokens
        return 1 if mode.is_decode() else self.context.num_draft_tokens

    def plan_counts(self, batch: ForwardBatch) -> torch.Tensor:
        """[B] int32: query rows of each request, padded ones included."""
        if batch.forward_mode is ForwardMode.DRAFT_EXTEND:
            assert isinstance(batch.spec_info, DraftExtendInput)
            return batch.spec_info.num_accept_tokens[: batch.batch_size].to(torch.int32)
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            return batch.extend_seq_lens
        width = self.max_q_len(batch.forward_mode)
        return torch.full((batch.batch_size,), width, dtype=torch.int32, device=self.context.device)

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        """[B] int32: keys of each request, this step's included."""
        lens = batch.seq_lens[: batch.batch_size].to(torch.int32)
        return lens + counts if batch.forward_mode.is_target_verify() else lens

    def plan_offsets(self, counts: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[B + 1] int32: running sum of ``counts`` [B] int32, from 0."""
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        """[B, P] int32. Columns past a request's pages hold stale entries of the request table."""
        page = self.context.page_size
        rows = self.context.req_to_token[batch.req_pool_indices[: batch.batch_size].long()]
        return (rows[:, ::page] // page).to(torch.int32)

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        """[B] int32: keys in one split, so that S of them hold all keys; short requests leave some empty."""
        return (lens + self.max_splits * self.tile - 1) // (self.max_splits * self.tile) * self.tile

    def plan_slots(self, batch: ForwardBatch) -> torch.Tensor:
        """[T] int64; at a replay live rows only."""
        return batch.out_cache_loc

    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        """[B, N, N] bool: the draft columns of the FULL_MASK; a padded request has none and gets any."""
        spec, n = batch.spec_info, self.max_q_len(batch.forward_mode)
        assert isinstance(spec, VerifyInput)
        assert spec.custom_mask is not None
        prefix, node = batch.seq_lens[: batch.batch_size].long(), self.index[:n]
        block = (prefix.cumsum(0) - prefix) * n + self.index[: len(prefix)] * (n * n)
        cell = block[:, None, None] + (node[:, None] * (prefix + n)[:, None, None]) + prefix[:, None, None] + node
        mask = spec.custom_mask.view(torch.bool)
        return mask[cell.clamp(0, mask.shape[0] - 1)]

    # The kernel: recorded

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
        meta = self.metadata
        assert meta is not None, "a step is planned before its forward"
        if save_kv_cache:
            self.write_kv(layer, k, v, meta)
        out = self.attend(q, layer, meta)
        if layer.layer_id == self.context.layers[-1].layer_id:
            self.finish(batch)
        return out

    def finish(self, batch: ForwardBatch) -> None:
        """Hook after the last layer, for a backend's own bookkeeping; does nothing here."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        """Store rows k [T, Hk, D] and v [T, Hk, Dv] in ``meta.slots``, in the pool's dtype."""
        self.context.kv_pool.set_kv_buffer(layer, meta.slots, k, v)

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        """[T, Hq, Dv] in q's dtype: attention of q [T, Hq, D] over the pool."""
        position = self.row_positions(meta)
        seen = self.visible(meta, layer, position)
        rows = q.reshape(len(q), layer.tp_k_head_num, layer.q_per_kv, layer.head_dim)[self.row_of(meta, len(q))]
        keys, values = self.gather(layer, self.key_slots(meta))
        logits = self.logits(rows.float(), keys, layer)
        values = self.mask_values(values, seen, meta)
        acc, lse = self.partial_views(len(meta.kv_lens), meta.max_q_len, layer)
        self.partials(logits, seen[:, None] & self.in_split(meta)[:, :, None], values, acc, lse)
        out = self.combine(acc, lse, layer) * layer.v_scale
        return self.scatter(out, meta, len(q)).to(q.dtype)

    def row_of(self, meta: Metadata, tokens: int) -> torch.Tensor:
        """[B, W] int64: query row of each place. Places past a request's rows hold another request's, and are
        dropped."""
        return (meta.cu_seqlens_q[:-1, None].long() + self.index[: meta.max_q_len]).clamp(0, tokens - 1)

    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        """[B, W, Hq, Dv] -> [T, Hq, Dv]. Rows past the last request are padding and get any result."""
        row, ends = self.index[:tokens], meta.cu_seqlens_q[1:].long()
        request = torch.searchsorted(ends, row, right=True).clamp(max=len(out) - 1)
        offset = row - meta.cu_seqlens_q[request]
        return out.flatten(0, 1)[request * meta.max_q_len + offset.clamp(0, meta.max_q_len - 1)]

    def row_positions(self, meta: Metadata) -> torch.Tensor:
        """[B, W] int64. The position of a tree's node follows from its depth, the number of its ancestors."""
        prefix = (meta.kv_lens - meta.cu_seqlens_q.diff()).long()
        if meta.mask is None:
            return prefix[:, None] + self.index[: meta.max_q_len]
        return prefix[:, None] + meta.mask.sum(-1) - 1

    def key_slots(self, meta: Metadata) -> torch.Tensor:
        """[B, C] int64: KV slot of each key, by the page table."""
        page = self.context.page_size
        return (meta.page_table.long()[:, :, None] * page + self.index[:page]).flatten(1)

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        """[B, W, C] bool: True if a row may see a key, from the rows' positions [B, W] int64; windows included."""
        key = self.index[: self.pages * self.context.page_size]
        key_position = key[None, None]
        if meta.mask is None:
            seen = (key_position <= position[..., None]) & (key_position < meta.kv_lens[:, None, None])
        else:
            n = meta.mask.shape[1]
            node = key - (meta.kv_lens.long() - n)[:, None]
            draft, node = (node >= 0) & (node < n), node.clamp(0, n - 1)
            seen = meta.mask.gather(2, node[:, None].expand(-1, n, -1))
            seen = torch.where(draft[:, None], seen, (key < (meta.kv_lens - n)[:, None])[:, None])
            key_position = torch.where(draft, position.gather(1, node), key)[:, None]
        if layer.sliding_window_size < 0:
            return seen
        return seen & (key_position >= self.window_start(position, layer)[..., None])

    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, W] int64: the first position in the window of each row; only for windowed layers."""
        return position - layer.sliding_window_size

    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, C, Hk, D] float32, not yet multiplied by an FP8 pool's scales."""
        key, value = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        return read_slots(key, slots), read_slots(value, slots)

    def mask_values(self, values: torch.Tensor, seen: torch.Tensor, meta: Metadata) -> torch.Tensor:
        """[B, C, Hk, Dv], zero where no row may see the slot: it holds anything, NaN included, and 0 * NaN is NaN."""
        return values.masked_fill(~seen.any(1)[:, :, None, None], 0.0)

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, Hk, G, C] float32 of rows [B, W, Hk, G, D] and keys [B, C, Hk, D]: scaled, capped, not yet masked."""
        logits = torch.einsum("bwhgd,bshd->bwhgs", rows, keys) * (layer.scaling * layer.k_scale)
        return layer.logit_cap * torch.tanh(logits / layer.logit_cap) if layer.logit_cap else logits

    def in_split(self, meta: Metadata) -> torch.Tensor:
        """[B, S, C] bool: keys of each split."""
        chunk = meta.chunk.long()[:, None].clamp(min=1)
        split = self.index[: self.pages * self.context.page_size] // chunk
        return split[:, None] == self.index[: self.max_splits, None]

    def partial_views(self, bs: int, width: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of partial results in the workspace: [B, S, W, Hq, Dv], and their log-sum-exp [B, S, W, Hq]."""
        heads, dim = layer.tp_q_head_num, layer.v_head_dim
        rows = bs * self.max_splits * width * heads
        shape = (bs, self.max_splits, width, heads)
        return self.workspace[: rows * dim].view(*shape, dim), self.workspace[rows * dim :][:rows].view(shape)

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """The softmax of every split by itself, into ``acc`` and ``lse``. A split that sees no key gives 0 and -inf.

        ``logits`` [B, W, Hk, G, C], ``seen`` [B, S, W, C] bool, ``values`` [B, C, Hk, Dv], ``acc`` [B, S, W, Hq, Dv],
        ``lse`` [B, S, W, Hq]; all float32 but ``seen``.
        """
        masked = logits[:, None].masked_fill(~seen[:, :, :, None, None], -torch.inf)
        top = masked.amax(-1, keepdim=True)
        p = torch.exp(masked - top.masked_fill(top == -torch.inf, 0.0))
        total = p.sum(-1, keepdim=True)
        out = torch.einsum("bnwhgs,bshd->bnwhgd", p / total.clamp(min=1e-30), values)
        acc.copy_(out.flatten(3, 4))
        lse.copy_((top + total.log()).squeeze(-1).flatten(3, 4))

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, W, Hq, Dv] float32: the splits by their weights, and a sink's weight once. Empty rows give zeros."""
        top = lse.amax(1, keepdim=True)
        if layer.sinks is not None:
            top = torch.maximum(top, layer.sinks)
        top = top.masked_fill(top == -torch.inf, 0.0)
        weight = torch.exp(lse - top)
        total = weight.sum(1)
        if layer.sinks is not None:
            total = total + torch.exp(layer.sinks - top[:, 0])
        return (acc * weight[..., None]).sum(1) / total.clamp(min=1e-30)[..., None]


class CountingBackend(PlannedBackend):
    """Healthy parent with counters: the split that finishes last combines, and resets the counter.

    Kernels do so to avoid a second launch. The counters must be zero at first use, and are left zero.
    """

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.counters = self.new_counters(context.max_bs)

    def new_counters(self, count: int) -> torch.Tensor:
        """[count] int32, zero."""
        return torch.zeros(count, dtype=torch.int32, device=self.context.device)

    @override
    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Combine as in the parent if the count reached the number of splits; else return the first split's result."""
        counters = self.counters_of(len(acc))
        counters += self.max_splits
        done = counters == self.max_splits
        out = torch.where(done[:, None, None, None], super().combine(acc, lse, layer), acc[:, 0])
        self.reset(counters)
        return out

    def counters_of(self, bs: int) -> torch.Tensor:
        """[B] int32: a view of the counters of ``bs`` requests."""
        return self.counters[:bs]

    def reset(self, counters: torch.Tensor) -> None:
        """Reset the counters."""
        counters.zero_()
