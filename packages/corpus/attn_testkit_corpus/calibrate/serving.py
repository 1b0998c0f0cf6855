"""Snippets: changes that servers make to metadata, page tables, paged caches and masks inside a captured step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import DEVICE, Inputs
from .snippet import Snippet, named

PAGE = 4


def _indptr_in_place(e: Inputs) -> Tensor:
    torch.cumsum(e.seq, 0, dtype=torch.int32, out=e.indptr[1:])
    return e.indptr + 0


def _indptr_slice(e: Inputs) -> Tensor:
    e.indptr[1:5] = e.seq.cumsum(0)
    return e.indptr + 0


def _indptr_first_zero(e: Inputs) -> Tensor:
    out = torch.empty(5, dtype=torch.int32, device=DEVICE)
    out[0] = 0
    out[1:] = e.seq.cumsum(0)
    return out


def _indptr_first_zeroed(e: Inputs) -> Tensor:
    out = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    out[1:] = e.seq.cumsum(0)
    return out


def _cache_write_index_put(e: Inputs) -> Tensor:
    e.cache.view(-1, 2, 4)[e.slots] = e.new_rows
    return e.cache + 0


def _cache_write_index_copy(e: Inputs) -> Tensor:
    e.cache.view(-1, 2, 4).index_copy_(0, e.slots, e.new_rows)
    return e.cache + 0


def _cache_write_scatter(e: Inputs) -> Tensor:
    flat = e.cache.view(-1, 8)
    flat.scatter_(0, e.slots[:, None].expand(-1, 8), e.new_rows.view(4, 8))
    return e.cache + 0


def _cache_write_two_indices(e: Inputs) -> Tensor:
    e.cache[e.slots // PAGE, e.slots % PAGE] = e.new_rows
    return e.cache + 0


def _cache_write_fp8(e: Inputs) -> Tensor:
    pool = torch.zeros(32, 2, 4, device=DEVICE, dtype=torch.float8_e4m3fn)
    pool.view(torch.uint8).index_copy_(0, e.slots, e.new_rows.to(torch.float8_e4m3fn).view(torch.uint8))
    return pool.to(torch.float32)


def _gather_pages(e: Inputs) -> Tensor:
    return e.cache[e.table.long()].flatten(1, 2)


def _weighted_lookup(e: Inputs) -> Tensor:
    keys = _gather_pages(e)
    scores = torch.einsum("bhd,bkhd->bhk", e.new_rows, keys) * 0.5
    beyond = torch.arange(keys.shape[1], device=DEVICE)[None] >= e.seq[:, None]
    return torch.einsum("bhk,bkhd->bhd", scores.masked_fill(beyond[:, None], float("-inf")).softmax(-1), keys)


def _table_from_slots(e: Inputs) -> Tensor:
    req_to_token = torch.arange(48, device=DEVICE, dtype=torch.int32).view(4, 12)
    return torch.div(req_to_token[e.req][:, ::PAGE], PAGE, rounding_mode="floor")


def _table_write_tail(e: Inputs) -> Tensor:
    table = torch.full((4, 6), -1, dtype=torch.int32, device=DEVICE)
    table[:, :3].copy_(e.table)
    table[:, 3:].fill_(0)
    return table


def _table_strided_write(e: Inputs) -> Tensor:
    wide = torch.zeros(4, 6, dtype=torch.int32, device=DEVICE)
    wide[:, ::2] = e.table
    return wide


def _table_live_width(e: Inputs) -> Tensor:
    return e.table[:, : int(e.seq.max())] + 0


def _slots_static(e: Inputs) -> Tensor:
    positions = torch.arange(12, device=DEVICE)
    pages = e.table[:, positions // PAGE]
    return torch.where(positions[None] < e.seq[:, None], pages * PAGE + positions % PAGE, 0)


def _slots_ragged(e: Inputs) -> Tensor:
    return torch.cat([row[: int(n)] for row, n in zip(e.table, e.seq, strict=True)])


def _row_to_request(e: Inputs) -> Tensor:
    ends = e.len.cumsum(0)
    return torch.searchsorted(ends, torch.arange(8, device=DEVICE), right=True)


def _row_to_request_repeat(e: Inputs) -> Tensor:
    return torch.repeat_interleave(torch.arange(4, device=DEVICE), e.len, output_size=8)


def _positions_ragged(e: Inputs) -> Tensor:
    starts = F.pad(e.len.cumsum(0)[:-1], (1, 0))
    row = torch.repeat_interleave(torch.arange(4, device=DEVICE), e.len, output_size=8)
    return torch.arange(8, device=DEVICE) - starts[row]


def _last_page_len(e: Inputs) -> Tensor:
    return torch.where(e.seq % PAGE == 0, PAGE, e.seq % PAGE)


def _last_page_len_clamped(e: Inputs) -> Tensor:
    return (e.seq - 1) % PAGE + 1


def _pack_bits(e: Inputs) -> Tensor:
    bits = e.pair_mask.view(2, 8).to(torch.uint8)
    weights = 2 ** torch.arange(8, device=DEVICE, dtype=torch.uint8)
    return (bits * weights).sum(-1, dtype=torch.int32)


def _tree_mask(e: Inputs) -> Tensor:
    out = torch.ones(4, 12, dtype=torch.bool, device=DEVICE)
    out[:, 8:] = torch.tril(torch.ones(4, 4, dtype=torch.bool, device=DEVICE))
    return out & (torch.arange(12, device=DEVICE) < e.seq[:, None] + 4)


def _causal_mask(e: Inputs) -> Tensor:
    rows = e.seq[:, None] - 2 + torch.arange(2, device=DEVICE)
    keys = torch.arange(12, device=DEVICE)
    return keys[None, None] <= rows[:, :, None]


def _sliding_window(e: Inputs) -> Tensor:
    keys = torch.arange(12, device=DEVICE)[None]
    return (keys < e.seq[:, None]) & (keys >= (e.seq - 3).clamp(min=0)[:, None])


def _accepted_last_rows(e: Inputs) -> Tensor:
    return e.x[e.len.cumsum(0) - 1]


def _select_index(e: Inputs) -> Tensor:
    return e.x[torch.arange(4, device=DEVICE) * 2 + (e.len - 1).clamp(max=1)]


def _greedy_accept(e: Inputs) -> Tensor:
    hits = (e.m.view(4, 8).argmax(-1)[:, None] == torch.arange(4, device=DEVICE)).int()
    return hits.cumprod(-1).sum(-1)


def _workspace_views(e: Inputs) -> Tensor:
    floats = e.workspace[:32].view(torch.float32)
    ints = e.workspace[32:48].view(torch.int32)
    floats.copy_(e.x)
    ints.copy_(e.seq)
    return floats + ints.sum()


def _workspace_zero_counters(e: Inputs) -> Tensor:
    e.workspace[:8].zero_()
    e.workspace[:8].add_(e.mask)
    return e.workspace[:8].int()


def _split_merge(e: Inputs) -> Tensor:
    lse = torch.logsumexp(e.m.view(2, 2, 8), -1)
    weight = torch.softmax(lse, 1)
    return (weight[..., None] * e.m.view(2, 2, 8)).sum(1)


def _plan_from_pinned(e: Inputs) -> Tensor:
    e.seq.copy_(e.p_len, non_blocking=True)
    return e.seq.cumsum(0)


def _plan_from_pinned_temporary(e: Inputs) -> Tensor:
    plan = torch.tensor([e.py, 1, 2, 3], dtype=torch.int32).pin_memory()
    e.seq.copy_(plan, non_blocking=True)
    return e.seq + 0


def _plan_host_loop(e: Inputs) -> Tensor:
    out = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    for row, length in enumerate(e.h_len.tolist()):
        out[row + 1] = out[row] + length
    return out


def _host_max_baked(e: Inputs) -> Tensor:
    return _slots_static(e)[:, : int(e.h_len.max())] + 0


def _branch_on_host(e: Inputs) -> Tensor:
    return e.x + 1 if int(e.h_len[0]) < 2 else e.x - 1


def _branch_on_capturing(e: Inputs) -> Tensor:
    return e.x[:4] + 0 if torch.cuda.is_current_stream_capturing() else e.x[:4] * 1


def _scatter_padded_q(e: Inputs) -> Tensor:
    padded = torch.zeros(4, 4, device=DEVICE)
    row = torch.repeat_interleave(torch.arange(4, device=DEVICE), e.len, output_size=8)
    padded[row, _positions_ragged(e)] = e.x
    return padded


def _moe_like_sort(e: Inputs) -> Tensor:
    order = e.idx.argsort(stable=True)
    return e.m[order % 4].cumsum(0)


def _rope(e: Inputs) -> Tensor:
    angles = e.seq[:, None].float() * (10000 ** (-torch.arange(4, device=DEVICE) / 4))
    a, b = e.m.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def _fp8_scale(e: Inputs) -> Tensor:
    scale = e.m.abs().amax() / 448
    return (e.m / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale


def _fp8_scale_item(e: Inputs) -> Tensor:
    scale = float(e.m.abs().amax()) / 448
    return (e.m / scale).to(torch.float8_e4m3fn).to(torch.float32)


SNIPPETS: tuple[Snippet, ...] = named(
    {
        "indptr: cumsum out=": _indptr_in_place,
        "indptr: slice assign": _indptr_slice,
        "indptr: out[0]=0": _indptr_first_zero,
        "indptr: zeros + slice": _indptr_first_zeroed,
        "indptr: pad": lambda e: F.pad(torch.cumsum(e.seq, 0, dtype=torch.int32), (1, 0)),
        "indptr: cat zeros": lambda e: torch.cat([torch.zeros(1, dtype=torch.int64, device=DEVICE), e.seq.cumsum(0)]),
        "indptr: cat [0] list": lambda e: torch.cat([torch.tensor([0], device=DEVICE), e.seq.cumsum(0)]),
        "indptr: arange stride": lambda e: torch.arange(0, 10, 2, device=DEVICE, dtype=torch.int32) + e.indptr,
        "indptr: arange(0, n*step, step) py": lambda e: torch.arange(0, 5 * e.py, e.py, device=DEVICE)[:4] + e.seq,
        "kv write: index_put": _cache_write_index_put,
        "kv write: index_copy_": _cache_write_index_copy,
        "kv write: scatter_": _cache_write_scatter,
        "kv write: page,offset": _cache_write_two_indices,
        "kv write: fp8 bytes": _cache_write_fp8,
        "kv gather: pages": _gather_pages,
        "kv gather: slots": lambda e: e.cache.view(-1, 2, 4)[_slots_static(e).long()],
        "kv gather: index_select": lambda e: e.cache.index_select(0, e.table.flatten()),
        "paged attention": _weighted_lookup,
        "table: from slots": _table_from_slots,
        "table: write + tail": _table_write_tail,
        "table: strided write": _table_strided_write,
        "table: live width": _table_live_width,
        "table: index_select rows": lambda e: e.table.index_select(0, e.req),
        "table: gather page": lambda e: e.table.gather(1, ((e.seq - 1) // PAGE)[:, None].long()),
        "kv indices: static": _slots_static,
        "kv indices: ragged": _slots_ragged,
        "kv indices: masked_select": lambda e: e.table.masked_select(e.table > 0),
        "rows: searchsorted": _row_to_request,
        "rows: repeat_interleave": lambda e: torch.repeat_interleave(torch.arange(4, device=DEVICE), e.len),
        "rows: repeat_interleave(size)": _row_to_request_repeat,
        "rows: bucketize": lambda e: torch.bucketize(torch.arange(8, device=DEVICE), e.len.cumsum(0), right=True),
        "positions: ragged": _positions_ragged,
        "positions: clamp": lambda e: (e.seq - 1).clamp(min=0),
        "last page len: where": _last_page_len,
        "last page len: modulo": _last_page_len_clamped,
        "num pages: ceil": lambda e: (e.seq + PAGE - 1) // PAGE,
        "num pages: torch.ceil": lambda e: torch.ceil(e.seq / PAGE).int(),
        "mask: pack bits": _pack_bits,
        "mask: tree": _tree_mask,
        "mask: causal": _causal_mask,
        "mask: window": _sliding_window,
        "mask: -inf triu": lambda e: torch.triu(torch.full((4, 4), float("-inf"), device=DEVICE), 1) + e.m[:, :4],
        "mask: where py inf": lambda e: torch.where(e.pair_mask, 0.0, float("-inf")),
        "accepted: last rows": _accepted_last_rows,
        "accepted: select index": _select_index,
        "accepted: greedy": _greedy_accept,
        "accepted: packed rows by mask": lambda e: e.m[e.len > 1],
        "workspace: views": _workspace_views,
        "workspace: zero counters": _workspace_zero_counters,
        "split merge": _split_merge,
        "plan: from pinned": _plan_from_pinned,
        "plan: from pinned temporary": _plan_from_pinned_temporary,
        "plan: host loop": _plan_host_loop,
        "plan: host max baked": _host_max_baked,
        "plan: branch on host": _branch_on_host,
        "plan: branch on capturing": _branch_on_capturing,
        "plan: max_seq_len py": lambda e: e.table[:, : e.py // 2 + 1] + 0,
        "plan: seq.max() kept": lambda e: (torch.arange(12, device=DEVICE) < e.seq.max()).int(),
        "plan: seq.sum().item()": lambda e: torch.zeros(int(e.seq.sum()), device=DEVICE),
        "plan: len(list)": lambda e: e.x[: len([1, 2, 3])] + 0,
        "q: scatter padded": _scatter_padded_q,
        "q: sort by expert": _moe_like_sort,
        "q: rope": _rope,
        "fp8: dynamic scale": _fp8_scale,
        "fp8: scale item": _fp8_scale_item,
        "topk_p: softmax+topk": lambda e: torch.topk(e.m.softmax(-1), 2)[0],
        "topk: parents gather": lambda e: e.m.gather(1, e.m.topk(2)[1]).flatten() + 0,
        "logits: index last": lambda e: e.m.index_select(0, (e.len - 1)),
        "sampling: argmax": lambda e: e.m.argmax(-1).to(torch.int32),
        "sampling: cumsum top-p": lambda e: (e.m.softmax(-1).sort(descending=True)[0].cumsum(-1) < 0.9).int(),
        "lens: += 1 in place": lambda e: (e.indptr.copy_(F.pad(e.seq, (1, 0))), e.indptr.add_(1))[1] + 0,
        "lens: copy_ int64 to int32": lambda e: e.seq.copy_(e.len) + 0,
        "lens: where inactive": lambda e: torch.where(e.seq > 2, e.seq, torch.ones_like(e.seq)),
        "lens: where inactive py": lambda e: torch.where(e.seq > 2, e.seq, 1),
        "lens: where inactive tensor(1)": lambda e: torch.where(e.seq > 2, e.seq, torch.tensor(1)),
    }
)
