"""FlashInfer's trtllm-gen MLA decode kernel, for all modes: ``trtllm_batch_decode_with_kv_cache_mla``.

The kernel needs the same number of query rows for each request, causal to the end of its keys. In draft-decode each
branch is a request to it. Draft-extend v1 has fewer rows for most requests; they are put at the *end* of their
request's row block. There each row sees the right keys with unchanged ``seq_lens``, and the kernel never reads past a
request's last key. (Servers put the rows at the front and lengthen ``seq_lens`` by the number of missing rows, so the
kernel multiplies other requests' slots by zero.)

All metadata are made on the device, inside the graph: a replay needs nothing from the host, not even lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

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
    KVPools,
    Needs,
    Precision,
    Requires,
    ServerConventions,
    TreeMaskMode,
    VerifyMask,
)

from .branches import branch_slots, forward_number, kernel_requests
from .vendor import device_is_real, provide, why_not_here
from .vendor.provider import EntryPoint
from .vendor.trtllm_kernels import DECODE_MLA

_WORKSPACE_BYTES = 150 << 20
_WORKSPACE_BYTES_EMULATED = 4 << 20
_MOST_MULTIPROCESSORS = 256
_FP8_MAX = 448.0
_QK_NOPE_HEAD_DIM = 128
"""Width of the un-absorbed keys of such models; the kernel does not use it."""


@dataclass
class Metadata:
    """Inputs of the kernel of one step, and places of ragged rows; all on the device."""

    block_tables: torch.Tensor
    """[bs, blocks] int32, -1 after the last page of a request. In draft-decode ``bs`` counts branches here."""
    seq_lens: torch.Tensor
    """[bs] int32: number of keys, this step's included; in a draft, as in its first forward."""
    ends: torch.Tensor
    """[bs] int32, draft-extend v1: end of each request's packed rows."""
    counts: torch.Tensor
    """[bs] int32, draft-extend v1: number of each request's rows."""
    width: int
    """Query rows per request."""


