"""Persistent scheduling: a list of work items (request, first key, end), made on the host, for all keys or a rank's."""

from __future__ import annotations

import math

import torch
from plain_backends import FP8, LOWEST, SMALLEST, declared

from attn_testkit.contract import AttentionBackend, LogSumExp

DECODE = ("decode",)

LOG2E = math.log2(math.e)


class WorkList(AttentionBackend):
    """Decode alone, with a log-sum-exp of base 2."""

    CHUNK = 64
    capabilities = declared(
        *DECODE,
        heads={"families": {"mha", "gqa", "mqa"}, "gqa_ratios": {1, 2, 5, 8, 16}, "head_dims": {64, 128, 192}},
        kv_pool={"kv_dtypes": FP8, "page_sizes": {1, 16, 32}},
        bounds={"max_context_len": 4096},
        windows=DECODE,
        options={"logit_cap": True, "sinks": True},
        needs={"cpu_seq_lens": True},
        server={"padded_requests": {"rows", "nothing"}, "takes_empty_batches": True},
        lse=LogSumExp(base="2", whole=DECODE, pages=DECODE, tokens=DECODE, merges=True),
    )

    def __init__(self, context):
        super().__init__(context)
        self.parts = context.kv_splits or (None,)

    def part_len(self, part, keys):
        return int(part.lens(torch.tensor([keys]), torch.tensor([max(keys - 1, 0)]))) if part else keys

    def items(self, lens):
        """A request without keys has none."""
        return [(r, a, min(a + self.CHUNK, n)) for r, n in enumerate(lens) for a in range(0, n, self.CHUNK)]

    def plan(self, batch):
        """[items, 3] for each part."""
        keys = [int(n) for n in batch.seq_lens_cpu[: batch.batch_size]]
        items = (self.items([self.part_len(part, n) for n in keys]) for part in self.parts)
        return [torch.tensor(each, dtype=torch.int32).view(-1, 3) for each in items]

    def init_forward_metadata(self, batch):
        bs = batch.batch_size
        if bs:
            self.work = [items.to(self.context.device) for items in self.plan(batch)]
            self.table = self.context.req_to_token[batch.req_pool_indices[:bs].long()]
            self.lens = batch.seq_lens[:bs].to(torch.int32)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        longest = self.context.max_context_len
        few = {"dtype": torch.int32, "device": self.context.device}
        self.kept_work = torch.zeros(len(self.parts), max_bs * -(-longest // self.CHUNK), 3, **few)
        self.kept_table = torch.zeros(max_bs, longest, **few)
        self.kept_lens = torch.zeros(max_bs, **few)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        bs = batch.batch_size
        for kept, items in zip(self.kept_work, self.plan(batch), strict=True):
            kept.zero_()  # items of no keys
            kept[: len(items)].copy_(items)
        self.kept_table[:bs].copy_(self.context.req_to_token[batch.req_pool_indices[:bs].long()])
        self.kept_lens[:bs].copy_(batch.seq_lens[:bs])
        most = bs * -(-self.context.max_context_len // self.CHUNK)
        self.work = list(self.kept_work[:, :most])
        self.table, self.lens = self.kept_table[:bs], self.kept_lens[:bs]

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        return self.attend(q, k, v, layer, batch, save_kv_cache, None, layer.sinks)[0]

    def forward_return_lse(self, q, k, v, layer, batch, save_kv_cache=True, *, part):
        return self.attend(q, k, v, layer, batch, save_kv_cache, part, layer.sinks if part.sinks else None)

    def attend(self, q, k, v, layer, batch, save_kv_cache, part, sinks):
        t, h = len(q), layer.tp_q_head_num
        few = {"dtype": torch.float32, "device": q.device}
        if not batch.batch_size:
            return q.new_empty(0, h, layer.v_head_dim), torch.empty(0, h, **few)
        pool = self.context.kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        of_fp8 = pool.dtype.itemsize == 1
        work = self.work[0 if part is None else self.parts.index(part)].long()
        out, total = torch.zeros(t, h, layer.v_head_dim, **few), torch.zeros(t, h, **few)
        top = torch.full((t, h), LOWEST, **few)
        if sinks is not None:
            top = torch.maximum(top, sinks.float() * LOG2E)
        done = [self.run_items(q, some, layer, part, of_fp8) for some in work.split(512)]
        request, outs, lses = work[:, 0], *(torch.cat(each) for each in zip(*done, strict=True))
        top = top.scatter_reduce(0, request[:, None].expand(-1, h), lses, "amax")
        weight = torch.exp2(lses - top[request])
        total.index_add_(0, request, weight)
        out.index_add_(0, request, outs * weight[..., None])
        if sinks is not None:
            total = total + torch.exp2(sinks.float() * LOG2E - top)
        out = out / total.clamp(min=SMALLEST)[..., None] * (layer.v_scale if of_fp8 else 1.0)
        return out.to(q.dtype), self.log_of(top, total)

    def log_of(self, top, total):
        return torch.where(total > 0, top + torch.log2(total.clamp(min=SMALLEST)), -torch.inf)

    def is_own(self, nth, end, key, lens):
        return (nth < end) & (key < lens)

    def run_items(self, q, items, layer, part, of_fp8):
        """Output and log-sum-exp of each item."""
        request, first, end = items.unbind(1)
        nth = first[:, None] + torch.arange(self.CHUNK, device=q.device)
        lens = self.lens[request].long()[:, None]
        prefix = (lens - 1).clamp(min=0)
        key = (part.key(nth, prefix) if part else nth).clamp(max=self.table.shape[1] - 1)
        own = self.is_own(nth, end[:, None], key, lens)
        if layer.sliding_window_size >= 0:
            own = own & (key >= prefix - layer.sliding_window_size)
        slot, size = self.table[request].gather(1, key).long(), self.context.page_size
        k, v = (side[slot // size, slot % size] for side in self.context.kv_pool.get_kv_pages(layer.layer_id))
        h, group = layer.tp_q_head_num, layer.q_per_kv
        rows = q[request].float().reshape(len(items), h // group, group, q.shape[-1])
        scores = torch.einsum("nkgd,nskd->nkgs", rows, k.float()) * layer.scaling * (layer.k_scale if of_fp8 else 1.0)
        if layer.logit_cap:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        scores = (scores * LOG2E).masked_fill(~own[:, None, None], -torch.inf)
        top = scores.amax(-1).clamp(min=LOWEST)
        p = torch.exp2(scores - top[..., None])
        total = p.sum(-1)
        v = v.float().masked_fill(~own[:, :, None, None], 0.0)
        out = torch.einsum("nkgs,nskd->nkgd", p, v) / total.clamp(min=SMALLEST)[..., None]
        return out.reshape(len(items), h, layer.v_head_dim), self.log_of(top, total).reshape(len(items), h)

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        top = torch.maximum(lse_a, lse_b).clamp(min=LOWEST)
        a, b = torch.exp2(lse_a - top), torch.exp2(lse_b - top)
        out = (out_a.float() * a[..., None] + out_b.float() * b[..., None]) / (a + b).clamp(min=SMALLEST)[..., None]
        return out.to(out_a.dtype), self.log_of(top, a + b)
