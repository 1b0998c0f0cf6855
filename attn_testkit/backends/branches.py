"""Draft-decode for kernels that process one row per request: each branch of a draft is a request to the kernel."""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, DraftDecodeInput, ForwardBatch


def kernel_requests(batch: ForwardBatch) -> int:
    """Number of the kernel's requests: the requests of the batch, or their branches."""
    return batch.batch_size * (batch.spec_info.topk if isinstance(batch.spec_info, DraftDecodeInput) else 1)


def forward_number(batch: ForwardBatch) -> int:
    """Number of the forward in a draft, from 0; 0 in every other mode."""
    return batch.spec_info.step if isinstance(batch.spec_info, DraftDecodeInput) else 0


def branch_slots(context: BackendContext, batch: ForwardBatch, keys: torch.Tensor) -> torch.Tensor:
    """[bs * K, n] int32: KV slots of the keys ``keys`` [n] int64 of each branch. Device work; may be captured."""
    spec, bs = batch.spec_info, batch.batch_size
    assert isinstance(spec, DraftDecodeInput)
    table = context.req_to_token[batch.req_pool_indices[:bs].long()]
    return spec.key_slots(table, batch.seq_lens[:bs], context.page_size, keys)
