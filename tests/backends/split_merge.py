"""A decode kernel that splits the keys and merges the splits in the same launch: by a ticket, and by place (a race)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn_testkit.contract import Bounds, Capabilities, HeadShapes, KernelBackend, KVPools, Needs, Precision

SPLITS = 3


@triton.jit
def attend_and_merge(
    q, k, v, page_table, kv_lens, parts, tickets, out, scale, q_stride, k_page, k_row, k_head, v_page, v_row, v_head,
    table_stride, group, BY_TICKET: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    at = tl.arange(0, WIDTH)
    query = tl.load(q + row * q_stride + head * WIDTH + at).to(tl.float32) * scale
    keys = tl.load(kv_lens + row)
    each = tl.cdiv(keys, SPLITS)
    top, total, acc = -1e30, 0.0, tl.zeros([WIDTH], tl.float32)
    for i in range(split * each, tl.minimum(keys, (split + 1) * each)):
        page = tl.load(page_table + row * table_stride + i // PAGE).to(tl.int64)
        key = tl.load(k + page * k_page + (i % PAGE) * k_row + (head // group) * k_head + at).to(tl.float32)
        value = tl.load(v + page * v_page + (i % PAGE) * v_row + (head // group) * v_head + at).to(tl.float32)
        score = tl.sum(query * key, 0)
        higher = tl.maximum(top, score)
        acc = acc * tl.exp(top - higher) + tl.exp(score - higher) * value
        total = total * tl.exp(top - higher) + tl.exp(score - higher)
        top = higher
    own = parts + ((row * heads + head) * SPLITS + split) * (WIDTH + 2)
    tl.store(own + at, acc)
    tl.store(own + WIDTH, top)
    tl.store(own + WIDTH + 1, total)
    if BY_TICKET:
        place = tl.atomic_add(tickets + row * heads + head, 1)
    else:
        place = split
    if place == SPLITS - 1:
        top, total, acc = -1e30, 0.0, tl.zeros([WIDTH], tl.float32)
        for i in range(SPLITS):
            part = parts + ((row * heads + head) * SPLITS + i) * (WIDTH + 2)
            theirs = tl.load(part + WIDTH)
            higher = tl.maximum(top, theirs)
            acc = acc * tl.exp(top - higher) + tl.load(part + at) * tl.exp(theirs - higher)
            total = total * tl.exp(top - higher) + tl.load(part + WIDTH + 1) * tl.exp(theirs - higher)
            top = higher
        tl.store(out + (row * heads + head) * WIDTH + at, acc / tl.maximum(total, 1e-30))
        if BY_TICKET:
            tl.store(tickets + row * heads + head, 0)


class ByTicket(KernelBackend):
    """The last program to arrive merges."""

    capabilities = Capabilities(
        eager={"decode"},
        graph={"decode"},
        heads=HeadShapes(families={"mha", "gqa"}, head_dims={64}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={16}),
        bounds=Bounds(max_q_rows=1),
        needs=Needs(cpu_seq_lens=False),
    )
    by_ticket = True

    def __init__(self, context) -> None:
        super().__init__(context)
        self.tickets = torch.zeros(1 << 14, dtype=torch.int32, device=context.device)

    def run(self, q, kv, plan):
        """A launch per layer. Shapes as in ``KernelBackend.run``."""
        rows, heads, width = q.shape
        k, v = kv
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        parts = torch.empty(rows, heads, SPLITS, width + 2, dtype=torch.float32, device=q.device)
        attend_and_merge[(rows, heads, SPLITS)](
            q, k, v, plan.page_table, plan.kv_lens, parts, self.tickets, out, plan.layer.scaling, q.stride(0),
            *k.stride()[:3], *v.stride()[:3], plan.page_table.stride(0), heads // k.shape[2],
            BY_TICKET=self.by_ticket, SPLITS=SPLITS, PAGE=k.shape[1], WIDTH=width,
        )  # fmt: skip
        return out


class ByPlace(ByTicket):
    """The program of the last split merges, whether or not the others are done."""

    by_ticket = False
