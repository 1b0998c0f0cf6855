"""Attention of an encoder in Triton: a tile of rows, whichever sequences they are of, attends to the rows of these.

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
    ENCODER_LAYERS,
    Capabilities,
    EncoderOnly,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    LayerOptions,
    Needs,
    Precision,
    Promises,
    Requires,
    ServerConventions,
    Windows,
)

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_MODES = frozenset({ForwardMode.EXTEND})


@triton.jit(do_not_specialize=["rows", "window"])
def encode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, first_ptr, end_ptr, sinks_ptr,
    scale, logit_cap, rows, window,
    q_row, q_head, k_row, k_head, v_row, v_head,
    GROUP: tl.constexpr, D: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows and one query head. Row t sees the rows ``first`` [t] .. ``end`` [t] - 1 that are at
    most ``window`` away; a row that sees none gets zeros. ``D`` is any width, and ``BLOCK_D`` the next power of two.
    """
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, dim, column = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    live, has = row < rows, dim < D
    first = tl.load(first_ptr + row, mask=live, other=0)
    end = tl.load(end_ptr + row, mask=live, other=0)
    first = tl.maximum(first, (row - window).to(tl.int32))
    end = tl.minimum(end, (row + window + 1).to(tl.int32))
    sees = first < end
    q_at = q_ptr + (row * q_row + head * q_head)[:, None] + dim[None, :]
    q = tl.load(q_at, mask=live[:, None] & has[None, :], other=0.0).to(DOT)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SINKS:
        # A sink is a key that has weight but no value.
        top = tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(sinks_ptr + head).to(tl.float32)
        total += 1.0
    k_at = k_ptr + (head // GROUP) * k_head + dim[None, :]
    v_at = v_ptr + (head // GROUP) * v_head + dim[None, :]
    for start in range(tl.min(tl.where(sees, first, rows), 0), tl.max(tl.where(sees, end, 0), 0), BLOCK_N):
        key = start + column
        seen = (first[:, None] <= key[None, :]) & (key[None, :] < end[:, None])
        # Rows that no row of the tile sees may hold NaN, and 0 * NaN is NaN.
        there = (tl.max(seen.to(tl.int32), 0) > 0)[:, None] & has[None, :]
        k = tl.load(k_at + (key.to(tl.int64) * k_row)[:, None], mask=there, other=0.0).to(DOT)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:  # cap * tanh(s / cap), written so that exp cannot overflow
            e = tl.exp(tl.abs(s) * (-2.0 / logit_cap))
            s = tl.where(s < 0, -logit_cap, logit_cap) * (1.0 - e) / (1.0 + e)
        s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # never -inf - -inf
        weights = tl.exp(s - base[:, None])
        old = tl.exp(top - base)
        v = tl.load(v_at + (key.to(tl.int64) * v_row)[:, None], mask=there, other=0.0).to(DOT)
        out = out * old[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
        total = total * old + tl.sum(weights, 1)
        top = higher
    result = out / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out_ptr + ((row * tl.num_programs(1) + head) * D)[:, None] + dim[None, :]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & has[None, :])


class TritonEncoderBackend(KernelBackend):
    """Bounds of each row follow from the offsets of its sequence or window, so that one launch serves both."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        eager=_MODES,
        graph=_MODES,
        heads=HeadShapes(
            families=frozenset({"mha", "gqa", "mqa"}),
            head_dims=frozenset({64, 72, 80, 128}),
            gqa_ratios=frozenset(range(1, 9)),
        ),
        precision=Precision(dtypes=frozenset({"fp16", "bf16"})),
        windows=Windows(_MODES, non_causal=frozenset({"both"})),
        options=LayerOptions(logit_cap=True, sinks=True, non_causal=_MODES),
        encoder_only=EncoderOnly(frozenset(ENCODER_LAYERS), in_graphs=True, only=True),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(
            takes_requests_without_rows=True, takes_empty_batches=True, finite_padding=True, takes_out=True
        ),
        promises=Promises(deterministic=True),
        requires=Requires(packages=("triton",)),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Launch one program for each tile of rows and query head, rows of padding included."""
        layer, k, v, rows = plan.layer, plan.k, plan.v, len(q)
        assert k is not None
        assert v is not None
        windows = plan.cu_window_seqlens
        starts = plan.cu_seqlens_q if windows is None else windows
        number = torch.searchsorted(starts, torch.arange(rows, device=q.device), right=True)
        # Rows after the last sequence end at 0, and see none.
        bounds = torch.nn.functional.pad(starts, (0, 1))
        first, end = bounds[number - 1], bounds[number]
        out = torch.empty(rows, layer.tp_q_head_num, layer.v_head_dim, dtype=q.dtype, device=q.device)
        block_m = 128 if _INTERPRETED else 64
        encode_kernel[(triton.cdiv(rows, block_m), layer.tp_q_head_num)](
            q, k, v, out, first, end, out if layer.sinks is None else layer.sinks,
            layer.scaling, layer.logit_cap, rows, rows if layer.sliding_window_size < 0 else layer.sliding_window_size,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            GROUP=layer.q_per_kv, D=layer.head_dim, HAS_CAP=layer.logit_cap > 0, HAS_SINKS=layer.sinks is not None,
            BLOCK_D=triton.next_power_of_2(layer.head_dim), BLOCK_M=block_m, BLOCK_N=128 if _INTERPRETED else 64,
            DOT=tl.float32 if _INTERPRETED else getattr(tl, str(q.dtype).removeprefix("torch.")),
        )  # fmt: skip
        return out
