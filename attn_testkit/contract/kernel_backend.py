"""The smaller interface, for authors of kernels: write ``run``, and the kit keeps the metadata.

The metadata are rebuilt on the device at the head of every step, from the batch's own tensors, so they are safe in a
CUDA graph by construction: fixed shapes, fixed addresses, no host lengths.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from .backend import AttentionBackend, BackendContext
from .batch import DraftExtendInput, ForwardBatch, TreeMaskMode, VerifyInput, VerifyMask
from .draft_decode import DraftDecodeInput
from .layer import AttentionLayer
from .modes import ForwardMode

__all__ = ["KernelBackend", "KernelPlan"]


@dataclass(frozen=True)
class KernelPlan:
    """What a kernel needs to know about one step. All tensors are on the device; their values are not known to Python.

    Query rows are packed: request i has rows ``cu_seqlens_q[i] .. cu_seqlens_q[i+1]``. Rows after the last offset are
    padding, and whatever is written there is ignored. In draft-decode each branch counts as a request of one row.
    """

    page_table: torch.Tensor
    """[bs, max_pages] int32. Entries past a request's pages are foreign page ids: bound every read by ``kv_lens``."""
    kv_lens: torch.Tensor
    """[bs] int32: keys of each request, this step's new ones included."""
    cu_seqlens_q: torch.Tensor
    """[bs + 1] int32: exclusive running sum of query rows."""
    max_q_len: int
    """Upper bound of the query rows of one request, which holds for every replay."""
    max_kv_len: int
    """Upper bound of ``kv_lens`` that holds for every replay."""
    page_size: int
    mask: torch.Tensor | None
    """[bs, N, N] bool in target-verify with trees: row t may see draft node c; the prefix is always visible.
    None: causal, aligned to the end: row j of n sees the first ``kv_len - n + j + 1`` keys."""
    layer: AttentionLayer
    """Scale, window, soft cap, sinks, FP8 scales."""


_Metadata = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor | None]
"""Page table, key lengths, query offsets, most rows of a request, mask: as in ``KernelPlan``."""


class KernelBackend(AttentionBackend):
    """An attention backend made from one kernel call. Subclasses give ``capabilities`` and ``run``."""

    @abstractmethod
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Attend over the paged KV memory; the new keys and values are already in it.

        ``q`` [T, Hq, D]; ``kv`` K [pages, page_size, Hk, D] and V [pages, page_size, Hk, Dv]. Returns [T, Hq, Dv].
        May run under capture: device work only.
        """

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        pages = -(-context.max_context_len // context.page_size)
        self._page_starts = torch.arange(pages, device=context.device) * context.page_size
        self._mask: VerifyMask | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Keep one mask buffer for all graphs; everything else is rebuilt inside them."""
        context = self.context
        if context.topk > 1:
            n = context.num_draft_tokens
            buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=context.device)
            self._mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The persistent draft-block mask, once graphs are in use."""
        return self._mask

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Rebuild page table, lengths and query offsets on the device."""
        context, bs, mode = self.context, batch.batch_size, batch.forward_mode
        rows = context.req_to_token[batch.req_pool_indices[:bs].long()]
        if mode.is_draft_decode():
            self._metadata = self._branches(batch, rows)
            return
        page_table = (rows[:, self._page_starts] // context.page_size).to(torch.int32)
        seq_lens = batch.seq_lens[:bs].to(torch.int32)
        mask: torch.Tensor | None = None
        width, counts = self._rows(batch)
        if counts is None:
            cu_seqlens_q = torch.arange(bs + 1, dtype=torch.int32, device=context.device) * width
        else:
            cu_seqlens_q = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        if mode.is_target_verify():
            seq_lens = seq_lens + width
            mask = self._draft_mask(batch, bs, width)
        self._metadata = (page_table, seq_lens, cu_seqlens_q, width, mask)

    def _branches(self, batch: ForwardBatch, rows: torch.Tensor) -> _Metadata:
        """Each branch as a request that decodes. ``rows`` [bs, max_context_len]: of ``req_to_token``."""
        spec, page = batch.spec_info, self.context.page_size
        assert isinstance(spec, DraftDecodeInput)
        seq_lens = batch.seq_lens[: len(rows)]
        page_table = (spec.key_slots(rows, seq_lens, page, self._page_starts) // page).to(torch.int32)
        kv_lens = (seq_lens + spec.step + 1).to(torch.int32).repeat_interleave(spec.topk)
        cu_seqlens_q = torch.arange(len(kv_lens) + 1, dtype=torch.int32, device=rows.device)
        return page_table, kv_lens, cu_seqlens_q, 1, None

    def _rows(self, batch: ForwardBatch) -> tuple[int, torch.Tensor | None]:
        """Most query rows of a request, and [bs] how many each has; None: all as many."""
        context, bs, mode = self.context, batch.batch_size, batch.forward_mode
        if mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            return min(context.max_extend_tokens, batch.input_ids.shape[0]), batch.extend_seq_lens[:bs]
        if mode is ForwardMode.DRAFT_EXTEND:
            assert isinstance(batch.spec_info, DraftExtendInput)
            return context.speculative_num_steps + 1, batch.spec_info.num_accept_tokens[:bs]
        return (context.num_draft_tokens if mode.is_target_verify() else batch.input_ids.shape[0] // bs), None

    def _draft_mask(self, batch: ForwardBatch, bs: int, n: int) -> torch.Tensor | None:
        spec = batch.spec_info
        assert isinstance(spec, VerifyInput)
        if self.context.topk <= 1 or spec.custom_mask is None:
            return None
        if spec.tree_mask_mode is TreeMaskMode.QLEN_ONLY:
            return spec.custom_mask.view(torch.bool)[: bs * n * n].view(bs, n, n)
        # FULL_MASK: request i's block starts at n * (sum of earlier prefixes) + n * n * i, and row t of it has
        # prefix + n columns; the draft block is its last n columns.
        prefix = batch.seq_lens[:bs]
        start = (prefix.cumsum(0) - prefix) * n + torch.arange(bs, device=prefix.device) * n * n
        node = torch.arange(n, device=prefix.device)
        at = start[:, None, None] + node[:, None] * (prefix[:, None, None] + n) + prefix[:, None, None] + node
        return spec.custom_mask.view(torch.bool)[at]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Store the new rows and call the kernel. Shapes as in ``AttentionBackend.forward``."""
        context = self.context
        if save_kv_cache:
            context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        page_table, kv_lens, cu_seqlens_q, width, mask = self._metadata
        key, value = context.kv_pool.get_kv_buffer(layer.layer_id)
        paged = (_in_pages(key, context.page_size), _in_pages(value, context.page_size))
        plan = KernelPlan(
            page_table, kv_lens, cu_seqlens_q, width, context.max_context_len, context.page_size, mask, layer
        )
        return self.run(q, paged, plan)


def _in_pages(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """[slots, H, D] -> [pages, page_size, H, D] without a copy; works for the strided value view of MLA too."""
    slot, head, dim = buffer.stride()
    return buffer.as_strided(
        (buffer.shape[0] // page_size, page_size, *buffer.shape[1:]), (page_size * slot, slot, head, dim)
    )
