"""Healthy backends as plain_backends has them, for which keys come in parts, or new rows as they were given."""

from __future__ import annotations

import torch
from plain_backends import LOWEST, Tiled, declared

from attn_testkit.contract import LogSumExp


class WithKVSplits(Tiled):
    """Attention over a part of the keys, by a list of slots as a rank has it, with log-sum-exps, and the merge of the
    parts.
    """

    capabilities = declared(
        "decode",
        "extend",
        kv_pool={"page_sizes": {16}},
        lse=LogSumExp(base="e", whole={"decode", "extend"}, prefix={"extend"}, pages={"decode"}, merges=True),
    )

    def held(self, plan, place):
        return place < plan.part_lens[:, None]

    def run_return_lse(self, q, kv, plan):
        rows = self.rows_of(q, plan)
        place = torch.arange(plan.part_slots.shape[1], device=q.device)
        k, v = self.keys(kv, plan.part_slots.long()[rows.request], plan)
        heads = self.kv_head(plan.layer, q.device)
        k, v = k[:, :, heads], v[:, :, heads]
        seen = self.held(plan, place)[rows.request] & self.sees(plan.part_keys[rows.request], rows)
        scores = self.cap(self.scores(q, k, plan.layer), plan.layer)
        parts = self.parts(scores, seen, v, rows)
        out, lse = self.merge(parts, rows)
        empty = lse < LOWEST / 2
        return (out * plan.layer.v_scale).to(q.dtype), torch.where(empty, -torch.inf, lse)

    def sees(self, key, rows):
        return (key <= rows.position[:, None]) & (key >= self.window_start(rows)[:, None])

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        top = torch.maximum(lse_a, lse_b).clamp(min=LOWEST)
        a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
        total = (a + b).clamp(min=1e-38)
        out = (out_a.float() * a[..., None] + out_b.float() * b[..., None]) / total[..., None]
        lse = torch.where(a + b > 0, top + total.log(), -torch.inf)
        return out.to(out_a.dtype), lse


class RowsAsGiven(Tiled):
    """With an FP8 pool an extend attends its own rows as they were given."""

    capabilities = declared("extend", kv_pool={"kv_dtypes": {"fp8_e4m3"}}, precision={"new_rows_as_given": {"extend"}})

    def keys(self, kv, slots, plan):
        stored = [side.float() for side in super().keys(kv, slots, plan)]
        if plan.k is None:
            return tuple(stored)
        rows = self.rows_of(slots, plan)
        index = torch.arange(slots.shape[1], device=slots.device)
        new = self.is_given(index, rows)
        first = plan.cu_seqlens_q[rows.request].long()
        row = (first[:, None] + index - rows.prefix[:, None]).clamp(0, len(plan.k) - 1)
        given = (plan.k.float() / plan.layer.k_scale, plan.v.float() / plan.layer.v_scale)
        return tuple(torch.where(new[..., None, None], g[row], s) for g, s in zip(given, stored, strict=True))

    def is_given(self, index, rows):
        return index >= rows.prefix[:, None]


def share_of(scores, seen, v):
    """Output and log-sum-exp of those keys that are ``seen``; of none, zero and -inf."""
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    peak = scores.amax(-1).clamp(min=LOWEST)
    p = torch.exp(scores - peak[..., None])
    total = p.sum(-1)
    acc = torch.einsum("ths,tshd->thd", p, v.float().masked_fill(~seen[:, :, None, None], 0.0))
    lse = torch.where(total > 0, peak + total.clamp(min=1e-38).log(), -torch.inf)
    return acc / total.clamp(min=1e-38)[..., None], lse


class InChunks(Tiled):
    """The prefix in chunks of 64 keys, folded one after the other into a running result; then the new rows."""

    capabilities = declared("extend", heads={"head_dims": {64, 96, 192}})
    CHUNK = 64

    def run(self, q, kv, plan):
        scores, seen, v, rows = self.prepare(q, kv, plan)
        index = torch.arange(seen.shape[1], device=q.device)
        behind = index >= rows.prefix[:, None]
        running = None
        for first in range(0, seen.shape[1], self.CHUNK):
            here = (index >= first) & (index < first + self.CHUNK)
            chunk = share_of(scores, seen & ~behind & here, v)
            running = chunk if running is None else self.fold(running, chunk)
        new = share_of(scores, seen & behind, v)
        out, _ = self.join(running, new)
        return self.finish((out * plan.layer.v_scale).to(q.dtype), rows)

    def join(self, old, new):
        top = torch.maximum(old[1], new[1]).clamp(min=LOWEST)
        a, b = torch.exp(old[1] - top), torch.exp(new[1] - top)
        total = (a + b).clamp(min=1e-38)
        out = (old[0] * a[..., None] + new[0] * b[..., None]) / total[..., None]
        return out, torch.where(a + b > 0, top + total.log(), -torch.inf)

    def fold(self, running, chunk):
        return self.join(running, chunk)


class RowByRow(Tiled):
    """Products of each row are computed alone, so that its bits are a request's own."""

    TILE = 16
    capabilities = declared("decode", promises={"batch_invariant": True, "deterministic": True})

    def run(self, q, kv, plan):
        scores, seen, v, rows = self.prepare(q, kv, plan)
        each = (slice(row, row + 1) for row in range(len(q)))
        return torch.cat([self.alone(self.parts(scores[one], seen[one], v[one], rows)) for one in each]).to(q.dtype)

    def scores(self, q, k, layer):
        rows = [torch.einsum("thd,tshd->ths", q[r : r + 1].float(), k[r : r + 1].float()) for r in range(len(q))]
        return torch.cat(rows) * layer.scaling * layer.k_scale

    def alone(self, parts):
        top = parts.peak.amax(-1).clamp(min=-1e30)
        share = torch.exp(parts.peak - top[..., None])
        total = (share * parts.weight).sum(-1)
        return torch.einsum("thn,thnd->thd", share, parts.acc) / total.clamp(min=1e-38)[..., None]
