"""Healthy backends that bugs of the third set are put into, beside those of plain_backends."""

from __future__ import annotations

from typing import Any

import torch
from plain_backends import LOWEST, Parts, Planned, Tiled, declared
from torch.nn.functional import pad

from attn_testkit.contract import Capabilities

FP8 = {"same", "fp8_e4m3"}
SPEC = ("decode", "target-verify", "draft-extend-v2")


def wide_capabilities(*modes: str, **more: Any) -> Capabilities:
    """Two families, groups and head dims: cases of several shapes are tried."""
    few = {
        "heads": {"families": {"mha", "gqa"}, "gqa_ratios": {2, 4}, "head_dims": {64, 128}},
        "kv_pool": {"page_sizes": {1, 16}},
    }
    return declared(*modes).with_changes(**few).with_changes(**more)


def mla_capabilities(*modes: str, **more: Any) -> Capabilities:
    few = {
        "heads": {"families": {"mla"}, "gqa_ratios": {16}, "head_dims": {512}},
        "kv_pool": {"page_sizes": {1, 16, 64}},
    }
    return declared(*modes).with_changes(**few).with_changes(**more)


class Latent(Tiled):
    """MLA: one latent row for all heads."""

    capabilities = mla_capabilities(*SPEC, "extend", kv_pool={"kv_dtypes": FP8})

    def prepare(self, q, kv, plan):
        rows = self.rows_of(q, plan)
        slots = self.slots(plan)
        index = torch.arange(slots.shape[1], device=q.device)
        k, v = self.keys(kv, slots[self.table_row(rows)], plan)
        seen = self.visible(index, rows)
        scores = torch.einsum("thd,tsd->ths", self.query(q, plan).float(), k[:, :, 0].float())
        scores = self.cap(scores * plan.layer.scaling * plan.layer.k_scale, plan.layer)
        return scores, seen, v, rows

    def table_row(self, rows):
        return rows.request

    def run(self, q, kv, plan):
        # the value is the key's first columns: one scale
        scores, seen, v, rows = self.prepare(q, kv, plan)
        out, _ = self.merge(self.parts(scores, seen, v, rows), rows)
        return self.finish((out * plan.layer.k_scale).to(q.dtype), rows)

    def parts(self, scores, seen, v, rows):
        t, h, n = scores.shape
        more = -n % self.TILE
        scores = pad(scores.masked_fill(~seen[:, None], -torch.inf), (0, more), value=-torch.inf)
        scores = scores.view(t, h, -1, self.TILE)
        v = pad(v[:, :, 0].float().masked_fill(~seen[:, :, None], 0.0), (0, 0, 0, more))
        peak = scores.amax(-1)
        p = torch.exp(scores - peak.clamp(min=LOWEST)[..., None])
        return Parts(peak, p.sum(-1), torch.einsum("thns,tnsd->thnd", p, v.view(t, -1, self.TILE, v.shape[-1])))


class LatentLse(Latent):
    def run_return_lse(self, q, kv, plan):
        scores, seen, v, rows = self.prepare(q, kv, plan)
        parts = self.parts(scores, seen, v, rows)
        out, lse = self.merge(parts, rows)
        return (out * plan.layer.k_scale).to(q.dtype), self.given_lse(lse, parts)

    def given_lse(self, lse, parts):
        return lse


class Workspace(Tiled):
    """Partial results lie in memory that is kept and shared by layers; empty tiles are written as empty."""

    capabilities = declared("decode", "extend", windows={"decode", "extend"})

    def __init__(self, context):
        super().__init__(context)
        self.most = max(context.max_bs, context.max_num_tokens)
        heads = max(layer.tp_q_head_num for layer in context.layers)
        dim = max(layer.v_head_dim for layer in context.layers)
        width = -(-context.max_context_len // context.page_size) * context.page_size
        tiles = -(-width // self.TILE)
        few = {"device": context.device}
        self.peak = torch.full((self.most, heads, tiles), -torch.inf, **few)
        self.weight = torch.zeros((self.most, heads, tiles), **few)
        self.acc = torch.zeros((self.most, heads, tiles, dim), **few)

    def written(self, parts, rows):
        return torch.ones_like(parts.peak, dtype=torch.bool)

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        t, h, n = parts.peak.shape
        if t > self.most:
            return parts
        done = self.written(parts, rows)
        d = parts.acc.shape[-1]
        peak, weight, acc = self.peak[:t, :h, :n], self.weight[:t, :h, :n], self.acc[:t, :h, :n, :d]
        peak.copy_(torch.where(done, parts.peak, peak))
        weight.copy_(torch.where(done, parts.weight, weight))
        acc.copy_(torch.where(done[..., None], parts.acc, acc))
        return Parts(peak.clone(), weight.clone(), acc.clone())


class Owned(Planned):
    """Blocks find their request in a list of the plan; those behind the plan's own have -1 and do nothing."""

    nothing = -1
    capabilities = wide_capabilities("decode", graph=("decode",), needs={"cpu_seq_lens": True})

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.work = torch.full((max_bs,), self.nothing, dtype=torch.int64, device=self.context.device)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.owners = torch.arange(batch.batch_size, device=self.context.device)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.work[: batch.batch_size].copy_(torch.arange(batch.batch_size))
        self.clear(batch.batch_size)
        if in_capture:
            self.owners = self.work

    def clear(self, bs):
        self.work[bs:].fill_(self.nothing)

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        done = torch.empty(len(out) + 1, *out.shape[1:], dtype=out.dtype, device=out.device)
        for_row = torch.where(self.owners < 0, len(out), self.owners)
        done.index_put_((for_row,), out[self.owners.clamp(min=0)])
        return done[:-1]
