"""Inputs of FlashInfer's plans, made from a batch: query offsets, page lists, lengths, tree mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attn_testkit.contract import BackendContext, DraftExtendInput, ForwardBatch, ForwardMode, VerifyInput

_WORKSPACE_BYTES = 128 << 20
_BESIDE_PARTIALS = 1 << 20
_MOST_TILE = 128
"""Packed rows (query rows times heads of a group) of the largest tile."""
_workspaces: dict[tuple[torch.device, bool], torch.Tensor] = {}


def workspace(device: torch.device, fake: bool, needed: int = 0) -> torch.Tensor:
    """The float workspace, one for all wrappers of a device and process, as in servers: [bytes] uint8.

    Scratch: a run leaves no state in it. ``needed``: bytes of partial outputs. A caller that needs more gets a larger
    one; wrappers that exist already keep theirs.
    """
    key, size = (device, fake), max(_WORKSPACE_BYTES, needed + _BESIDE_PARTIALS)
    size = size >> 7 if fake else size
    if key not in _workspaces or _workspaces[key].numel() < size:
        _workspaces[key] = torch.empty(size, dtype=torch.uint8, device=device)
    return _workspaces[key]


def bytes_of_partials(context: BackendContext) -> int:
    """Float32 outputs and statistics of split keys that a graph's plan reserves: FlashInfer's ``PrefillPlan``
    (scheduler.cuh) counts as many tiles of 128 packed rows as there can be, whatever the lengths.
    """
    most = 0
    for layer in context.layers:
        group = layer.tp_q_head_num // layer.tp_k_head_num
        tiles = -(-context.max_num_tokens * group // _MOST_TILE) + context.max_bs - 1
        rows = -(-tiles * _MOST_TILE // group)
        most = max(most, layer.tp_q_head_num * rows * (layer.v_head_dim + 1) * 4)
    return most


@dataclass(frozen=True)
class PagePlan:
    """One batch for a CSR kernel. All tensors are int32 and on the host, unless stated otherwise."""

    qo_indptr: torch.Tensor
    """[bs + 1]: first query row of each request."""
    kv_lens: torch.Tensor
    """[bs]: keys of each request, the new ones included; never fewer than its query rows."""
    kv_indptr: torch.Tensor
    """[bs + 1], in pages."""
    last_page_len: torch.Tensor
    """[bs], 1 .. page size."""
    kv_indices: torch.Tensor
    """[kv_indptr[-1]] page ids, on the device."""
    custom_mask: torch.Tensor | None
    """Flat bool on the device, one [q_len, kv_len] block per request; None: causal, aligned to the end."""
    page_size: int
    """Slots per page: the pool's, or 1."""
    other_indices: tuple[torch.Tensor, ...] = ()
    """Page ids like ``kv_indices``, for further KV groups."""

    def of_group(self, group: int) -> PagePlan:
        """Plan with the pages of a KV group."""
        return replace(self, kv_indices=self.other_indices[group - 1]) if group else self


