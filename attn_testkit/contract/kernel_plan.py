"""Metadata that a kernel needs for one step. Tables that only some kernels need are built when they are first read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .draft_decode import DraftDecodeInput
from .kv_split import KVSplit
from .layer import AttentionLayer

__all__ = ["KernelPlan", "KernelStep"]


@dataclass(frozen=True, eq=False)
class KernelStep:
    """Metadata that layers of a KV group share in a step: see ``KernelPlan``. In draft-decode a branch is a request."""

    table: torch.Tensor
    """[requests, max_context_len] int32: rows of the request table; per request, not per branch."""
    kv_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_q_len: int
    mask: torch.Tensor | None
    page_size: int
    draft: DraftDecodeInput | None = None
    draft_prefixes: torch.Tensor | None = None
    """Draft-decode: [requests] int64, keys before the draft."""
    spans: torch.Tensor | None = None
    qq_bias: torch.Tensor | None = None
    cu_window_seqlens: torch.Tensor | None = None

    @cached_property
    def slot_table(self) -> torch.Tensor:
        """See ``KernelPlan``."""
        if self.draft is None:
            return self.table
        return self._slots(torch.arange(self.table.shape[1], device=self.table.device))

    @cached_property
    def page_table(self) -> torch.Tensor:
        """See ``KernelPlan``."""
        starts = torch.arange(0, self.table.shape[1], self.page_size, device=self.table.device)
        return (self._slots(starts) // self.page_size).to(torch.int32)

    @cached_property
    def prefix_lens(self) -> torch.Tensor:
        """See ``KernelPlan``."""
        # Padded requests of a draft-extend have fewer keys than rows.
        return (self.kv_lens - self.cu_seqlens_q.diff()).clamp(min=0).to(torch.int32)

    @cached_property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and slots of all keys."""
        return self._packed(self.kv_lens)

    @cached_property
    def prefixes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and slots of the keys before this step."""
        return self._packed(self.prefix_lens)

    def _slots(self, keys: torch.Tensor) -> torch.Tensor:
        """[bs, n] int32: slots of the keys ``keys`` [n] int64."""
        if self.draft is None or self.draft_prefixes is None:
            return self.table[:, keys]
        return self.draft.key_slots(self.table, self.draft_prefixes, self.page_size, keys)

    def _packed(self, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and slots of the first ``lens`` [bs] keys of each request, packed. Shapes do not depend on
        lengths."""
        ends, (bs, columns) = lens.long().cumsum(0), self.slot_table.shape
        indptr = torch.nn.functional.pad(ends, (1, 0))
        place = torch.arange(bs * columns, device=lens.device)
        request = torch.searchsorted(ends, place, right=True).clamp(max=bs - 1)
        key = (place - indptr[request]).clamp(max=columns - 1)
        slots = self.slot_table[request, key].long()
        return indptr.to(torch.int32), torch.where(place < ends[-1], slots, 0)


