"""Sparse attention in Triton: one program for a row and a KV head gathers the keys that the row selects.

It runs on CUDA and, with ``TRITON_INTERPRET=1`` set before the first import of triton, on a CPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Triton's language, not Python's: their arguments have no Python types.

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    LayerOptions,
    Needs,
    Precision,
    Promises,
    Requires,
    ServerConventions,
    Sparse,
)

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def attend_selected_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, selected_ptr, table_ptr, request_ptr, sinks_ptr,
    scale, v_scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head, table_row,
    TOPK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, DV: tl.constexpr,
    SLOTS: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attention of one row and the query heads of one KV head over the keys of the row's ``selected`` [TOPK].

    ``D`` and ``ROPE`` are the two parts of a key, powers of two or 0. ``SLOTS``: indices are slots; otherwise positions
    that ``table`` maps to slots.
    """
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, dim, dim_v = tl.arange(0, BLOCK_G), tl.arange(0, D), tl.arange(0, DV)
    head = kv_head * GROUP + group
    live = group < GROUP
    q_at = q_ptr + row * q_row + head[:, None] * q_head
    q = tl.load(q_at + dim[None, :], mask=live[:, None], other=0.0).to(DOT)
    if ROPE > 0:
        rope = tl.arange(0, ROPE)
        q_rope = tl.load(q_at + D + rope[None, :], mask=live[:, None], other=0.0).to(DOT)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    out = tl.zeros([BLOCK_G, DV], tl.float32)
    request = tl.load(request_ptr + row)
    for first in range(0, TOPK, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        index = tl.load(selected_ptr + row * TOPK + column, mask=column < TOPK, other=-1)
        there = index >= 0
        slot = index.to(tl.int64)
        if not SLOTS:
            slot = tl.load(table_ptr + request * table_row + slot, mask=there, other=0).to(tl.int64)
        k_at = k_ptr + slot[:, None] * k_slot + kv_head * k_head
        k = tl.load(k_at + dim[None, :], mask=there[:, None], other=0.0).to(DOT)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if ROPE > 0:
            k_rope = tl.load(k_at + D + rope[None, :], mask=there[:, None], other=0.0).to(DOT)
            logits += tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        logits = tl.where(there[None, :], logits * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        # Until a key has come, there is nothing to scale, and -inf - -inf is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(logits - base[:, None])
        old = tl.exp(top - base)
        v_at = v_ptr + slot[:, None] * v_slot + kv_head * v_head
        v = tl.load(v_at + dim_v[None, :], mask=there[:, None], other=0.0).to(DOT)
        out = out * old[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
        total = total * old + tl.sum(weights, 1)
        top = higher
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0)
        higher = tl.maximum(top, sink)
        old = tl.exp(top - higher)
        out = out * old[:, None]
        total = total * old + tl.exp(sink - higher)
    # A row without a key gives zeros.
    out = out * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    out_at = out_ptr + (row * tl.num_programs(1) * GROUP + head)[:, None] * DV + dim_v[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=live[:, None])


class TritonSparseBackend(KernelBackend):
    """``selected`` holds positions, which the request table maps to slots."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(
            families={"mha", "gqa", "mqa", "mla"},
            gqa_ratios={1, 2, 3, 4, 8, 16, 32, 64, 128},
            head_dims={64, 128, 512},
            mla_rope_dims={64},
        ),
        precision=Precision(dtypes={"fp16", "bf16"}),
        kv_pool=KVPools(kv_dtypes={"same", "fp8_e4m3"}, page_sizes={1, 16, 64}),
        options=LayerOptions(sinks=True),
        sparse=Sparse(topk={1, 16, 64, 2048}, holes=True, empty_rows=True, any_padding=True),
        bounds=Bounds(max_q_rows=16, max_topk=1, max_draft_branches=4),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_requests_without_rows=True),
        promises=Promises(deterministic=True, batch_invariant=True),
        requires=Requires(packages=("triton",)),
    )
    slots: ClassVar[bool] = False
    """True if ``selected`` holds slots."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Launch one program for each row and KV head, padded rows included."""
        assert plan.selected is not None
        layer, (k, v) = plan.layer, kv
        row = torch.arange(len(q), device=q.device)
        request = (torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1).clamp(max=len(plan.kv_lens) - 1)
        group, table = layer.q_per_kv, plan.slot_table
        out = torch.empty(len(q), layer.tp_q_head_num, layer.v_head_dim, dtype=q.dtype, device=q.device)
        block_g = max(16, triton.next_power_of_2(group))
        attend_selected_kernel[(len(q), layer.tp_k_head_num)](
            q, k, v, out, plan.selected, table, request, out if layer.sinks is None else layer.sinks,
            layer.scaling * layer.k_scale, layer.v_scale,
            q.stride(0), q.stride(1), k.stride(1), k.stride(2), v.stride(1), v.stride(2), table.stride(0),
            TOPK=plan.selected.shape[1], GROUP=group, D=layer.v_head_dim if layer.is_mla else layer.head_dim,
            ROPE=layer.head_dim - layer.v_head_dim if layer.is_mla else 0, DV=layer.v_head_dim,
            SLOTS=self.slots, HAS_SINKS=layer.sinks is not None, BLOCK_G=block_g,
            BLOCK_N=64 if _INTERPRETED else 16 if layer.v_head_dim > 128 else 32,
            DOT=tl.float32 if _INTERPRETED else getattr(tl, str(q.dtype).removeprefix("torch.")),
        )  # fmt: skip
        return out


class TritonSparseSlotsBackend(TritonSparseBackend):
    """``selected`` holds slots of the KV pool."""

    capabilities: ClassVar[Capabilities] = TritonSparseBackend.capabilities.with_changes(
        sparse=Sparse(topk={1, 16, 64, 2048}, index_space="slots", holes=True, empty_rows=True, any_padding=True)
    )
    slots: ClassVar[bool] = True
