"""The smaller interface, for authors of kernels: write ``run``; the kit prepares the metadata.

The metadata are rebuilt on the device at the start of every step, from the batch's tensors, so they are safe in a
CUDA graph by construction: fixed shapes, fixed addresses, no host lengths.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch

from .backend import AttentionBackend
from .batch import DraftExtendInput, ForwardBatch, TreeMaskMode, VerifyInput, VerifyMask
from .context import BackendContext
from .draft_decode import DraftDecodeInput
from .kernel_plan import KernelPlan, KernelStep
from .kv_split import KVSplit
from .layer import AttentionLayer
from .modes import ForwardMode

__all__ = ["KernelBackend"]


class KernelBackend(AttentionBackend):
    """An attention backend made from one kernel call. Subclasses give ``capabilities`` and ``run``.

    ``run`` is not called for a batch without requests, so every subclass may declare ``takes_empty_batches``. Its
    result is copied into the caller's ``out``, so every subclass may declare ``takes_out``.

    A subclass with its own cache writer overrides ``write_kv``. If the kernel stores the rows while it attends them,
    the override does nothing, and the kernel reads ``k``, ``v`` and ``out_cache_loc`` from its plan.

    Attributes of this class begin with ``_kit_``; subclasses may use all other names.
    """

    @abstractmethod
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Attend over the paged KV memory; the new keys and values are already in it.

        ``q`` [T, Hq, D]; ``kv`` K [pages, page_size, Hk, D] and V [pages, page_size, Hk, Dv]. Returns [T, Hq, Dv].
        ``q`` may be a strided view of a packed tensor, and so may ``kv`` if other KV layouts than ``nhd`` are declared;
        ``context.kv_pool.get_layer_buffer`` returns both in their layout. May run under capture: device work only.
        """

    def run_return_lse(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend like ``run`` over the keys of ``plan.part``. Also returns the log-sum-exp, [T, Hq] or [Hq, T], as
        ``capabilities.lse`` declares.

        ``plan.part_lens`` and ``plan.part_slots`` list the keys. ``AttentionBackend.forward_return_lse`` has the rules.
        """
        raise NotImplementedError(f"{type(self).__name__} declares lse but does not define run_return_lse")

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._kit_mask: VerifyMask | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Keep one mask buffer for all graphs; everything else is rebuilt inside them."""
        context = self.context
        if context.topk > 1:
            n = context.num_draft_tokens
            buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=context.device)
            self._kit_mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The persistent draft-block mask, once graphs are in use."""
        return self._kit_mask

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Rebuild lengths and query offsets on the device; tables are made when they are first read."""
        context, bs, mode = self.context, batch.batch_size, batch.forward_mode
        if not bs:
            return
        requests = batch.req_pool_indices[:bs].long()
        table = context.req_to_token[requests]
        if mode.is_draft_decode():
            self._kit_step = _branches(context, batch, table)
            return
        seq_lens = batch.seq_lens[:bs].to(torch.int32)
        mask: torch.Tensor | None = None
        width, counts = _rows(context, batch)
        if context.dialect.padded_requests == "nothing":
            assert batch.query_start_loc is not None
            cu_seqlens_q = batch.query_start_loc[: bs + 1]
        elif counts is None:
            cu_seqlens_q = torch.arange(bs + 1, dtype=torch.int32, device=context.device) * width
        else:
            cu_seqlens_q = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        if mode.is_target_verify():
            if context.dialect.verify_lens == "prefix":
                seq_lens = seq_lens + cu_seqlens_q.diff()
            mask = _draft_mask(context, batch, (seq_lens - width).clamp(min=0).long(), width)
        spans = batch.mm_prefix_range_tensor if context.max_spans else None
        bias = None if context.qq_bias == "none" else batch.qq_bias
        self._kit_step = KernelStep(
            table, seq_lens, cu_seqlens_q, width, mask, context.page_size, spans=spans, qq_bias=bias,
            cu_window_seqlens=getattr(batch, "cu_window_seqlens", None),
        )  # fmt: skip
        others = context.groups[1:]
        self._kit_steps_of_others = tuple(replace(self._kit_step, table=each.req_to_token[requests]) for each in others)
        if context.max_encoder_len:
            assert batch.encoder_lens is not None
            encoder_lens = batch.encoder_lens[:bs]
            whole = context.groups[-1].req_to_token[requests]
            self._kit_encoder_step = replace(self._kit_step, table=whole, kv_lens=encoder_lens.to(torch.int32))
            if not context.kv_groups:
                behind = encoder_lens[:, None] + torch.arange(table.shape[1], device=context.device)
                own = table.gather(1, behind.clamp(max=table.shape[1] - 1))
                self._kit_step = replace(self._kit_step, table=own)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new rows and call the kernel. Shapes as in ``AttentionBackend.forward``."""
        if not batch.batch_size:
            return q.new_empty(0, layer.tp_q_head_num, layer.v_head_dim) if out is None else out
        plan = replace(_stored(self, (k, v), layer, batch, save_kv_cache), out=out, selected=selected)
        result = self.run(q, _pages(self.context, layer), plan)
        return result if out is None or result is out else out.copy_(result.view_as(out))

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
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new rows and call ``run_return_lse``. The plan's layer has sinks only if they count in ``part``."""
        plan = replace(_stored(self, (k, v), layer, batch, save_kv_cache), part=part, selected=selected)
        if not part.sinks:
            plan = replace(plan, layer=replace(layer, sinks=None))
        return self.run_return_lse(q, _pages(self.context, layer), plan)

    def store_index(self, k_index: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Call ``write_index``, except for a batch without requests."""
        if batch.batch_size:
            self.write_index(k_index, _plan_of(self, layer, batch))

    def select(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Call ``run_select``. Shapes as in ``AttentionBackend.select``."""
        if not batch.batch_size:
            return torch.full((len(q_index), layer.topk), -1, dtype=torch.int32, device=q_index.device)
        return self.run_select(q_index, weights, _plan_of(self, layer, batch))

    def write_index(self, k_index: torch.Tensor, plan: KernelPlan) -> None:
        """Store index keys ``k_index`` [T, 128] in ``plan.out_cache_loc``, by the rule of ``IndexPool``.

        Called before ``run_select``. May run under capture: device work only.
        """
        assert self.context.index_pool is not None
        self.context.index_pool.store(plan.layer.layer_id, plan.out_cache_loc, k_index)

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Select keys as ``AttentionBackend.select`` does: [T, topk] int32. May run under capture: device work only."""
        raise NotImplementedError(f"{type(self).__name__} declares an indexer but does not define run_select")

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        """Store rows ``k`` [T, Hk, D] and ``v`` [T, Hk, Dv] in ``plan.out_cache_loc``, by the rule of ``KVPool``.

        Called before ``run``, only if ``save_kv_cache`` is True. May run under capture: device work only.
        """
        self.context.group_of(plan.layer).kv_pool.set_kv_buffer(plan.layer, plan.out_cache_loc, k, v)


def _branches(context: BackendContext, batch: ForwardBatch, table: torch.Tensor) -> KernelStep:
    """Metadata of a draft-decode, with each branch as a request that decodes. ``table`` [bs, max_context_len]: rows of
    ``req_to_token``."""
    spec = batch.spec_info
    assert isinstance(spec, DraftDecodeInput)
    seq_lens = batch.seq_lens[: len(table)]
    kv_lens = (seq_lens + spec.step + 1).to(torch.int32).repeat_interleave(spec.topk)
    cu_seqlens_q = torch.arange(len(kv_lens) + 1, dtype=torch.int32, device=table.device)
    return KernelStep(table, kv_lens, cu_seqlens_q, 1, None, context.page_size, spec, seq_lens)


def _rows(context: BackendContext, batch: ForwardBatch) -> tuple[int, torch.Tensor | None]:
    """Return the most query rows of a request, and the number of rows per request, [bs]; None if all are equal."""
    bs, mode = batch.batch_size, batch.forward_mode
    if mode is ForwardMode.EXTEND:
        assert batch.extend_seq_lens is not None
        return min(context.max_extend_tokens, batch.input_ids.shape[0]), batch.extend_seq_lens[:bs]
    if mode is ForwardMode.DRAFT_EXTEND:
        assert isinstance(batch.spec_info, DraftExtendInput)
        return context.speculative_num_steps + 1, batch.spec_info.num_accept_tokens[:bs]
    if isinstance(batch.spec_info, VerifyInput):
        return batch.spec_info.draft_token_num, None
    return batch.input_ids.shape[0] // bs, None


def _draft_mask(context: BackendContext, batch: ForwardBatch, prefix: torch.Tensor, n: int) -> torch.Tensor | None:
    """[bs, n, n] bool: the mask of the draft's rows, or None for a chain. ``prefix`` [bs] int64: keys before the
    step."""
    spec, bs = batch.spec_info, len(prefix)
    assert isinstance(spec, VerifyInput)
    if context.topk <= 1 or spec.custom_mask is None:
        return None
    if spec.tree_mask_mode is TreeMaskMode.QLEN_ONLY:
        return spec.custom_mask.view(torch.bool)[: bs * n * n].view(bs, n, n)
    # FULL_MASK: request i's block starts at n * (sum of earlier prefixes) + n * n * i, and row t of it has
    # prefix + n columns; the draft block is its last n columns.
    start = (prefix.cumsum(0) - prefix) * n + torch.arange(bs, device=prefix.device) * n * n
    node = torch.arange(n, device=prefix.device)
    at = start[:, None, None] + node[:, None] * (prefix[:, None, None] + n) + prefix[:, None, None] + node
    return spec.custom_mask.view(torch.bool)[at]


def _pages(context: BackendContext, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    return context.group_of(layer).kv_pool.get_kv_pages(layer.layer_id)


def _plan_of(backend: KernelBackend, layer: AttentionLayer, batch: ForwardBatch) -> KernelPlan:
    """The plan of an indexer, with slots of the index pool. Layers with an indexer share one KV group."""
    context, step = backend.context, backend._kit_step
    slots = context.group_of(layer).cache_loc(batch)
    if context.index_req_to_token is not None:
        assert batch.index_cache_loc is not None
        slots = batch.index_cache_loc.clamp(min=0)
        step = replace(step, table=context.index_req_to_token[batch.req_pool_indices[: batch.batch_size].long()])
    return KernelPlan(step, layer, slots, context.req_to_token.shape[1], False)


def _stored(
    backend: KernelBackend,
    rows: tuple[torch.Tensor, torch.Tensor],
    layer: AttentionLayer,
    batch: ForwardBatch,
    save_kv_cache: bool,
) -> KernelPlan:
    """Store the new rows of a layer and return its plan."""
    context = backend.context
    group = context.group_of(layer)
    most = context.req_to_token.shape[1]
    if layer.is_cross_attention:
        slots = batch.encoder_out_cache_loc
        none = torch.empty(0, dtype=torch.int64, device=context.device)
        plan = KernelPlan(backend._kit_encoder_step, layer, none if slots is None else slots, most, slots is not None)
        if slots is not None:
            plan = replace(plan, k=rows[0], v=rows[1])
            backend.write_kv(*rows, plan)
        return plan
    new = rows if save_kv_cache or layer.encoder_only else (None, None)
    step = backend._kit_steps_of_others[group.index - 1] if group.index else backend._kit_step
    slots = group.cache_loc(batch)
    # Rows of other ranks go where padding goes: page 0.
    own = slots.clamp(min=0) if context.dcp_world_size > 1 else slots
    plan = KernelPlan(step, layer, own, most, save_kv_cache, *new)
    if save_kv_cache:
        backend.write_kv(*rows, plan)
    return plan
