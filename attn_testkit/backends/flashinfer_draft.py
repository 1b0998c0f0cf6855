"""Draft-decode for FlashInfer's wrappers: a plan for each forward, with a page list for each branch.

A branch shares no page with another branch from the copy of the prefix's last page on, so any page size and layout
works. SGLang's multi-step draft backend also has a wrapper for each forward.
"""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, DraftDecodeInput, ForwardBatch

from .branches import branch_slots
from .flashinfer_plan import PagePlan, exclusive_sum, make_page_plan, pages_per_request


def plans_of_forwards(context: BackendContext, batch: ForwardBatch) -> tuple[PagePlan, ...]:
    """Return the plan of each forward. Only a draft-decode has several; there each branch is a request with one query
    row.

    Host work and copies.
    """
    spec, bs, size = batch.spec_info, batch.batch_size, context.page_size
    if not isinstance(spec, DraftDecodeInput):
        return (make_page_plan(context, batch),)
    assert batch.seq_lens_cpu is not None
    prefix = batch.seq_lens_cpu[:bs].to(torch.int32).repeat_interleave(spec.topk)
    page_starts = torch.arange(pages_per_request(context), device=context.device) * size
    page_ids = branch_slots(context, batch, page_starts) // size
    return tuple(_plan(prefix + own, page_ids, size) for own in range(1, spec.num_steps))


def _plan(kv_lens: torch.Tensor, page_ids: torch.Tensor, page_size: int) -> PagePlan:
    """Make a plan. ``kv_lens`` [rows] int32, host; ``page_ids`` [rows, pages] on the device."""
    pages = -(-kv_lens // page_size)
    row = torch.repeat_interleave(torch.arange(len(pages)), pages.long())
    kv_indptr = exclusive_sum(pages)
    row, place = torch.stack([row, torch.arange(len(row)) - kv_indptr[row]]).to(page_ids.device)
    return PagePlan(
        qo_indptr=torch.arange(len(pages) + 1, dtype=torch.int32),
        kv_lens=kv_lens,
        kv_indptr=kv_indptr,
        last_page_len=kv_lens - (pages - 1) * page_size,
        kv_indices=page_ids[row, place].to(torch.int32),
        custom_mask=None,
        page_size=page_size,
    )
