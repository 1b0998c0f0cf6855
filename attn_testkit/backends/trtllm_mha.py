"""FlashInfer's ``trtllm_*`` kernels for MHA, GQA and MQA: XQA on SM90 and SM120, trtllm-gen on SM100.

The decode kernel serves decode, target-verify and draft-extend v2, in which every request has the same small number of
query rows, and draft-decode, where each branch is a request to it. Draft-extend v1 and extend have ragged rows and use
the context kernel, which exists only for SM100.

All metadata are made on the device, inside the graph: a replay needs nothing from the host, not even lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Bounds,
    Capabilities,
    DraftDecodeInput,
    DraftExtendInput,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVGroup,
    KVPools,
    LayerOptions,
    Needs,
    Precision,
    Requires,
    ServerConventions,
    TreeMaskMode,
    VerifyMask,
    Windows,
)

from .branches import branch_slots, forward_number, kernel_requests
from .vendor import device_is_real, provide, sm_of, why_not_here
from .vendor.trtllm_kernels import CONTEXT, DECODE_GEN, DECODE_XQA, SEMAPHORE_BYTES

_SCRATCH_BYTES = 128 << 20
_SCRATCH_BYTES_EMULATED = 4 << 20
_MOST_MULTIPROCESSORS = 256
_FP8_MAX = 448.0
_PACKAGES = ("flashinfer-python>=0.7.2,<0.8",)
_CONTEXT_MODES = frozenset({ForwardMode.DRAFT_EXTEND, ForwardMode.EXTEND})
"""Modes with ragged rows."""


@dataclass
class _Metadata:
    """Inputs of the kernels of one step; all on the device."""

    page_table: torch.Tensor
    """[bs, pages of the longest context] int32. Only entries that a length reaches are written.

    In draft-decode ``bs`` counts branches here."""
    cache_seqlens: torch.Tensor
    """[bs] int32: number of keys, this step's included; in a draft, as in its first forward."""
    width: int
    """Query rows per request: the exact number in the decode kernel, an upper bound in the context kernel."""
    cu_seqlens_q: torch.Tensor
    """[bs + 1] int32: first query row of each request; the decode kernel counts in steps of ``width`` and does not read
    it."""
    cu_seqlens_k: torch.Tensor
    """[bs + 1] int32."""
    other_tables: tuple[torch.Tensor, ...] = ()
    """The page tables of further KV groups, each as ``page_table``."""

    def table_of(self, group: KVGroup) -> torch.Tensor:
        """[bs, pages] int32: the pages of a group."""
        return self.other_tables[group.index - 1] if group.index else self.page_table