_WHOLE = KVSplit()


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """Metadata that a kernel needs for a layer of a step. Tensors are on the device, their values unknown to Python.

    Query rows are packed: request i has rows ``cu_seqlens_q[i] .. cu_seqlens_q[i+1]``. Rows after the last offset are
    padding, and their output is ignored. In draft-decode each branch counts as a request of one row.

    Kernels find keys by ``page_table``, by ``slot_table``, or by ``kv_indptr`` and ``kv_indices``. Each is made when it
    is first read, once for all layers of a KV group.
    """

    step: KernelStep
    """Metadata that all layers of the KV group share. Read its members through the plan."""
    layer: AttentionLayer
    """Scale, window, soft cap, sinks, FP8 scales."""
    out_cache_loc: torch.Tensor
    """[T] int64: KV slot of each row of this step; in a graph replay 0 for padding, and on a rank 0 for tokens of other
    ranks. In a cross-attention layer [E]: of each encoder token that the step stores. There ``k`` and ``v`` have E
    rows, ``kv_lens`` counts encoder keys, and ``save_kv_cache`` is False if there are none to store."""
    max_kv_len: int
    """Upper bound of ``kv_lens`` that holds for every replay."""
    save_kv_cache: bool = True
    """False: the pool holds the new keys and values already."""
    k: torch.Tensor | None = None
    """[T, Hk, D]: keys of this step's rows, in the model's dtype. None if ``save_kv_cache`` is False, except in an
    encoder-only layer, whose keys and values are these and no others."""
    v: torch.Tensor | None = None
    """[T, Hk, Dv]: values of this step's rows."""
    out: torch.Tensor | None = None
    """[T, Hq, Dv], contiguous: buffer for the output, if the caller gave one. If ``run`` returns a different tensor,
    the kit copies it into this buffer."""
    selected: torch.Tensor | None = None
    """[T, topk] int32: keys of each row, as ``Capabilities.sparse`` says; -1 means no key. [T, Hk, topk] if each KV
    head selects for itself. None if a row attends to all keys that it may see."""
    part: KVSplit = _WHOLE
    """KV split that ``run_return_lse`` attends to. Only the members ``part_...`` describe its keys; all others describe
    all keys."""

    @property
    def kv_lens(self) -> torch.Tensor:
        """[bs] int32: keys of each request, this step's new ones included.

        A padded request of a replay has 1 key (``get_cuda_graph_seq_len_fill_value``), in target-verify N more for its
        rows, and in draft-decode one for each forward so far. It has none if the server pads with nothing
        (``Dialect.padded_requests``). Its row of the table is row 0 or one that now belongs to another request, so a
        kernel may read it and must store nothing but in page 0.
        """
        return self.step.kv_lens

    @property
    def prefix_lens(self) -> torch.Tensor:
        """[bs] int32: keys of each request before this step."""
        return self.step.prefix_lens

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """[bs + 1] int32: exclusive running sum of query rows. Also known as qo_indptr."""
        return self.step.cu_seqlens_q

    @property
    def max_q_len(self) -> int:
        """Upper bound of the query rows of one request, which holds for every replay."""
        return self.step.max_q_len

    @property
    def mask(self) -> torch.Tensor | None:
        """[bs, N, N] bool in target-verify with trees: row t may see draft node c; the prefix is always visible.

        None: causal, aligned to the end: row j of n sees the first ``kv_len - n + j + 1`` keys; or all of them if
        ``layer.causal`` is False.
        """
        return self.step.mask

    @property
    def spans(self) -> torch.Tensor | None:
        """[bs, R, 2] int32: first and last position of each bidirectional span, (0, 0) after a request's last one
        (``ForwardBatch.mm_prefix_range_tensor``). None if the layer has no spans, or no request of an eager batch has.

        Row j of n has position ``kv_len - n + j``. If it is in a span, it also sees the later keys of that span.
        """
        return self.step.spans if self.layer.bidirectional_spans else None

    @property
    def qq_bias(self) -> torch.Tensor | None:
        """[T, W] float32: ``ForwardBatch.qq_bias``, bias of each row on the rows of its request; None without one."""
        return self.step.qq_bias

    @property
    def cu_window_seqlens(self) -> torch.Tensor | None:
        """[windows + 1] int32: ``ForwardBatch.cu_window_seqlens``. None if the rows of the layer see all of their
        sequence."""
        return self.step.cu_window_seqlens if self.layer.encoder_window else None

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.step.page_size

    @property
    def page_table(self) -> torch.Tensor:
        """[bs, max_pages] int32. Entries past a request's pages are foreign page ids: bound reads by ``kv_lens``."""
        return self.step.page_table

    @property
    def slot_table(self) -> torch.Tensor:
        """[bs, max_kv_len] int32: KV slot of each key. Entries past a request's keys are foreign slots."""
        return self.step.slot_table

    @property
    def kv_indptr(self) -> torch.Tensor:
        """[bs + 1] int32: offset of each request's slots in ``kv_indices``."""
        return self.step.keys[0]

    @property
    def kv_indices(self) -> torch.Tensor:
        """[bs * max_kv_len] int64: KV slots of all keys, packed; 0 after the last one."""
        return self.step.keys[1]

    @property
    def prefix_indptr(self) -> torch.Tensor:
        """[bs + 1] int32: offset of each request's slots in ``prefix_indices``."""
        return self.step.prefixes[0]

    @property
    def prefix_indices(self) -> torch.Tensor:
        """[bs * max_kv_len] int64: KV slots of the keys before this step, packed; 0 after the last one."""
        return self.step.prefixes[1]

    @property
    def part_lens(self) -> torch.Tensor:
        """[bs] int32: keys of each request in the KV split."""
        return self.part.lens(self.kv_lens, self.prefix_lens).to(torch.int32)

    @property
    def part_keys(self) -> torch.Tensor:
        """[bs, max_kv_len] int64: number, in its request, of each key of the split; past ``part_lens`` any key in
        range.

        Without a mask row j of n sees the keys up to ``kv_len - n + j``.
        """
        columns = self.slot_table.shape[1]
        index = torch.arange(columns, device=self.slot_table.device)
        return self.part.key(index, self.prefix_lens[:, None].long()).clamp(max=columns - 1)

    @property
    def part_slots(self) -> torch.Tensor:
        """[bs, max_kv_len] int32: KV slots of ``part_keys``. Past ``part_lens`` foreign slots, or those of no key."""
        # The request table of a rank with its own pool has only the keys of the rank.
        return self.slot_table if self.part.own_pool else self.slot_table.gather(1, self.part_keys)

    @property
    def part_pages(self) -> torch.Tensor:
        """[bs, max_pages] int32: the page table of a rank that has every R-th page, or that has a separate pool."""
        return self.part_slots[:, :: self.page_size] // self.page_size

    @property
    def k_scale(self) -> torch.Tensor:
        """[1] float32: ``layer.k_scale`` for kernels that read it on the device."""
        return torch.full((1,), self.layer.k_scale, dtype=torch.float32, device=self.step.table.device)

    @property
    def v_scale(self) -> torch.Tensor:
        """[1] float32: ``layer.v_scale`` for kernels that read it on the device."""
        return torch.full((1,), self.layer.v_scale, dtype=torch.float32, device=self.step.table.device)
