"""A paged decode whose keys and values are loaded through tensor descriptors, and the same with a mistake in it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_testkit.contract import Bounds, Capabilities, HeadShapes, KernelBackend, KernelPlan, KVPools, Needs, Precision


@triton.jit
def decode_by_descriptors(
    q_ptr, keys, v_ptr, table_ptr, lens_ptr, out_ptr, scale, slots, slot_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, MASKS_VALUES: tl.constexpr,
):  # fmt: skip
    request, kv_head = tl.program_id(0), tl.program_id(1)
    values = tl.make_tensor_descriptor(v_ptr, [slots, slot_stride], [slot_stride, 1], [PAGE, D])
    length = tl.load(lens_ptr + request)
    row, dim = tl.arange(0, 16), tl.arange(0, D)
    at = (request * HEADS + kv_head * GROUP + row[:, None]) * D + dim[None, :]
    live = row[:, None] < GROUP
    q = tl.load(q_ptr + at, mask=live, other=0.0)
    top = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for block in range(tl.cdiv(length, PAGE)):
        page = tl.load(table_ptr + request.to(tl.int64) * table_stride + block.to(tl.int64))
        k = keys.load([page * PAGE, kv_head * D])
        v = values.load([page * PAGE, kv_head * D])
        owned = block * PAGE + tl.arange(0, PAGE) < length
        if MASKS_VALUES:
            v = tl.where(owned[:, None], v, 0.0).to(v.dtype)
        scores = tl.where(owned[None, :], tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live)


class DescriptorDecode(KernelBackend):
    """Decode of one row, a program for each request and KV head; a block of keys is a page."""

    capabilities = Capabilities(
        eager={"decode"},
        graph={"decode"},
        heads=HeadShapes(families={"mha", "gqa"}, head_dims={64}),
        precision=Precision(dtypes={"bf16", "fp16"}),
        kv_pool=KVPools(page_sizes={16}),
        bounds=Bounds(max_q_rows=1, max_topk=0),
        needs=Needs(cpu_seq_lens=False),
    )
    masks_values: ClassVar[bool] = True

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        k, v = kv
        q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
        layer, slots = plan.layer, k.shape[0] * k.shape[1]
        keys = TensorDescriptor(k, [slots, k.stride(1)], [k.stride(1), 1], [plan.page_size, layer.head_dim])
        decode_by_descriptors[(len(q), layer.tp_k_head_num)](
            q, keys, v, plan.page_table, plan.kv_lens, out, layer.scaling, slots, v.stride(1),
            plan.page_table.stride(0), HEADS=layer.tp_q_head_num, GROUP=layer.q_per_kv, D=layer.head_dim,
            PAGE=plan.page_size, MASKS_VALUES=self.masks_values,
        )  # fmt: skip
        return out


class DescriptorDecodeWithoutMask(DescriptorDecode):
    """Counts on the descriptor to pad: it does past the end of the pool, not past the end of a request."""

    masks_values = False