class TRTLLMMHABackend(AttentionBackend):
    """Paged attention through ``trtllm_batch_decode_with_kv_cache`` and ``trtllm_batch_context_with_kv_cache``."""

    not_here = why_not_here(DECODE_XQA) and why_not_here(DECODE_GEN)
    capabilities: ClassVar[Capabilities] = Capabilities(
        eager=frozenset(ForwardMode),
        # Servers run the prefill kernel between the pieces of a graph, never inside one.
        graph=frozenset(ForwardMode) - {ForwardMode.EXTEND},
        # XQA is compiled for each combination of dtypes, width, page size, ratio, window and number of query rows, so
        # these are the ones that are tried, not all that there are. 128-slot pages have conditions on trtllm-gen.
        heads=HeadShapes(
            families=frozenset({"mha", "gqa", "mqa"}),
            head_dims=frozenset({64, 128}),
            gqa_ratios=frozenset({1, 4, 8}),
            heads_by_layer=True,
        ),
        precision=Precision(dtypes=frozenset({"fp16", "bf16"}), matmul_dtype="fp8_e4m3", q_scale="static"),
        kv_pool=KVPools(
            kv_dtypes=frozenset({"same", "fp8_e4m3"}),
            page_sizes=frozenset({16, 64}),
            kv_layouts=frozenset({"nhd", "hnd"}),
            kv_groups=True,
        ),
        # The mask of XQA is for chains, and trtllm-gen has none.
        bounds=Bounds(max_q_rows=32, max_topk=1, max_draft_branches=16),
        windows=Windows(frozenset(ForwardMode)),
        options=LayerOptions(sinks=True),
        # XQA on an H200 (flashinfer 0.7.2): an FP8 NaN in an unused slot of the last page makes the whole row NaN in
        # decode; bf16 and fp16 NaN there change nothing.
        needs=Needs(cpu_seq_lens=False, finite_page_tails=frozenset({"fp8_e4m3"})),
        server=ServerConventions(
            takes_none_kv=True, takes_bare_chains=True, takes_strided_heads=True, takes_unset_width=True
        ),
        requires=Requires(sm=((90, 90), (100, 103), (120, 121)), packages=_PACKAGES),
        mode_requires=dict.fromkeys(
            _CONTEXT_MODES,
            Requires(
                sm=(100, 103), why="trtllm_batch_context_with_kv_cache has trtllm-gen kernels, built only for SM100"
            ),
        ),
    )

    emulated_sm: ClassVar[int] = 100
    """Compute capability whose kernels are emulated without a GPU."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        device = context.device
        self._uses_xqa = (sm_of(device) if device_is_real(device) else self.emulated_sm) // 10 != 10
        decode = provide(DECODE_XQA if self._uses_xqa else DECODE_GEN, device)
        self._decode = decode.call
        self._context_kernel = None
        if context.modes & _CONTEXT_MODES:
            self._context_kernel = provide(CONTEXT, device).call
        self.kernels = decode.kernels
        self._most_rows = context.max_bs * max(1, context.draft_branches)
        self._make_workspace()
        n = context.num_draft_tokens
        self._causal_mask = _packed_causal_mask(context.max_bs, n, device) if self._uses_xqa and n > 1 else None
        self._pages = -(-context.max_context_len // context.page_size)
        self._page_starts = torch.arange(self._pages, device=device) * context.page_size
        self._metadata: _Metadata | None = None
        self._static: _Metadata | None = None
        self._verify_mask: VerifyMask | None = None

    def _make_workspace(self) -> None:
        """Allocate the workspace, zeroed once: XQA keeps semaphores at its front, trtllm-gen keeps counters there, and
        both are zero again after each launch."""
        context = self.context
        scratch = _SCRATCH_BYTES if device_is_real(context.device) else _SCRATCH_BYTES_EMULATED
        self._workspace = torch.zeros(SEMAPHORE_BYTES + scratch, dtype=torch.uint8, device=context.device)
        heads = max(layer.tp_q_head_num for layer in context.layers)
        blocks = max(self._most_rows * heads, _MOST_MULTIPROCESSORS)
        self._counters = torch.zeros(-(-blocks // 8) * 32, dtype=torch.uint8, device=context.device)

    # Metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers of all graphs. The table is not cleared: nothing may depend on its tails."""
        self._static = self._new_metadata(self._most_rows)
        if ForwardMode.TARGET_VERIFY in self.context.modes:
            n = self.context.num_draft_tokens
            buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=self.context.device)
            self._verify_mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs, is_read=False)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Return scratch memory for the draft stage, which then needs no host lengths to size a mask that nobody
        reads."""
        return self._verify_mask

    def _new_metadata(self, bs: int) -> _Metadata:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=self.context.device)

        others = tuple(empty(bs, self._pages) for _ in self.context.groups[1:])
        return _Metadata(empty(bs, self._pages), empty(bs), 1, empty(bs + 1), empty(bs + 1), others)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager step in new buffers, so the graphs' buffers do not change."""
        self._metadata = self._new_metadata(kernel_requests(batch))
        self._metadata.width = self._width(batch)
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Choose the views of this bucket at capture. A replay needs nothing: the graph makes its own metadata."""
        if not in_capture:
            return
        whole, bs = self._static, kernel_requests(batch)
        assert whole is not None, "init_cuda_graph_state comes before any capture"
        self._metadata = _Metadata(
            whole.page_table[:bs],
            whole.cache_seqlens[:bs],
            self._width(batch),
            whole.cu_seqlens_q[: bs + 1],
            whole.cu_seqlens_k[: bs + 1],
            tuple(table[:bs] for table in whole.other_tables),
        )

    def _width(self, batch: ForwardBatch) -> int:
        mode, context = batch.forward_mode, self.context
        if mode.is_decode() or mode.is_draft_decode():
            return 1
        if mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens_cpu is not None
            return max(batch.extend_seq_lens_cpu)
        # Servers have captured with the batch's own width unset, and baked a stride of -1 into a graph (sglang #31367).
        return context.speculative_num_steps + 1 if mode.is_draft_extend() else context.num_draft_tokens

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Fill the buffers from the batch's device tensors."""
        metadata, bs, mode = self._metadata, batch.batch_size, batch.forward_mode
        assert metadata is not None
        if isinstance(batch.spec_info, DraftDecodeInput):
            self._fill_branches(metadata, batch, batch.spec_info)
            return
        lens = batch.seq_lens[:bs]
        if mode.is_target_verify():
            lens = lens + metadata.width  # only here they count just the prefix
        metadata.cache_seqlens.copy_(lens)
        _running_sum(lens, metadata.cu_seqlens_k)
        if mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            _running_sum(batch.extend_seq_lens, metadata.cu_seqlens_q)
        elif mode.is_draft_extend():
            assert isinstance(batch.spec_info, DraftExtendInput)
            _running_sum(batch.spec_info.num_accept_tokens[:bs], metadata.cu_seqlens_q)
        else:
            metadata.cu_seqlens_q.copy_(torch.arange(bs + 1, device=lens.device) * metadata.width)
        for group in self.context.groups:
            self._fill_page_table(metadata.table_of(group), group, batch.req_pool_indices[:bs], lens)

    def _fill_page_table(self, table: torch.Tensor, group: KVGroup, requests: torch.Tensor, lens: torch.Tensor) -> None:
        self._write_pages(table, group.req_to_token[requests.long()[:, None], self._page_starts], lens)

    def _fill_branches(self, metadata: _Metadata, batch: ForwardBatch, spec: DraftDecodeInput) -> None:
        """Fill the metadata once for all forwards of a draft: pages of the last one, lengths of the first."""
        slots = branch_slots(self.context, batch, self._page_starts)
        prefix = batch.seq_lens[: batch.batch_size].repeat_interleave(spec.topk)
        metadata.cache_seqlens.copy_(prefix + 1)
        self._write_pages(metadata.page_table, slots, prefix + spec.num_steps - 1)

    def _write_pages(self, table: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> None:
        """Write only live pages; kernels bound their reads by the lengths."""
        pages = (slots // self.context.page_size).to(torch.int32)
        table.copy_(torch.where(self._page_starts < lens[:, None], pages, table))

    # Forward

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Store the new rows and call the kernel of the mode."""
        group, metadata = self.context.group_of(layer), self._metadata
        pool = group.kv_pool
        assert metadata is not None, "a step is planned before its forward"
        if save_kv_cache:
            pool.set_kv_buffer(layer, group.cache_loc(batch), k, v)
        fp8 = pool.dtype.itemsize == 1
        # Heads first: contiguous in a pool of that layout, strided in another.
        key, value = (pages.transpose(1, 2) for pages in pool.get_kv_pages(layer.layer_id))
        earlier = forward_number(batch)
        common = {
            "query": self._query(q, layer, fp8),
            "kv_cache": (key, value),
            "workspace_buffer": self._workspace,
            "block_tables": metadata.table_of(group),
            "seq_lens": metadata.cache_seqlens + earlier if earlier else metadata.cache_seqlens,
            "bmm1_scale": layer.scaling * layer.k_scale * (layer.q_scale if fp8 else 1.0),
            "bmm2_scale": layer.v_scale,
            "window_left": layer.sliding_window_size,
            "sinks": layer.sinks,
            "out_dtype": q.dtype,
            "kv_layout": "HND",
        }
        if batch.forward_mode in _CONTEXT_MODES:
            return self._extend(common, metadata, layer)
        return self._step(common, metadata, layer)

    def _query(self, q: torch.Tensor, layer: AttentionLayer, fp8: bool) -> torch.Tensor:
        """[T, Hq, D], contiguous: XQA ignores strides. trtllm-gen needs FP8 queries for FP8 keys. Over FP8 keys they
        are divided by the checkpoint's scale."""
        q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        if fp8:
            q = q / layer.q_scale
        if fp8 and not self._uses_xqa:
            return q.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return q.contiguous()

    def _step(self, common: dict[str, object], metadata: _Metadata, layer: AttentionLayer) -> torch.Tensor:
        width, bs = metadata.width, metadata.cache_seqlens.shape[0]
        mask = self._causal_mask[:bs] if self._causal_mask is not None and width > 1 else None
        out: torch.Tensor = self._decode(
            **common,
            max_seq_len=self.context.max_context_len,
            q_len_per_req=width,
            mask=mask,
            # Without one the package allocates fresh zeros at every call; for XQA it reads none.
            multi_ctas_kv_counter_buffer=self._counters,
        )
        return out.view(-1, layer.tp_q_head_num, layer.v_head_dim)

    def _extend(self, common: dict[str, object], metadata: _Metadata, layer: AttentionLayer) -> torch.Tensor:
        assert self._context_kernel is not None
        out: torch.Tensor = self._context_kernel(
            **common,
            max_q_len=metadata.width,
            max_kv_len=self.context.max_context_len,
            batch_size=metadata.cache_seqlens.shape[0],
            cum_seq_lens_q=metadata.cu_seqlens_q,
            cum_seq_lens_kv=metadata.cu_seqlens_k,
            multi_ctas_kv_counter_buffer=self._counters,
        )
        return out


class XQABackend(TRTLLMMHABackend):
    """TRT-LLM's adapter, limited to XQA's features, so that XQA's path also runs without an SM90."""

    capabilities: ClassVar[Capabilities] = TRTLLMMHABackend.capabilities.with_changes(
        eager=frozenset(ForwardMode) - _CONTEXT_MODES,
        graph=frozenset(ForwardMode) - _CONTEXT_MODES,
        windows=frozenset(ForwardMode) - _CONTEXT_MODES,
        requires=Requires(sm=((90, 90), (120, 121)), packages=_PACKAGES),
        mode_requires={},
    )
    emulated_sm = 90


def _running_sum(counts: torch.Tensor, into: torch.Tensor) -> None:
    """``into`` [bs + 1] int32: 0, then the running sum of ``counts`` [bs]."""
    into[:1].zero_()
    into[1:].copy_(counts.cumsum(0))


def _packed_causal_mask(max_bs: int, n: int, device: torch.device) -> torch.Tensor:
    """[max_bs, N, 2 * ceil(N / 32)] uint16: bit c of row t is set if node t sees node c of a chain."""
    words = 2 * -(-n // 32)
    row = torch.arange(n)[:, None, None]
    bit = (torch.arange(words)[:, None] * 16 + torch.arange(16)) <= row
    packed = (bit.long() << torch.arange(16)).sum(-1).to(torch.uint16)
    return packed.expand(max_bs, n, words).contiguous().to(device)