class TRTLLMMLABackend(AttentionBackend):
    """Latent attention, absorbed form, 512 + 64, through the trtllm-gen decode kernel."""

    not_here = why_not_here(DECODE_MLA)
    capabilities: ClassVar[Capabilities] = Capabilities(
        # Servers prefill with a kernel for keys that are not absorbed, which is not part of the contract.
        eager=frozenset(ForwardMode) - {ForwardMode.EXTEND},
        graph=frozenset(ForwardMode) - {ForwardMode.EXTEND},
        heads=HeadShapes(
            families=frozenset({"mla"}),
            head_dims=frozenset({512}),
            mla_rope_dims=frozenset({64}),
            gqa_ratios=frozenset({8, 16, 32, 64, 128}),
        ),
        # Outputs are bfloat16 for queries of every dtype.
        precision=Precision(dtypes=frozenset({"bf16"}), matmul_dtype="fp8_e4m3"),
        kv_pool=KVPools(kv_dtypes=frozenset({"same", "fp8_e4m3"}), page_sizes=frozenset({32, 64})),
        bounds=Bounds(max_q_rows=32, max_topk=1, max_draft_branches=16),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_none_kv=True, takes_bare_chains=True, takes_unset_width=True),
        requires=Requires(
            sm=(100, 103),
            packages=("flashinfer-python>=0.7.2,<0.8",),
            why="trtllm_batch_decode_with_kv_cache_mla: XQA MLA requires SM120a, trtllm-gen SM100",
        ),
    )

    entry: ClassVar[EntryPoint] = DECODE_MLA

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        kernel = provide(self.entry, context.device)
        self._kernel: Callable[..., Any] = kernel.call
        self.kernels = kernel.kernels
        self._most_rows = context.max_bs * max(1, context.draft_branches)
        self._make_workspace()
        # The width of the table is a multiple of 128 slots.
        pages = -(-context.max_context_len // context.page_size)
        self._blocks = -(-pages // (128 // context.page_size)) * (128 // context.page_size)
        starts = torch.arange(self._blocks, device=context.device) * context.page_size
        self._page_starts = starts.clamp(max=context.req_to_token.shape[1] - 1)
        self._metadata: Metadata | None = None
        self._static: Metadata | None = None
        self._verify_mask: VerifyMask | None = None

    def _make_workspace(self) -> None:
        """Allocate the workspace, zeroed once; the kernel's counters are in their own buffer and are zero again after
        each launch."""
        context = self.context
        size = _WORKSPACE_BYTES if device_is_real(context.device) else _WORKSPACE_BYTES_EMULATED
        self._workspace = torch.zeros(size, dtype=torch.int8, device=context.device)
        blocks = max(self._most_rows * context.layers[0].tp_q_head_num, _MOST_MULTIPROCESSORS)
        self._counters = torch.zeros(-(-blocks // 8) * 32, dtype=torch.uint8, device=context.device)

    # Metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers of all graphs."""
        self._static = self._new_metadata(self._most_rows, 1)
        if ForwardMode.TARGET_VERIFY in self.context.modes:
            n = self.context.num_draft_tokens
            buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=self.context.device)
            self._verify_mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs, is_read=False)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Return scratch memory for the draft stage, which then needs no host lengths to size a mask that nobody
        reads."""
        return self._verify_mask

    def _new_metadata(self, bs: int, width: int) -> Metadata:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=self.context.device)

        return Metadata(empty(bs, self._blocks), empty(bs), empty(bs), empty(bs), width)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager step in new buffers, so the graphs' buffers do not change."""
        self._metadata = self._new_metadata(kernel_requests(batch), self._width(batch))
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Choose the views of this bucket at capture. A replay needs nothing: the graph makes its own metadata."""
        if not in_capture:
            return
        whole, bs = self._static, kernel_requests(batch)
        assert whole is not None, "init_cuda_graph_state comes before any capture"
        self._metadata = Metadata(
            whole.block_tables[:bs], whole.seq_lens[:bs], whole.ends[:bs], whole.counts[:bs], self._width(batch)
        )

    def _width(self, batch: ForwardBatch) -> int:
        """Query rows per request: a constant of the mode. The batch's own number may be 0 or -1 during a capture."""
        mode, context = batch.forward_mode, self.context
        if mode.is_decode() or mode.is_draft_decode():
            return 1
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
        metadata.seq_lens.copy_(lens)
        if mode.is_draft_extend():
            assert isinstance(batch.spec_info, DraftExtendInput)
            metadata.counts.copy_(batch.spec_info.num_accept_tokens[:bs])
            metadata.ends.copy_(metadata.counts.cumsum(0))
        requests = batch.req_pool_indices[:bs].long()
        self._fill_block_tables(
            metadata.block_tables, self.context.req_to_token[requests[:, None], self._page_starts], lens
        )

    def _fill_branches(self, metadata: Metadata, batch: ForwardBatch, spec: DraftDecodeInput) -> None:
        """Fill the metadata once for all forwards of a draft: pages of the last one, lengths of the first."""
        slots = branch_slots(self.context, batch, self._page_starts)
        prefix = batch.seq_lens[: batch.batch_size].repeat_interleave(spec.topk)
        metadata.seq_lens.copy_(prefix + 1)
        self._fill_block_tables(metadata.block_tables, slots, prefix + spec.num_steps - 1)

    def _fill_block_tables(self, tables: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> None:
        """``slots`` [bs, blocks]: of the first key of each page."""
        pages = (slots // self.context.page_size).to(torch.int32)
        first = torch.arange(self._blocks, device=lens.device) * self.context.page_size
        tables.copy_(torch.where(first < lens[:, None], pages, -1))

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
        """Store the new latent rows and call the kernel on [bs, width, H, 576]."""
        pool, metadata = self.context.kv_pool, self._metadata
        assert metadata is not None, "a step is planned before its forward"
        if save_kv_cache:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        ragged = batch.forward_mode.is_draft_extend()
        rows = self._pad(q, metadata) if ragged else q
        rows = rows.reshape(-1, metadata.width, *q.shape[1:])
        earlier = forward_number(batch)
        lens = metadata.seq_lens + earlier if earlier else metadata.seq_lens
        out = self._attend_pool(rows, metadata.block_tables, lens, layer)
        return self._unpad(out, q.shape[0], metadata) if ragged else out

    def _attend_pool(
        self, rows: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, layer: AttentionLayer
    ) -> torch.Tensor:
        """``rows`` [bs, width, H, 576] in the model's dtype -> [bs * width, H, 512]."""
        pool = self.context.kv_pool
        if pool.dtype.itemsize == 1:
            rows = rows.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        latent = pool.get_key_buffer(layer.layer_id).view(-1, 1, self.context.page_size, layer.head_dim)
        out = self._attend(rows.contiguous(), latent, block_tables, seq_lens, layer)
        return out.reshape(-1, layer.tp_q_head_num, layer.v_head_dim)

    def _attend(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        """``q`` [bs, width, H, 576], ``latent`` [pages, 1, P, 576], in the pool's dtype -> [bs, width, H, 512]."""
        out: torch.Tensor = self._kernel(
            query=q,
            kv_cache=latent,
            workspace_buffer=self._workspace,
            qk_nope_head_dim=_QK_NOPE_HEAD_DIM,
            kv_lora_rank=layer.kv_lora_rank,
            qk_rope_head_dim=layer.head_dim - layer.kv_lora_rank,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_seq_len=self.context.max_context_len,
            sparse_mla_top_k=layer.topk,
            bmm1_scale=layer.scaling * layer.k_scale,
            bmm2_scale=layer.k_scale,
            backend="trtllm-gen",
            multi_ctas_kv_counter_buffer=self._counters,
        )
        return out

    def _pad(self, q: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        """Packed rows [T, H, D] -> [bs, width, H, D], each request's at the end, other requests' before them."""
        place = torch.arange(metadata.width, device=q.device) - metadata.width
        return q[(metadata.ends[:, None] + place).clamp(0, q.shape[0] - 1)]

    def _unpad(self, out: torch.Tensor, rows: int, metadata: Metadata) -> torch.Tensor:
        """[bs * width, H, D] -> packed rows; those after the last request hold anything."""
        row = torch.arange(rows, device=out.device, dtype=torch.int32)
        request = torch.searchsorted(metadata.ends, row, right=True).clamp(max=metadata.ends.shape[0] - 1)
        from_end = metadata.ends[request] - row
        at = (request + 1) * metadata.width - from_end
        return out[at.clamp(0, out.shape[0] - 1)]
