"""Healthy backends that the bugs of this folder are put into: plain torch, in the parts that kernels have.

A method is a place where a kernel may go wrong; a bug replaces one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    Capabilities,
    ForwardBatch,
    KernelBackend,
    KernelPlan,
    LogSumExp,
)

LOWEST = -1e30
"""In place of minus infinity, where a difference of two of them would be NaN."""

SMALLEST = 1e-38

FP8 = {"same", "fp8_e4m3"}

SPEC = ("decode", "target-verify", "draft-extend-v2")

ONLY_FP8 = {"fp8_e4m3"}

DRAFT_EXTENDS = ("draft-extend", "draft-extend-v2")


def declared(*modes: str, **more: Any) -> Capabilities:
    """Little is declared: the modes, eager and with graphs, and what more a bug needs."""
    few = {
        "eager": modes,
        "graph": modes,
        "heads": {"families": {"gqa"}, "gqa_ratios": {2}, "head_dims": {64}},
        "precision": {"dtypes": {"bf16"}},
        "kv_pool": {"page_sizes": {1, 16}},
        "bounds": {"max_q_rows": 8, "max_topk": 1},
        "needs": {"cpu_seq_lens": False},
        "server": {"takes_strided_heads": True},
    }
    return Capabilities(**few).with_changes(**more)


@dataclass(frozen=True)
class Rows:
    """Query rows of a step: each one's request, its place among that request's rows, and its position."""

    plan: KernelPlan
    request: torch.Tensor
    place: torch.Tensor
    position: torch.Tensor

    @property
    def layer(self) -> AttentionLayer:
        return self.plan.layer

    @property
    def kv_lens(self) -> torch.Tensor:
        return self.plan.kv_lens[self.request].long()

    @property
    def new(self) -> torch.Tensor:
        """How many rows each row's request has."""
        return self.plan.cu_seqlens_q.diff()[self.request].long()

    @property
    def prefix(self) -> torch.Tensor:
        return self.plan.prefix_lens[self.request].long()


class Parts(NamedTuple):
    """Partial softmax of each tile of keys."""

    peak: torch.Tensor
    weight: torch.Tensor
    acc: torch.Tensor

    def and_also(self, peak: torch.Tensor, weight: torch.Tensor, acc: torch.Tensor | None = None) -> Parts:
        """With further parts, whose values are zero if none are given."""
        if acc is None:
            acc = torch.zeros_like(self.acc[:, :, : peak.shape[-1]])
        return Parts(
            torch.cat([self.peak, peak], -1), torch.cat([self.weight, weight], -1), torch.cat([self.acc, acc], 2)
        )