def exclusive_sum(counts: torch.Tensor) -> torch.Tensor:
    """[n] -> [n + 1] int32: running sum, beginning with 0."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def pages_per_request(context: BackendContext) -> int:
    """Most pages of one request, drafts included."""
    rows = max(context.num_draft_tokens, context.speculative_num_steps + 1)
    return -(-(context.max_context_len + rows) // context.page_size)


def make_page_plan(context: BackendContext, batch: ForwardBatch) -> PagePlan:
    """Plan an eager batch, the dummy batch of a capture or the view of a replay. Host work and copies."""
    bs, mode = batch.batch_size, batch.forward_mode
    assert batch.seq_lens_cpu is not None
    seq_lens = batch.seq_lens_cpu[:bs].to(torch.int32)
    q_lens = _query_rows(batch, bs)
    kv_lens = seq_lens + q_lens if mode.is_target_verify() else seq_lens
    # A padded request of a draft-extend graph has the fill value of 1 key and a full row count. Its rows would see
    # nothing, which these kernels need not survive; it may as well read the dummy page.
    kv_lens = torch.maximum(kv_lens, q_lens)
    pages = -(-kv_lens // context.page_size)
    mask = _tree_mask(batch, q_lens, kv_lens) if mode.is_target_verify() else None
    indices, *others = (_page_ids(context, batch, pages, group.req_to_token) for group in context.groups)
    return PagePlan(
        qo_indptr=exclusive_sum(q_lens),
        kv_lens=kv_lens,
        kv_indptr=exclusive_sum(pages),
        last_page_len=kv_lens - (pages - 1) * context.page_size,
        kv_indices=indices,
        custom_mask=mask,
        page_size=context.page_size,
        other_indices=tuple(others),
    )


def filled_up(plan: PagePlan, rows: int, page_size: int) -> PagePlan:
    """``plan`` with one more request, which owns the query rows from the packed end to ``rows`` and reads page 0."""
    rest = torch.tensor([rows]) - plan.qo_indptr[-1:]
    kv_lens = rest.clamp(min=1)
    pages = -(-kv_lens // page_size)
    ends = torch.tensor([rows]), plan.kv_indptr[-1:] + pages
    return PagePlan(
        qo_indptr=torch.cat([plan.qo_indptr, ends[0]]).to(torch.int32),
        kv_lens=torch.cat([plan.kv_lens, kv_lens]).to(torch.int32),
        kv_indptr=torch.cat([plan.kv_indptr, ends[1]]).to(torch.int32),
        last_page_len=torch.cat([plan.last_page_len, kv_lens - (pages - 1) * page_size]).to(torch.int32),
        kv_indices=torch.nn.functional.pad(plan.kv_indices, (0, int(pages))),
        custom_mask=plan.custom_mask,
        page_size=page_size,
    )


def prefix_plan(whole: PagePlan, window: int) -> PagePlan:
    """Derive the plan of the keys before the step from the plan of all keys: it has the pages that the window reaches.
    With a window, a custom mask says which keys a row sees: the kernel counts ``window_left`` from the end of the given
    keys, and the rows come after that end.
    """
    size, q_lens = whole.page_size, whole.qo_indptr.diff()
    prefix = whole.kv_lens - q_lens
    first = torch.zeros_like(prefix) if window < 0 else (prefix - window).clamp(min=0) // size
    kv_lens = prefix - first * size
    pages = -(-kv_lens // size)
    request = torch.repeat_interleave(torch.arange(len(pages)), pages.long())
    kept = torch.arange(len(request)) + (whole.kv_indptr[:-1] + first - exclusive_sum(pages)[:-1])[request]
    mask = None
    if window >= 0:
        behind = zip(first.tolist(), prefix.tolist(), q_lens.tolist(), strict=True)
        blocks = [
            torch.arange(page * size, end) >= torch.arange(end, end + rows)[:, None] - window
            for page, end, rows in behind
        ]
        mask = torch.cat([block.reshape(-1) for block in blocks]).to(whole.kv_indices.device)
    return PagePlan(
        qo_indptr=whole.qo_indptr,
        kv_lens=kv_lens,
        kv_indptr=exclusive_sum(pages),
        # The page size if there is no page: the package computes lengths of masks as if there were one page less.
        last_page_len=kv_lens - (pages - 1) * size,
        kv_indices=whole.kv_indices[kept.to(whole.kv_indices.device)],
        custom_mask=mask,
        page_size=size,
    )


def _query_rows(batch: ForwardBatch, bs: int) -> torch.Tensor:
    spec, mode = batch.spec_info, batch.forward_mode
    if mode.is_decode():
        return torch.ones(bs, dtype=torch.int32)
    if isinstance(spec, VerifyInput):
        return torch.full((bs,), spec.draft_token_num, dtype=torch.int32)
    if mode is ForwardMode.EXTEND:
        counts = batch.extend_seq_lens_cpu
    else:
        assert isinstance(spec, DraftExtendInput)
        counts = spec.num_accept_tokens_cpu if mode is ForwardMode.DRAFT_EXTEND else spec.extend_seq_lens_cpu
    assert counts is not None
    return torch.tensor(counts[:bs], dtype=torch.int32)


def _page_ids(
    context: BackendContext, batch: ForwardBatch, pages: torch.Tensor, req_to_token: torch.Tensor
) -> torch.Tensor:
    bs, page_size = batch.batch_size, context.page_size
    request = torch.repeat_interleave(torch.arange(bs), pages.long())
    place = torch.arange(request.shape[0]) - exclusive_sum(pages)[request]
    request, place = torch.stack([request, place * page_size]).to(context.device)
    rows = batch.req_pool_indices[:bs].long()[request]
    slots = req_to_token[rows, place.clamp(max=req_to_token.shape[1] - 1)]
    return (slots // page_size).to(torch.int32)


def _tree_mask(batch: ForwardBatch, q_lens: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor | None:
    spec = batch.spec_info
    assert isinstance(spec, VerifyInput)
    if spec.custom_mask is None:
        return None
    # The mask ends with the last live request. Padded ones follow, and see everything.
    cells = int((q_lens * kv_lens).sum())
    mask = spec.custom_mask.view(torch.bool)[:cells]
    return torch.nn.functional.pad(mask, (0, cells - mask.shape[0]), value=True)
