"""Healthy ranks of context parallelism.

The rank attends the keys before the step (the context) in chunks, then those of the step, and folds the results. All
metadata are planned outside of graphs; graphs read them from buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from plain_backends import LOWEST, SMALLEST, declared
from torch.nn.functional import pad

from attn_testkit.contract import AttentionBackend, KVSplit, LogSumExp

MODES = ("decode", "extend", "target-verify", "draft-extend", "draft-extend-v2")

OF_RANKS = {
    "lse": LogSumExp(base="e", ranks=set(MODES)),
    "bounds": {"max_q_rows": 8, "max_topk": 1, "max_context_len": 1 << 13},
}

LATENT = {
    "heads": {"families": {"mla"}, "head_dims": {512}, "mla_rope_dims": {64}, "gqa_ratios": {8, 16}},
    "kv_pool": {"page_sizes": {1, 16, 64}},
}


@dataclass
class Plan:
    """Metadata of a step; B requests, C columns of the request table."""

    table: torch.Tensor
    """[B, C] slots of the rank."""
    starts: torch.Tensor
    """[B + 1] first row of each request."""
    prefix: torch.Tensor
    """[B] keys before the step, on all ranks."""
    local: torch.Tensor
    """[B] keys on the rank, those of the step included."""
    first: torch.Tensor
    """[B] number of the first key of the step among those of the rank."""
    context: torch.Tensor
    """[B] keys on the rank that are attended as context."""
    mask: torch.Tensor | None = None
    """[B, N, C] in a verify: True for keys of the rank that the row of a draft sees."""


@dataclass
class Rows:
    """Rows of a step: each one's request, its place among that request's rows, and its position."""

    request: torch.Tensor
    place: torch.Tensor
    position: torch.Tensor


class Rank(AttentionBackend):
    """One rank, or the only one."""

    CHUNK = 64
    capabilities = declared(*MODES, **OF_RANKS)
    buffers = None

    def __init__(self, context):
        super().__init__(context)
        alone = KVSplit("rank", rank=0, ranks=1, interleave=1)
        self.own = next((each for each in context.kv_splits if each.own_pool), alone)
        self.is_rank = self.own.ranks > 1
        self.columns = context.req_to_token.shape[1]

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        whole = {"dtype": torch.int64, "device": self.context.device}
        n = self.context.num_draft_tokens
        self.buffers = Plan(
            torch.zeros(max_bs, self.columns, **whole),
            torch.zeros(max_bs + 1, **whole),
            *(torch.zeros(max_bs, **whole) for _ in range(4)),
            torch.zeros(max_bs, n, self.columns, dtype=torch.bool, device=self.context.device),
        )

    def get_cuda_graph_seq_len_fill_value(self):
        return 0

    def init_forward_metadata(self, batch):
        self.mode = batch.forward_mode
        if batch.batch_size:
            self.plan = self.plan_of(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.mode = batch.forward_mode
        bound = self.bound(self.plan_of(batch))
        if in_capture:
            self.plan = bound

    def bound(self, plan):
        """The plan in buffers that graphs read."""
        return Plan(*(self.kept(each.name, getattr(plan, each.name)) for each in fields(Plan)))

    def kept(self, name, value):
        return None if value is None else getattr(self.buffers, name)[: len(value)].copy_(value)

    def counts(self, batch):
        """[B] rows of each request."""
        bs, mode, n = batch.batch_size, batch.forward_mode, self.context.num_draft_tokens
        if mode == "extend":
            return batch.extend_seq_lens[:bs].long()
        if mode == "draft-extend":
            return batch.spec_info.num_accept_tokens[:bs].long()
        return torch.full((bs,), 1 if mode == "decode" else n, device=batch.seq_lens.device)

    def plan_of(self, batch):
        bs, counts = batch.batch_size, self.counts(batch)
        lens = batch.seq_lens[:bs].long()
        if batch.forward_mode == "target-verify" and self.context.dialect.verify_lens == "prefix":
            lens = lens + counts
        prefix = (lens - counts).clamp(min=0)
        local = batch.dcp_local_seq_lens[:bs].long() if self.is_rank else lens
        first = self.own.lens(prefix, prefix)
        table = self.context.req_to_token[batch.req_pool_indices[:bs].long()].long()
        starts = pad(counts.cumsum(0), (1, 0))
        plan = Plan(table, starts, prefix, local, first, self.context_of(first, local))
        if batch.forward_mode == "target-verify":
            plan.mask = self.mask_of(plan)
        return plan

    def context_of(self, first, local):
        return first

    def mask_of(self, plan):
        bs, n = len(plan.local), self.context.num_draft_tokens
        request = torch.arange(bs, device=plan.local.device).repeat_interleave(n)
        place = torch.arange(n, device=plan.local.device).repeat(bs)
        bounds = self.bounds(Rows(request, place, plan.prefix[request] + place), plan)
        index = torch.arange(self.columns, device=bounds.device)
        return (index < bounds[:, None]).view(bs, n, -1)

    def bounds(self, rows, plan):
        """[T] keys of the rank up to the row's own position."""
        return self.own.lens(rows.position + 1, rows.position)

    def rows_of(self, q):
        plan = self.plan
        row = torch.arange(len(q), device=q.device)
        request = (torch.searchsorted(plan.starts, row, right=True) - 1).clamp(max=len(plan.local) - 1)
        place = row - plan.starts[request]
        return Rows(request, place, plan.prefix[request] + place)

    def slots(self, batch, rows):
        """[T] slot of each new row; -1 if another rank stores it."""
        return batch.out_cache_loc

    def query(self, q, batch):
        return q

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        return self.attend(q, k, v, layer, batch, save_kv_cache)[0]

    def forward_return_lse(self, q, k, v, layer, batch, save_kv_cache=True, *, part):
        return self.attend(q, k, v, layer, batch, save_kv_cache)

    def attend(self, q, k, v, layer, batch, save_kv_cache):
        if not batch.batch_size:
            return q.new_empty(0, layer.tp_q_head_num, layer.v_head_dim), q.new_empty(0, layer.tp_q_head_num)
        rows = self.rows_of(q)
        if save_kv_cache:
            self.context.kv_pool.set_kv_buffer(layer, self.slots(batch, rows).clamp(min=0), k, v)
        q = self.query(q, batch)
        folded = self.new_part(q, (k, v) if save_kv_cache else None, layer, rows)
        for chunk in range(-(-self.columns // self.CHUNK)):
            folded = self.fold(folded, self.context_part(q, layer, rows, chunk))
        return folded[0].to(q.dtype), folded[1]

    def context_part(self, q, layer, rows, chunk):
        index = torch.arange(chunk * self.CHUNK, (chunk + 1) * self.CHUNK, device=q.device)
        seen = self.sees_context(index.expand(len(q), -1), rows)
        return self.share(q, *self.stored(index.expand(len(q), -1), layer, rows), seen, layer)

    def sees_context(self, index, rows):
        return index < self.plan.context[rows.request][:, None]

    def new_part(self, q, given, layer, rows):
        index = self.plan.first[rows.request][:, None] + torch.arange(self.width(q), device=q.device)
        return self.share(q, *self.stored(index, layer, rows), self.sees_new(index, rows), layer)

    def width(self, q):
        """Most rows of a request in the step."""
        context = self.context
        widths = {"decode": 1, "extend": context.max_extend_tokens, "draft-extend": context.speculative_num_steps + 1}
        return min(widths.get(self.mode, context.num_draft_tokens), len(q))

    def sees_new(self, index, rows):
        plan = self.plan
        held = index < plan.local[rows.request][:, None]
        if self.mode != "target-verify":
            return held & (index < self.bounds(rows, plan)[:, None])
        if plan.mask is None:
            return held
        mask = plan.mask[rows.request, rows.place.clamp(max=plan.mask.shape[1] - 1)]
        return held & mask.gather(1, index.clamp(max=self.columns - 1))

    def stored(self, index, layer, rows):
        """K and V [T, keys, Hk, D] of the rank's keys ``index`` [T, keys]."""
        slots = self.plan.table[rows.request[:, None], index.clamp(max=self.columns - 1)]
        size = self.context.page_size
        return tuple(side[slots // size, slots % size] for side in self.context.kv_pool.get_kv_pages(layer.layer_id))

    def share(self, q, keys, values, seen, layer):
        """Output [T, Hq, Dv] and log-sum-exp [T, Hq] of the keys that are ``seen``; of none, zeros and -inf."""
        grouped = q.reshape(len(q), layer.tp_k_head_num, layer.q_per_kv, -1).float()
        scores = torch.einsum("thgd,tshd->thgs", grouped, keys.float()) * layer.scaling
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        peak = scores.amax(-1).clamp(min=LOWEST)
        p = torch.exp(scores - peak[..., None])
        total = p.sum(-1)
        acc = torch.einsum("thgs,tshd->thgd", p, values.float().masked_fill(~seen[..., None, None], 0.0))
        out = acc / total.clamp(min=SMALLEST)[..., None]
        return self.partial(out.flatten(1, 2), self.log_sum_exp(peak, total).flatten(1, 2))

    def log_sum_exp(self, peak, total):
        return torch.where(total > 0, peak + total.clamp(min=SMALLEST).log(), -torch.inf)

    def partial(self, out, lse):
        """The result of a chunk, as it is kept for the fold."""
        return out, lse

    def fold(self, one, other):
        top = torch.maximum(one[1], other[1]).clamp(min=LOWEST)
        a, b = torch.exp(one[1] - top), torch.exp(other[1] - top)
        total = (a + b).clamp(min=SMALLEST)
        out = (one[0] * a[..., None] + other[0] * b[..., None]) / total[..., None]
        return out, torch.where(a + b > 0, top + total.log(), -torch.inf)


class LatentRank(Rank):
    """A rank of MLA."""

    capabilities = declared(*MODES, **OF_RANKS).with_changes(**LATENT)


class GivenRank(Rank):
    """New rows are attended as they were given, and not as they are stored."""

    capabilities = declared(*MODES, **OF_RANKS, kv_pool={"kv_layouts": {"nhd", "hnd"}})

    def new_part(self, q, given, layer, rows):
        if given is None:
            return super().new_part(q, given, layer, rows)
        place = torch.arange(self.width(q), device=q.device)
        row = (self.plan.starts[rows.request][:, None] + place).clamp(max=len(q) - 1)
        key = self.plan.prefix[rows.request][:, None] + place
        seen = self.own.holds(key, torch.zeros_like(key)) & (key <= rows.position[:, None])
        keys, values = (self.as_given(side, layer)[row] for side in given)
        return self.share(q, keys, values, seen, layer)

    def as_given(self, side, layer):
        """New rows [T, Hk, D]."""
        return side