class Tiled(KernelBackend):
    """A partial softmax for each tile of keys; all are merged, with the sink."""

    TILE = 64
    capabilities = declared("decode", "extend")

    def rows_of(self, q, plan):
        row = torch.arange(len(q), device=q.device)
        request = (torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1).clamp(max=len(plan.kv_lens) - 1)
        place = row - plan.cu_seqlens_q[request]
        position = plan.kv_lens[request] - plan.cu_seqlens_q.diff()[request] + place
        return Rows(plan, request.long(), place.long(), position.long())

    def slots(self, plan):
        offset = torch.arange(plan.page_size, device=plan.page_table.device)
        return (plan.page_table.long()[:, :, None] * plan.page_size + offset).flatten(1)

    def keys(self, kv, slots, plan):
        return tuple(side[slots // plan.page_size, slots % plan.page_size] for side in kv)

    def kv_head(self, layer, device):
        return torch.arange(layer.tp_q_head_num, device=device) // layer.q_per_kv

    def query(self, q, plan):
        return q

    def scores(self, q, k, layer):
        return torch.einsum("thd,tshd->ths", q.float(), k.float()) * layer.scaling * layer.k_scale

    def cap(self, scores, layer):
        return layer.logit_cap * torch.tanh(scores / layer.logit_cap) if layer.logit_cap else scores

    def window_start(self, rows):
        if rows.layer.sliding_window_size < 0:
            return torch.zeros_like(rows.position)
        return rows.position - rows.layer.sliding_window_size

    def visible(self, index, rows):
        start, last = self.window_start(rows)[:, None], rows.position[:, None]
        seen = (index <= last) & (index >= start)
        mask = rows.plan.mask
        if mask is None:
            return seen
        n = mask.shape[1]
        base = (rows.position - rows.place)[:, None]
        inner = mask[rows.request, rows.place.clamp(max=n - 1)].gather(1, (index[None] - base).clamp(0, n - 1))
        return torch.where(index >= base, inner & (index < base + n), seen)

    def bias(self, index, rows):
        return None

    def parts(self, scores, seen, v, rows):
        t, h, n = scores.shape
        more = -n % self.TILE
        scores = pad(scores.masked_fill(~seen[:, None], -torch.inf), (0, more), value=-torch.inf)
        scores = scores.view(t, h, -1, self.TILE)
        v = pad(v.float().masked_fill(~seen[:, :, None, None], 0.0), (0, 0, 0, 0, 0, more))
        peak = scores.amax(-1)
        p = torch.exp(scores - peak.clamp(min=LOWEST)[..., None])
        return Parts(peak, p.sum(-1), self.weigh(p, v.view(t, -1, self.TILE, *v.shape[2:])))

    def weigh(self, p, v):
        return torch.einsum("thns,tnshd->thnd", p, v)

    def sink_of(self, rows):
        return rows.layer.sinks.float()[None].expand(len(rows.request), -1)

    def merge(self, parts, rows):
        sinks = rows.layer.sinks is not None
        top = parts.peak.amax(-1)
        if sinks:
            top = torch.maximum(top, self.sink_of(rows))
        top = top.clamp(min=LOWEST)
        share = torch.exp(parts.peak - top[..., None])
        total = (share * parts.weight).sum(-1)
        if sinks:
            total = total + torch.exp(self.sink_of(rows) - top)
        out = torch.einsum("thn,thnd->thd", share, parts.acc) / total.clamp(min=SMALLEST)[..., None]
        return out, top + total.log()

    def prepare(self, q, kv, plan):
        rows = self.rows_of(q, plan)
        slots = self.slots(plan)
        index = torch.arange(slots.shape[1], device=q.device)
        k, v = self.keys(kv, slots[rows.request], plan)
        heads = self.kv_head(plan.layer, q.device)
        k, v = k[:, :, heads], v[:, :, heads]
        seen = self.visible(index, rows)
        scores = self.cap(self.scores(self.query(q, plan), k, plan.layer), plan.layer)
        bias = self.bias(index, rows)
        if bias is not None:
            scores = scores + bias[:, None]
        return scores, seen, v, rows

    def run(self, q, kv, plan):
        scores, seen, v, rows = self.prepare(q, kv, plan)
        out, _ = self.merge(self.parts(scores, seen, v, rows), rows)
        return self.finish((out * plan.layer.v_scale).to(q.dtype), rows)

    def finish(self, out, rows):
        return out


class WithoutCausalMask(Tiled):
    """As a drafter that fills a block at once has it, where a layer asks for it."""

    def visible(self, index, rows):
        if rows.layer.causal:
            return super().visible(index, rows)
        return index < rows.kv_lens[:, None]


class TwoParts(Tiled):
    """The prefix, the new rows; merged by log-sum-exp."""

    def run(self, q, kv, plan):
        scores, seen, v, rows = self.prepare(q, kv, plan)
        behind = torch.arange(seen.shape[1], device=q.device) >= rows.prefix[:, None]
        new = self.part(scores, seen & behind, v, plan)
        old = self.part(scores, seen & ~behind, v, plan)
        return self.finish(self.merge_two(old, new).to(q.dtype), rows)

    def part(self, scores, seen, v, plan):
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        peak = scores.amax(-1).clamp(min=LOWEST)
        p = torch.exp(scores - peak[..., None])
        total = p.sum(-1)
        acc = torch.einsum("ths,tshd->thd", p, v.float().masked_fill(~seen[:, :, None, None], 0.0))
        return acc / total.clamp(min=SMALLEST)[..., None], self.log_sum_exp(peak, total, plan)

    def log_sum_exp(self, peak, total, plan):
        return torch.where(total > 0, peak + total.clamp(min=SMALLEST).log(), -torch.inf)

    def merge_two(self, old, new):
        top = torch.maximum(old[1], new[1])
        a, b = (torch.exp(lse - top)[..., None] for _, lse in (old, new))
        return (old[0] * a + new[0] * b) / (a + b)


class WithLse(Tiled):
    """The log-sum-exp is given out as well."""

    capabilities = declared("decode", "extend", lse=LogSumExp(base="e", whole={"decode", "extend"}))

    def run_return_lse(self, q, kv, plan):
        scores, seen, v, rows = self.prepare(q, kv, plan)
        parts = self.parts(scores, seen, v, rows)
        out, lse = self.merge(parts, rows)
        return out.to(q.dtype), self.given_lse(lse, parts)

    def given_lse(self, lse, parts):
        return lse


class Planned(AttentionBackend):
    """The whole interface: lists of pages, one behind the other, in buffers that graphs keep."""

    capabilities = declared("decode", graph=("decode",), needs={"cpu_seq_lens": True})

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        context = self.context
        pages = -(-context.max_context_len // context.page_size)
        few = {"dtype": torch.int32, "device": context.device}
        self.buffers = {
            "indptr": torch.zeros(max_bs + 1, **few),
            "indices": torch.zeros(max_bs * pages, **few),
            "lens": torch.ones(max_bs, **few),
        }

    def lists(self, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        context, bs = self.context, batch.batch_size
        table = context.req_to_token[batch.req_pool_indices[:bs].long()][:, :: context.page_size] // context.page_size
        counts = [-(-int(n) // context.page_size) for n in batch.seq_lens_cpu[:bs].tolist()]
        indices = torch.cat([table[i, :n] for i, n in enumerate(counts)]) if bs else table[:0, 0]
        lens = batch.seq_lens[:bs].to(torch.int32)
        indptr = pad(((lens + context.page_size - 1) // context.page_size).cumsum(0), (1, 0))
        return indptr.to(torch.int32), indices.to(torch.int32), lens

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if not batch.batch_size:
            return
        indptr, indices, lens = self.lists(batch)
        self.planned = {"indptr": indptr, "indices": indices, "lens": lens}
        self.longest = int(batch.seq_lens_cpu[: batch.batch_size].max())

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        bs, buffers = batch.batch_size, self.buffers
        indptr, indices, lens = self.lists(batch)
        self.bind(indptr, in_capture)
        buffers["indices"][: len(indices)].copy_(indices)
        buffers["lens"][:bs].copy_(lens)
        if in_capture:
            self.planned = {**buffers, "indptr": buffers["indptr"][: bs + 1], "lens": buffers["lens"][:bs]}
            self.longest = self.context.max_context_len

    def bind(self, indptr: torch.Tensor, in_capture: bool) -> None:
        self.buffers["indptr"][: len(indptr)].copy_(indptr)

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        context, plan = self.context, self.planned
        if save_kv_cache:
            context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        size = context.page_size
        index = torch.arange(-(-self.longest // size) * size, device=q.device)
        request = torch.arange(len(q), device=q.device).clamp(max=len(plan["lens"]) - 1)
        at = plan["indptr"][request].long()[:, None] + index // size
        page = plan["indices"][at.clamp(max=len(plan["indices"]) - 1)].long()
        heads = torch.arange(layer.tp_q_head_num, device=q.device) // layer.q_per_kv
        keys, values = (
            side[page, index % size][:, :, heads].float() for side in context.kv_pool.get_kv_pages(layer.layer_id)
        )
        seen = index < plan["lens"][request][:, None]
        scores = torch.einsum("thd,tshd->ths", q.float(), keys) * layer.scaling
        p = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("ths,tshd->thd", p, values.masked_fill(~seen[:, :, None, None], 0.0)).to(q.dtype)


def wide_capabilities(*modes: str, **more: Any) -> Capabilities:
    """Two families, groups and head dims: cases of several shapes are tried."""
    few = {
        "heads": {"families": {"mha", "gqa"}, "gqa_ratios": {2, 4}, "head_dims": {64, 128}},
        "kv_pool": {"page_sizes": {1, 16}},
    }
    return declared(*modes).with_changes(**few).with_changes(**more)
