"""An attention backend with its own Triton kernels: all runner modes, eager and in CUDA graphs.

It is written as an example. A step has two halves:

* *planning* turns the batch into four small device tensors (``_Plan``): rows of ``req_to_token``, numbers of keys,
  offsets of the query rows, and the mask of a draft tree. Planning depends on the mode, and never waits for the device.
  For draft-decode it makes a table with one row per branch, and the lengths of all forwards at once.
* *forward* writes K and V and launches one kernel that does not depend on the mode.

In a graph the plan must keep its address, so ``init_cuda_graph_state`` allocates it once at its largest size, and
planning a capture or a replay copies into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton

from attn_testkit.contract import (
    KV_LAYOUTS,
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
    Requires,
    ServerConventions,
    Spans,
    TreeMaskMode,
    VerifyInput,
    VerifyMask,
    Windows,
)

from .triton_kernels import INTERPRETED, attend_kernel, choose_tiles, merge_kernel

_NO_WINDOW = 1 << 30
_IN_SPLITS = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 4 if INTERPRETED else 16  # under the interpreter programs run one after another


@dataclass
class _Plan:
    """Inputs of the kernels for one step, all on the device."""

    table: torch.Tensor
    """[rows, max_context_len] int32: ``req_to_token``; in draft-decode one row per branch, which is a request here."""
    requests: torch.Tensor
    """[bs] int64: row of ``table``."""
    kv_lens: torch.Tensor
    """[forwards, bs] int32: keys, this step's included. Only draft-decode has several forwards. With cross-attention
    layers [2, bs]: keys of the decoder, and of the encoder."""
    cu_seqlens_q: torch.Tensor
    """[bs + 1] int32: first query row of each request."""
    mask: torch.Tensor | None
    """[bs, N, N] uint8: node t may see node c. None: causal."""
    max_q_len: int
    """Upper bound of the query rows of a request: a constant of the mode, or in extend of the batch or bucket."""
    tile_rows: int
    """Rows of a request for which tiles, and the use of splits, are chosen: a constant of the mode."""


class TritonBackend(AttentionBackend):
    """Paged attention in Triton, for CUDA and for the Triton interpreter."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(
            families=frozenset({"mha", "gqa", "mqa"}),
            head_dims=frozenset({32, 64, 128, 256}),
            gqa_ratios=frozenset(range(1, 9)),
            heads_by_layer=True,
        ),
        precision=Precision(dtypes=frozenset({"fp16", "bf16", "fp32"})),
        kv_pool=KVPools(
            kv_dtypes=frozenset({"same", "fp8_e4m3"}),
            page_sizes=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
            kv_layouts=frozenset(KV_LAYOUTS) - {"custom"},
            kv_groups=True,
        ),
        bounds=Bounds(max_q_rows=64, max_topk=64, max_draft_branches=16),
        windows=Windows(frozenset(ForwardMode), in_trees=True),
        options=LayerOptions(
            logit_cap=True, sinks=True, non_causal=frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
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
            padding_slots=frozenset({0, -1}),
            narrower_widths=frozenset(ForwardMode) - {ForwardMode.DECODE, ForwardMode.EXTEND},
        ),
        cross_attention=CrossAttention({ForwardMode.DECODE, ForwardMode.EXTEND}, {"own_group"}),
        promises=Promises(deterministic=True, batch_invariant=True),
        lse=LogSumExp(base="e", whole=frozenset(ForwardMode), prefix=_IN_SPLITS, pages=_IN_SPLITS, tokens=_IN_SPLITS),
        requires=Requires(packages=("triton>=3.6",)),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        # The number of splits is a constant: if it followed the batch, a request's bits would depend on other requests.
        self._splits = min(_MAX_SPLITS, triton.cdiv(context.req_to_token.shape[1], _KEYS_PER_SPLIT))
        heads = max(layer.tp_q_head_num for layer in context.layers)
        width = max(layer.v_head_dim for layer in context.layers)
        sums = context.max_bs * max(1, context.draft_branches) * heads * self._splits
        self._partial = torch.empty(sums * width, dtype=torch.float32, device=context.device)
        self._lse = torch.empty(sums, dtype=torch.float32, device=context.device)
        self._plan: _Plan | None = None
        self._static: _Plan | None = None
        self._verify_mask: VerifyMask | None = None

    # Planning

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager step in new tensors, so the graphs' tensors do not change."""
        self._plan = self._plan_step(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the plan that all graphs read."""
        context, device = self.context, self.context.device
        n, rows = context.num_draft_tokens, max_bs * max(1, context.draft_branches)
        branches = max_bs * context.draft_branches
        mask: torch.Tensor | None = None
        if ForwardMode.TARGET_VERIFY in context.modes:
            mask = torch.zeros(max_bs, n, n, dtype=torch.uint8, device=device)
            self._verify_mask = VerifyMask(mask.view(-1), TreeMaskMode.QLEN_ONLY, max_bs)
        self._static = _Plan(
            table=torch.zeros(branches, context.req_to_token.shape[1], dtype=torch.int32, device=device),
            requests=torch.zeros(rows, dtype=torch.int64, device=device),
            kv_lens=torch.zeros(
                max(2 if context.max_encoder_len else 1, context.speculative_num_steps - 1),
                rows,
                dtype=torch.int32,
                device=device,
            ),
            cu_seqlens_q=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            mask=mask,
            max_q_len=0,
            tile_rows=0,
        )

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The mask of the graphs, which the draft stage fills; an eager step in between may use it, too."""
        return self._verify_mask

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Copy this step's plan into the graph's; a capture and a replay do the same."""
        static, fresh = self._static, self._plan_step(batch)
        forwards, bs = fresh.kv_lens.shape
        assert static is not None, "init_cuda_graph_state comes before any capture"
        mask: torch.Tensor | None = None
        if batch.forward_mode.is_target_verify():
            assert static.mask is not None
            assert fresh.mask is not None
            # A narrower batch has its nodes in the first bytes, where the draft stage puts them.
            mask = static.mask.view(-1)[: fresh.mask.numel()].view(fresh.mask.shape)
            mask.copy_(fresh.mask)
        self._plan = _Plan(
            table=static.table[:bs].copy_(fresh.table) if batch.forward_mode.is_draft_decode() else fresh.table,
            requests=static.requests[:bs].copy_(fresh.requests),
            kv_lens=static.kv_lens[:forwards, :bs].copy_(fresh.kv_lens),
            cu_seqlens_q=static.cu_seqlens_q[: bs + 1].copy_(fresh.cu_seqlens_q),
            mask=mask,
            max_q_len=fresh.max_q_len,
            tile_rows=fresh.tile_rows,
        )

    def _plan_step(self, batch: ForwardBatch) -> _Plan:
        """Plan one step from device tensors only. ``batch`` may be a replay view, with tensors longer than bs."""
        context, bs, mode, spec = self.context, batch.batch_size, batch.forward_mode, batch.spec_info
        table, requests, seq_lens = context.req_to_token, batch.req_pool_indices[:bs].long(), batch.seq_lens[:bs].long()
        if isinstance(spec, DraftDecodeInput):
            return self._plan_branches(spec, table[requests], seq_lens)
        n = 1 if mode.is_decode() else _width(batch)
        cu_seqlens_q = torch.arange(bs + 1, dtype=torch.int32, device=seq_lens.device) * n
        mask: torch.Tensor | None = None
        if mode.is_target_verify():
            assert isinstance(spec, VerifyInput)
            # Only here they may count just the prefix. A padded request may have no key at all.
            prefix = seq_lens if context.dialect.verify_lens == "prefix" else (seq_lens - n).clamp(min=0)
            mask, seq_lens = _node_mask(spec, prefix, n, causal=context.causal), prefix + n
        elif mode.is_draft_extend():
            assert isinstance(spec, DraftExtendInput)
            n = context.speculative_num_steps + 1
            cu_seqlens_q = _offsets(spec.num_accept_tokens[:bs])
        elif mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            cu_seqlens_q = _offsets(batch.extend_seq_lens)
            # Any request of a replay may have all rows of its bucket, and other requests must not affect its tiles.
            longest = min(batch.input_ids.shape[0], context.max_extend_tokens)
            kv_lens, most = self._kv_lens(batch, seq_lens), context.max_extend_tokens
            return _Plan(table, requests, kv_lens, cu_seqlens_q, None, longest, most)
        return _Plan(table, requests, self._kv_lens(batch, seq_lens), cu_seqlens_q, mask, n, n)

    def _kv_lens(self, batch: ForwardBatch, seq_lens: torch.Tensor) -> torch.Tensor:
        """``_Plan.kv_lens`` of a step with one forward."""
        if not self.context.max_encoder_len:
            return seq_lens.to(torch.int32)[None]
        assert batch.encoder_lens is not None
        return torch.stack([seq_lens, batch.encoder_lens[: len(seq_lens)]]).to(torch.int32)

    def _plan_branches(self, spec: DraftDecodeInput, rows: torch.Tensor, seq_lens: torch.Tensor) -> _Plan:
        """All forwards of a draft. ``rows`` [bs, max_context_len]: of ``req_to_token``; ``seq_lens`` [bs] int64."""
        key = torch.arange(rows.shape[1], device=rows.device)
        table = spec.key_slots(rows, seq_lens, self.context.page_size, key)
        row = torch.arange(len(table) + 1, device=rows.device)
        own = torch.arange(1, spec.num_steps, device=rows.device)
        kv_lens = seq_lens.repeat_interleave(spec.topk) + own[:, None]
        return _Plan(table, row[:-1], kv_lens.to(torch.int32), row.to(torch.int32), None, 1, 1)

    # Forward

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
        """Store the new rows, then attend to them and to the prefix through ``req_to_token``."""
        if not batch.batch_size:
            return q.new_empty(0, layer.tp_q_head_num, layer.v_head_dim) if out is None else out
        self._store(k, v, layer, batch, save_kv_cache)
        return self._attend(q, layer, batch, KVSplit(), None, out)

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
        """Attend to a KV split: another range of keys, or the keys of one rank."""
        self._store(k, v, layer, batch, save_kv_cache)
        lse = q.new_zeros(q.shape[0], layer.tp_q_head_num, dtype=torch.float32)
        return self._attend(q, layer, batch, part, lse), lse

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

    def _attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        part: KVSplit,
        lse: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, Hq, D] output, in ``out`` if given; the log-sum-exp is written to ``lse`` [T, Hq]."""
        context, plan, kv_group = self.context, self._plan, self.context.group_of(layer)
        assert plan is not None, "a step is planned before its forward"
        # Rows of the request table are the same in every group; a draft's own table is of the one group there is.
        table = plan.table if batch.forward_mode.is_draft_decode() else kv_group.req_to_token
        has_sinks = layer.sinks is not None and part.sinks
        key, value = kv_group.kv_pool.get_kv_pages(layer.layer_id)
        k_page, k_slot, *_ = key.stride()
        heads, group, dim = layer.tp_q_head_num, layer.q_per_kv, layer.head_dim
        spec = batch.spec_info
        kv_lens = plan.kv_lens[spec.step if isinstance(spec, DraftDecodeInput) else int(layer.is_cross_attention)]
        bs, splits = len(kv_lens), self._splits if plan.tile_rows == 1 else 1
        # Rows after the last request (ragged modes in a graph) are of no request; zeros are safer than garbage.
        # The interpreter would cut a bfloat16 off instead of rounding it, so there the result is rounded at the end.
        if out is None or INTERPRETED:
            result = q.new_zeros(q.shape[0], heads, dim, dtype=torch.float32 if INTERPRETED else q.dtype)
        else:
            result = out.zero_()
        tiles = choose_tiles(plan.tile_rows, group, layer.tp_k_head_num, dim, q.dtype)
        pairs = plan.max_q_len * group * tiles.kv_heads
        window = layer.sliding_window_size if layer.sliding_window_size >= 0 else _NO_WINDOW
        # The memory that a graph was captured with: the server writes the spans of each replay there.
        spans = getattr(batch, "mm_prefix_range_tensor", None) if layer.bidirectional_spans else None
        attend_kernel[(bs, layer.tp_k_head_num // tiles.kv_heads, triton.cdiv(pairs, tiles.block_m) * splits)](
            q, key, value, result, result if lse is None else lse, self._partial, self._lse,
            table, plan.requests, kv_lens, plan.cu_seqlens_q, batch.positions,
            q if plan.mask is None else plan.mask, q if spans is None else spans,  # q: never read
            layer.sinks if has_sinks else q, layer.scaling * layer.k_scale, layer.v_scale, float(layer.logit_cap),
            window, 0 if spans is None else spans.shape[1],
            *q.stride(), *key.stride()[:3], *value.stride()[:3], table.stride(0),
            part.rank, part.ranks, part.interleave,
            PAGE=0 if k_page == context.page_size * k_slot else context.page_size,
            HEADS=heads, GROUP=group, D=dim, NODES=0 if plan.mask is None else plan.mask.shape[1], SPLITS=splits,
            CAUSAL=layer.causal, HAS_SPANS=spans is not None, HAS_CAP=layer.logit_cap > 0,
            HAS_SINKS=has_sinks, HAS_LSE=lse is not None,
            PART=part.kind, KV_HEADS=tiles.kv_heads,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, DOT=tiles.dot, num_warps=4, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            block_h = triton.next_power_of_2(heads) if INTERPRETED else 1
            merge_kernel[(bs, triton.cdiv(heads, block_h))](
                self._partial, self._lse, result, result if lse is None else lse, HEADS=heads, D=dim, SPLITS=splits,
                BLOCK_H=block_h, BLOCK_S=triton.next_power_of_2(splits), HAS_LSE=lse is not None,
            )  # fmt: skip
        if out is None:
            return result.to(q.dtype)
        return out if result is out else out.copy_(result)


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """[bs] -> [bs + 1] int32: running sum from 0."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _width(batch: ForwardBatch) -> int:
    """Rows of each request in target-verify and draft-extend v2; for draft-extend the upper bound is enough."""
    spec = batch.spec_info
    if isinstance(spec, VerifyInput):
        return spec.draft_token_num
    # While a graph is captured it may be 0 or -1, and the batch then has all rows.
    given = spec.num_tokens_per_req if isinstance(spec, DraftExtendInput) else 0
    return given if given > 0 else batch.input_ids.shape[0] // max(batch.batch_size, 1)


def _node_mask(spec: VerifyInput, prefix: torch.Tensor, n: int, *, causal: bool) -> torch.Tensor:
    """[bs, N, N] uint8: the draft columns of the tree mask, a view if its layout allows. ``prefix`` [bs] int64.

    A chain without a mask gets one, also in eager mode: a graph is captured for trees, and the causal kernel rounds
    differently from the kernel with a mask. In a block that is not causal every node sees all nodes.
    """
    bs = prefix.shape[0]
    if spec.custom_mask is None:
        every = torch.ones(bs, n, n, dtype=torch.uint8, device=prefix.device)
        return every.tril() if causal else every
    mask = spec.custom_mask.view(torch.uint8)
    if spec.tree_mask_mode is TreeMaskMode.QLEN_ONLY:
        return mask[: bs * n * n].view(bs, n, n)
    # FULL_MASK: request i's block begins at n * (sum of earlier prefixes) + n * n * i and has rows of prefix_i + n
    # cells, the draft columns last. Padded requests of a graph have no cells: theirs are clamped to any that exist.
    node = torch.arange(n, device=prefix.device)
    block = (prefix.cumsum(0) - prefix) * n + torch.arange(bs, device=prefix.device) * (n * n)
    width = (prefix + n)[:, None, None]
    cell = block[:, None, None] + node[:, None] * width + (width - n) + node
    return mask[cell.clamp(max=mask.shape[0] - 1)]
