"""Healthy MLA: one latent row for all heads."""

from __future__ import annotations

from typing import Any

import torch
from plain_backends import FP8, LOWEST, SPEC, Parts, Tiled, declared
from torch.nn.functional import pad

from attn_testkit.contract import Capabilities


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
