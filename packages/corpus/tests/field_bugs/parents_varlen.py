"""Varlen style: ``cu_seqlens_q``, lengths and a padded table of pages, in buffers that graphs keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from plain_backends import FP8, LOWEST, SMALLEST, declared
from torch.nn.functional import pad

from attn_testkit.contract import AttentionBackend

MODES = ("decode", "extend", "target-verify", "draft-extend", "draft-extend-v2")


@dataclass
class Meta:
    cu: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    extends: bool = False


def slices(rows, keys):
    """Of ``rows`` rows, so many at a time that memory for ``keys`` keys of each is small."""
    step = max(1, (1 << 17) // keys)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def attend_rows(q, k, v, seen, layer, of_fp8):
    """Q [T, H, D], K and V [T, S, KV heads, D], ``seen`` [T, S]; the output [T, H, D] is fp32."""
    t, h, d = q.shape
    group = layer.q_per_kv
    scores = torch.einsum("tkgd,tskd->tkgs", q.float().reshape(t, h // group, group, d), k.float())
    scores = scores * layer.scaling * (layer.k_scale if of_fp8 else 1.0)
    if layer.logit_cap:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    sinks = None if layer.sinks is None else layer.sinks.float().view(1, h // group, group)
    top = scores.amax(-1) if sinks is None else torch.maximum(scores.amax(-1), sinks)
    top = top.clamp(min=LOWEST)
    p = torch.exp(scores - top[..., None])
    total = p.sum(-1) if sinks is None else p.sum(-1) + torch.exp(sinks - top)
    v = v.float().masked_fill(~seen[:, :, None, None], 0.0)
    out = torch.einsum("tkgs,tskd->tkgd", p, v) / total.clamp(min=SMALLEST)[..., None]
    return (out * layer.v_scale if of_fp8 else out).reshape(t, h, -1)


class Varlen(AttentionBackend):
    capabilities = declared(
        *MODES,
        heads={"families": {"mha", "gqa", "mqa"}, "gqa_ratios": {1, 2, 4, 7}, "head_dims": {64, 96, 128}},
        precision={"dtypes": {"fp16", "bf16"}},
        kv_pool={"kv_dtypes": FP8, "page_sizes": {1, 16, 64}},
        bounds={"max_context_len": 4096},
        windows=MODES,
        options={"logit_cap": True, "sinks": True},
        server={
            "takes_empty_batches": True,
            "takes_more_rows": True,
            "padding_slots": {0},
            "takes_bare_chains": True,
            "padded_requests": {"rows", "nothing"},
            "verify_lens": {"prefix", "all"},
        },
    )

    def __init__(self, context):
        super().__init__(context)
        self.width = -(-context.max_context_len // context.page_size)
        self.graphs = {}

    def counts(self, batch):
        """New rows of each request."""
        bs, mode = batch.batch_size, batch.forward_mode
        if mode.is_draft_extend():
            return batch.spec_info.num_accept_tokens[:bs].to(torch.int32)
        if mode == "extend":
            return batch.extend_seq_lens[:bs].to(torch.int32)
        count = 1 if mode.is_decode() else self.context.num_draft_tokens
        return torch.full((bs,), count, dtype=torch.int32, device=self.context.device)

    def cu_seqlens(self, batch):
        if self.context.dialect.padded_requests == "nothing":
            return batch.query_start_loc[: batch.batch_size + 1].to(torch.int32)
        return pad(self.counts(batch).cumsum(0), (1, 0)).to(torch.int32)

    def kv_lens(self, batch, cu):
        lens = batch.seq_lens[: batch.batch_size].to(torch.int32)
        before = batch.forward_mode.is_target_verify() and self.context.dialect.verify_lens == "prefix"
        return lens + cu.diff() if before else lens

    def block_table(self, batch):
        size = self.context.page_size
        rows = self.context.req_to_token[batch.req_pool_indices[: batch.batch_size].long()]
        return (rows[:, ::size] // size).to(torch.int32)

    def init_forward_metadata(self, batch):
        if batch.batch_size:
            cu = self.cu_seqlens(batch)
            extends = batch.forward_mode == "extend"
            self.meta = Meta(cu, self.kv_lens(batch, cu), self.block_table(batch), extends)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        few = {"dtype": torch.int32, "device": self.context.device}
        self.kept = Meta(
            torch.zeros(max_bs + 1, **few), torch.zeros(max_bs, **few), torch.zeros(max_bs, self.width, **few)
        )

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        cu = self.cu_seqlens(batch)
        self.fill(cu, self.kv_lens(batch, cu), self.block_table(batch))
        key = (batch.forward_mode, batch.batch_size)
        if in_capture:
            self.graphs[key] = self.views(batch.batch_size, batch.forward_mode == "extend")
        self.meta = self.graphs[key]

    def fill(self, cu, lens, table):
        self.kept.cu[: len(cu)].copy_(cu)
        self.kept.lens[: len(lens)].copy_(lens)
        self.kept.table[: len(table), : table.shape[1]].copy_(table)

    def views(self, bs, extends):
        return Meta(self.kept.cu[: bs + 1], self.kept.lens[:bs], self.kept.table[:bs, : self.width], extends)

    def rows(self, count, meta):
        """Each row's request, its place among that request's rows, and its position."""
        row = torch.arange(count, device=meta.cu.device, dtype=torch.int32)
        request = (torch.searchsorted(meta.cu, row, right=True) - 1).clamp(0, len(meta.lens) - 1)
        place = row - meta.cu[request]
        position = meta.lens[request] - meta.cu.diff()[request] + place
        return request, place.long(), position.long()

    def pages(self, meta, request):
        return meta.table[request].long()

    def write(self, layer, batch, k, v):
        self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        out = torch.empty(len(q), layer.tp_q_head_num, layer.v_head_dim, dtype=q.dtype, device=q.device)
        if not batch.batch_size:
            return out[:0]
        if save_kv_cache:
            self.write(layer, batch, k, v)
        pool = self.context.kv_pool.get_kv_pages(layer.layer_id)
        request, _, position = self.rows(len(q), self.meta)
        for some in slices(len(q), self.context.max_context_len):
            pages = self.pages(self.meta, request[some])
            keys, values = (side[pages].flatten(1, 2) for side in pool)
            seen = self.seen(torch.arange(keys.shape[1], device=q.device), position[some, None], layer)
            out[some] = attend_rows(q[some], keys, values, seen, layer, pool[0].dtype.itemsize == 1).to(q.dtype)
        return out

    def seen(self, index, position, layer):
        seen = index <= position
        return seen & (index >= position - layer.sliding_window_size) if layer.sliding_window_size >= 0 else seen


VARLEN_EXTENDS = Varlen.capabilities.with_changes(
    eager={"extend"}, graph=(), windows=(),
    server={"verify_lens": {"prefix"}, "takes_bare_chains": False, "padded_requests": {"rows"}},
)  # fmt: skip


def varlen_of(*modes):
    """Of what ``Varlen`` declares, some modes."""
    few = set(modes)
    return Varlen.capabilities.with_changes(
        eager=few, graph=few, windows=few, server={"verify_lens": {"prefix"}, "takes_bare_chains": False}
    )
