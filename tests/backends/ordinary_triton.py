"""A flash-decode as most people write it: autotuned, `tl.dot` on the pool's own type, P rounded to it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl

from attn_testkit.contract import Bounds, Capabilities, HeadShapes, KernelBackend, KernelPlan, KVPools, Needs, Precision


@triton.autotune([triton.Config({"BLOCK": 32}, num_warps=4), triton.Config({"BLOCK": 64}, num_warps=8)], key=["D"])
@triton.jit
def flash_decode(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, out_ptr, scale, slot_stride, head_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    request, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens_ptr + request)
    row, dim = tl.arange(0, 16), tl.arange(0, D)
    at = (request * HEADS + kv_head * GROUP + row[:, None]) * D + dim[None, :]
    live = row[:, None] < GROUP
    q = tl.load(q_ptr + at, mask=live, other=0.0)
    top = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for start in range(0, length, BLOCK):
        key = start + tl.arange(0, BLOCK)
        owned = key < length
        page = tl.load(table_ptr + request * table_stride + key // PAGE, mask=owned, other=0)
        slot = (page.to(tl.int64) * PAGE + key % PAGE) * slot_stride + kv_head * head_stride
        k = tl.load(k_ptr + slot[:, None] + dim[None, :], mask=owned[:, None], other=0.0)
        v = tl.load(v_ptr + slot[:, None] + dim[None, :], mask=owned[:, None], other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(owned[None, :], products * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live)


class FlashDecode(KernelBackend):
    """Decode of one row, a program for each request and KV head."""

    capabilities = Capabilities(
        eager={"decode"},
        graph={"decode"},
        heads=HeadShapes(families={"mha", "gqa"}, head_dims={64}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={16}),
        bounds=Bounds(max_q_rows=1, max_topk=0),
        needs=Needs(cpu_seq_lens=False),
    )
    precision: ClassVar[str | None] = None

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        k, v = kv
        q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
        layer = plan.layer
        flash_decode[(len(q), layer.tp_k_head_num)](
            q, k, v, plan.page_table, plan.kv_lens, out, layer.scaling, k.stride(1), k.stride(2),
            plan.page_table.stride(0), HEADS=layer.tp_q_head_num, GROUP=layer.q_per_kv, D=layer.head_dim,
            PAGE=plan.page_size, PRECISION=self.precision,
        )  # fmt: skip
        return out


class FlashDecodeOfFloat32(FlashDecode):
    """Declares float32 and leaves `tl.dot` its default."""

    capabilities = FlashDecode.capabilities.with_changes(precision={"dtypes": {"fp32"}})


class FlashDecodeOfFloat32InFull(FlashDecodeOfFloat32):
    """The same with dots of float32."""

    precision = "ieee"
