"""KV splits for FlashInfer's wrappers: plans with pages of one key, which may list any keys.

Paged wrappers attend to whole pages, from a request's first page on. With pages of one slot, the same pool gives a
wrapper any set of keys. Visibility is then a custom mask; in decode and MLA it follows from the listed keys. Pages of
``hnd``, and pages with K and V in one block, cannot be split in this way: all keys are listed, and the mask selects
those of the split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from attn_testkit.contract import BackendContext, ForwardBatch, KVSplit

from .flashinfer_plan import PagePlan, exclusive_sum

_MOST_THREADS = 1024
"""Most threads of a block."""


def merged(
    merge: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashinfer.merge_state``, for as many heads at a time as one launch supports. A launch puts all heads of a row
    into one block, ``head_dim / max(16 bytes, head_dim / 32)`` threads each (``MergeState``, cascade.cuh): 128 heads of
    512 fail with "invalid argument".
    """
    heads, dim = out_a.shape[1:]
    threads = max(1, dim // max(16 // out_a.element_size(), dim // 32))
    at_once = max(1, _MOST_THREADS // threads)
    if heads <= at_once:
        out, lse = merge(out_a, lse_a, out_b, lse_b)
        return out, lse
    parts = [
        merge(*(each[:, first : first + at_once].contiguous() for each in (out_a, lse_a, out_b, lse_b)))
        for first in range(0, heads, at_once)
    ]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def by_slots(context: BackendContext) -> bool:
    """True if the pool can be seen as pages of one slot."""
    return context.page_size == 1 or context.kv_pool.layout == "nhd"


def masked_plan(plan: PagePlan, part: KVSplit, *, window: int = -1, causal: bool) -> PagePlan:
    """``plan`` of all keys, with a custom mask of the keys of a split that a row sees. Host work and a copy.
    ``causal``: the model's layers are causal.
    """
    masks: list[torch.Tensor] = []
    for kv_len, q_len in zip(plan.kv_lens.tolist(), plan.qo_indptr.diff().tolist(), strict=True):
        prefix, key = kv_len - q_len, torch.arange(kv_len)
        masks.append(
            (_seen(plan, key, prefix, q_len, window, causal) & part.holds(key, torch.tensor(prefix))).reshape(-1)
        )
    mask = torch.cat(masks).to(plan.kv_indices.device)
    return replace(plan, custom_mask=mask if plan.custom_mask is None else mask & plan.custom_mask)


def part_plan(
    context: BackendContext, batch: ForwardBatch, plan: PagePlan, part: KVSplit, *, window: int = -1, masked: bool
) -> PagePlan:
    """The plan of a part, in pages of one key. ``plan``: of all keys. Host work and copies.

    ``masked``: with a custom mask for causality, tree and window. Without a mask a row sees all keys that are listed
    for its request, except those after the row; keys outside ``window`` for the request's last row are not listed.
    """
    lists: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    kv_lens, q_lens = plan.kv_lens.tolist(), plan.qo_indptr.diff().tolist()
    start = 0
    for kv_len, q_len in zip(kv_lens, q_lens, strict=True):
        prefix, key = kv_len - q_len, torch.arange(kv_len)
        held = part.holds(key, torch.tensor(prefix))
        if window >= 0 and not masked:
            held &= key >= kv_len - 1 - window
        mine = key[held]
        lists.append(mine)
        row = torch.arange(q_len)[:, None]
        masks.append(_seen(plan, mine, prefix, q_len, window, context.causal).reshape(-1))
        # In the mask of all keys.
        places.append((start + row * kv_len + mine).reshape(-1))
        start += q_len * kv_len
    counts = torch.tensor([len(mine) for mine in lists])
    mask = torch.cat(masks).to(context.device) if masked else None
    if mask is not None and plan.custom_mask is not None:
        mask &= plan.custom_mask[torch.cat(places).to(context.device)]
    return PagePlan(
        qo_indptr=plan.qo_indptr,
        kv_lens=counts.to(torch.int32),
        kv_indptr=exclusive_sum(counts),
        # The value is 1 without a page, too: the package computes lengths of masks as if there were one page less.
        last_page_len=torch.ones(len(counts), dtype=torch.int32),
        # Never empty: the address of an empty tensor is 0.
        kv_indices=torch.nn.functional.pad(_slots(context, batch, lists), (0, 1)),
        custom_mask=mask,
        page_size=1,
    )


def _seen(plan: PagePlan, key: torch.Tensor, prefix: int, q_len: int, window: int, causal: bool) -> torch.Tensor:
    """[q_len, keys] bool: keys that a row sees by the window and, if ``causal`` and the plan has no mask, causality."""
    row = torch.arange(q_len)[:, None]
    seen = (key >= prefix + row - window) | (window < 0)
    return seen & (key <= prefix + row) if causal and plan.custom_mask is None else seen


def _slots(context: BackendContext, batch: ForwardBatch, keys: list[torch.Tensor]) -> torch.Tensor:
    """[n] int32, on the device: KV slots of the keys of each request; 0 for requests that the batch does not have."""
    request = torch.repeat_interleave(torch.arange(len(keys)), torch.tensor([len(mine) for mine in keys]))
    columns = context.req_to_token.shape[1]
    request, key = torch.stack([request, torch.cat(keys).clamp(max=columns - 1)]).to(context.device)
    rows = batch.req_pool_indices[: batch.batch_size].long()[request.clamp(max=batch.batch_size - 1)]
    return torch.where(request < batch.batch_size, context.req_to_token[rows, key], 0).to(torch.int32)
