"""FlashAttention 2's compiled entry point for packed rows and paged keys, as vLLM's own package calls it.

Fixed shapes and device work only: lengths, offsets and block tables are read when a graph is replayed. Nothing is kept
between calls: splits are decided on the host, and each split computes its part of the keys that a replay has. A launch
for one row per request has no offsets: request i is row i, in every replay.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from . import paged_attention as paged
from .refusals import (
    Arguments,
    Change,
    Check,
    Functions,
    Refusals,
    but,
    of_width,
    operators_of,
    refuse,
    strided_heads,
    to,
    zeros,
)

_HALVES = (torch.float16, torch.bfloat16)
_MOST_SPLITS = 128


def varlen_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, seqused_k: torch.Tensor | None, leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None, alibi_slopes: torch.Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float, zero_tensors: bool, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, return_softmax: bool, num_splits: int, gen: torch.Tensor | None,
) -> list[torch.Tensor]:  # fmt: skip
    """Attend with rows ``q`` [T, H, D] to pages ``k``, ``v`` [blocks, block size, Hk, D]; rows of no request stay as
    they were.

    Returns ``out`` and log-sum-exps [H, T]. Raises ``RuntimeError`` for arguments that the compiled code refuses.
    """
    given = SimpleNamespace(
        q=q, k=k, v=v, out=out, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k,
        block_table=block_table, alibi_slopes=alibi_slopes, max_seqlen_q=max_seqlen_q, p_dropout=p_dropout,
        softcap=softcap, return_softmax=return_softmax, num_splits=num_splits, gen=gen,
        window=(window_size_left, window_size_right),
    )  # fmt: skip
    refuse(VARLEN, **vars(given))
    assert block_table is not None, "the fake supports only pages"
    assert seqused_k is not None
    assert leftpad_k is None
    assert out is not None
    total, heads, _ = q.shape
    if _is_swapped(given):
        cu_seqlens_q = torch.arange(len(block_table) + 1, dtype=torch.int32, device=q.device)
    window = (window_size_left, 0 if is_causal else window_size_right)
    batch = paged.packed(cu_seqlens_q, total, seqused_k, block_table, k.shape[1], window)
    bias = None if alibi_slopes is None else -alibi_slopes.view(heads, 1, 1) * batch.ahead.abs()
    found, lse = paged.attend(
        q, paged.gather(k, batch.keys), paged.gather(v, batch.keys), batch.seen, softmax_scale, soft_cap=softcap,
        round_to=v.dtype, bias=bias,
    )  # fmt: skip
    written = batch.rows.valid & (batch.rows.offset < max_seqlen_q)
    out.copy_(torch.where(written[:, None, None], found.to(out.dtype), out))
    return [out, lse.t() * 0.6931471805599453]


def _is_swapped(a: Any) -> bool:
    """True if query heads of a KV head are computed as rows, which needs one row per request."""
    return bool(
        a.max_seqlen_q == 1 and a.q.shape[1] > a.k.shape[2] and max(a.window) < 0 and a.p_dropout == 0
        and a.alibi_slopes is None
    )  # fmt: skip


_API = "csrc/flash_attn/flash_api.cpp:mha_varlen_fwd"
_ALIBI = "csrc/flash_attn/flash_api.cpp:set_params_alibi"
_SPLITS = "csrc/flash_attn/flash_api.cpp:set_params_splitkv"
"""Functions of vLLM's FlashAttention at 617264c1."""


def _one_row(**more: Any) -> Change:
    """The first rows of both requests; their heads become rows."""

    def change(a: Arguments) -> Arguments:
        offsets = torch.arange(3, dtype=torch.int32, device=a["q"].device)
        return {"q": a["q"][:2], "out": a["out"][:2], "cu_seqlens_q": offsets, "max_seqlen_q": 1, **more}

    return change


VARLEN: tuple[Check, ...] = (
    Check("a generator", lambda a: {"gen": torch.zeros(1, device=a["q"].device)}, lambda a: a.gen is None,
          "flash-attn: the RNG `generator` argument is no longer supported and must be None", _API),
    Check("float32 queries", but(q=torch.Tensor.float), lambda a: a.q.dtype in _HALVES,
          "FlashAttention only support fp16 and bf16 data type", _API),
    Check("keys of another dtype", but(k=torch.Tensor.half), lambda a: a.k.dtype == a.q.dtype,
          "query and key must have the same dtype", _API),
    Check("values of another dtype", but(v=torch.Tensor.half), lambda a: a.v.dtype == a.q.dtype,
          "query and value must have the same dtype", _API),
    Check("offsets of int64", but(cu_seqlens_q=torch.Tensor.long), lambda a: a.cu_seqlens_q.dtype == torch.int32,
          "cu_seqlens_q must have dtype int32", _API),
    Check("offsets of keys of int64", but(cu_seqlens_k=torch.Tensor.long),
          lambda a: a.cu_seqlens_k.dtype == torch.int32, "cu_seqlens_k must have dtype int32", _API),
    Check("a block table of int64", but(block_table=torch.Tensor.long),
          lambda a: a.block_table is None or a.block_table.dtype == torch.int32,
          "block_table must have dtype torch.int32", _API),
    Check("a block table with a stride", but("block_table"),
          lambda a: a.block_table is None or a.block_table.stride(-1) == 1,
          "block_table must have contiguous last dimension", _API),
    Check("queries with a stride", but(q=strided_heads), lambda a: all(x.stride(-1) == 1 for x in (a.q, a.k, a.v)),
          "Input tensor must have contiguous last dimension", _API),
    Check("offsets with a stride", but("cu_seqlens_q"), lambda a: a.cu_seqlens_q.is_contiguous(),
          "cu_seqlens_q must be contiguous", _API),
    Check("offsets of keys with a stride", but("cu_seqlens_k"), lambda a: a.cu_seqlens_k.is_contiguous(),
          "cu_seqlens_k must be contiguous", _API),
    Check("dropout with a soft cap", to(softcap=1.0, p_dropout=0.5), lambda a: a.softcap <= 0 or a.p_dropout == 0,
          "Softcapping does not support dropout for now", _API),
    Check("pages of 8 slots", but(k=lambda x: x[:, :8], v=lambda x: x[:, :8]),
          lambda a: a.block_table is None or a.k.shape[1] % 16 == 0,
          "Paged KV cache block size must be divisible by 16", _API),
    Check("three rows of two requests with one each", to(max_seqlen_q=1),
          lambda a: not _is_swapped(a) or len(a.q) == _bs(a),
          'torch_call_dispatcher( "aten::reshape", "", stack.data(), TORCH_ABI_VERSION) API call failed at ', _API),
    Check("no request", but(cu_seqlens_q=lambda x: x[:1]), lambda a: _bs(a) > 0, "batch size must be positive", _API),
    Check("a head dim of 264", of_width(264, "out"), lambda a: a.q.shape[-1] <= 256,
          "FlashAttention forward only supports head dimension at most 256", _API),
    Check("a head dim of 60", of_width(60, "out"), lambda a: a.q.shape[-1] % 8 == 0,
          "query, key, value, and out_ must have a head_size that is a multiple of 8", _API),
    Check("heads that do not divide", but(q=lambda x: x[:, :3], out=lambda x: x[:, :3]),
          lambda a: a.q.shape[1] % a.k.shape[2] == 0,
          "Number of heads in key/value must divide number of heads in query", _API),
    Check("keys of another width", but(k=lambda x: x[..., :32]), lambda a: a.k.shape[-1] == a.q.shape[-1],
          "k must have shape (num_blocks, page_block_size, num_heads_k, head_size)", _API),
    Check("fewer pages of values", but(v=lambda x: x[:1]), lambda a: a.v.shape == a.k.shape,
          "v must have shape (num_blocks, page_block_size, num_heads_k, head_size)", _API),
    Check("a block table of fewer requests", but(block_table=lambda x: x[:1]),
          lambda a: a.block_table is None or len(a.block_table) == _bs(a),
          "block_table must have shape (batch_size, max_num_blocks_per_seq)", _API),
    Check("fewer offsets of keys", but(cu_seqlens_k=lambda x: x[:2]), lambda a: len(a.cu_seqlens_k) == _bs(a) + 1,
          "cu_seqlens_k must have shape (batch_size + 1)", _API),
    Check("lengths of int64", but(seqused_k=torch.Tensor.long),
          lambda a: a.seqused_k is None or a.seqused_k.dtype == torch.int32, "seqused_k must have dtype int32", _API),
    Check("lengths with a stride", but("seqused_k"), lambda a: a.seqused_k is None or a.seqused_k.is_contiguous(),
          "seqused_k must be contiguous", _API),
    Check("lengths of fewer requests", but(seqused_k=lambda x: x[:1]),
          lambda a: a.seqused_k is None or len(a.seqused_k) == _bs(a),
          "seqused_k_ must have shape (batch_size)", _API),
    Check("outputs of another dtype", but(out=torch.Tensor.half), lambda a: a.out is None or a.out.dtype == a.q.dtype,
          "Output must have the same dtype as inputs", _API),
    Check("outputs with a stride", but(out=strided_heads), lambda a: a.out is None or a.out.stride(-1) == 1,
          "Output tensor must have contiguous last dimension", _API),
    Check("outputs of fewer rows", but(out=lambda x: x[:2]), lambda a: a.out is None or a.out.shape == a.q.shape,
          "out must have shape (sizes[0], sizes[1], head_size)", _API),
    Check("weights to be returned", to(return_softmax=True), lambda a: not a.return_softmax or a.p_dropout > 0,
          "return_softmax is only supported when p_dropout > 0.0", _API),
    Check("129 splits of single rows", _one_row(num_splits=129),
          lambda a: not _is_swapped(a) or a.num_splits <= _MOST_SPLITS, "num_splits > 128 not supported", _SPLITS),
    Check("two splits of several rows", to(num_splits=2), lambda a: _is_swapped(a) or a.num_splits <= 1,
          "num_splits > 1 is not supported for varlen paged KV", _API),
    Check("slopes in bf16", zeros("alibi_slopes", 4, torch.bfloat16),
          lambda a: a.alibi_slopes is None or a.alibi_slopes.dtype == torch.float32,
          "ALiBi slopes must have dtype fp32", _ALIBI),
    Check("slopes with a stride", zeros("alibi_slopes", 4, torch.float32, 2),
          lambda a: a.alibi_slopes is None or a.alibi_slopes.stride(-1) == 1,
          "ALiBi slopes tensor must have contiguous last dimension", _ALIBI),
    Check("slopes of fewer heads", zeros("alibi_slopes", 2, torch.float32),
          lambda a: a.alibi_slopes is None or a.alibi_slopes.shape in ((a.q.shape[1],), (_bs(a), a.q.shape[1])), "",
          _ALIBI),
)  # fmt: skip
"""Checks of ``varlen_fwd`` in their order."""


def _bs(a: Any) -> int:
    return len(a.cu_seqlens_q) - 1


def arguments(device: torch.device, _: Any = None) -> dict[str, Any]:
    """Arguments that are accepted: one row for 9 keys and two for 33, 4 heads of width 64, 2 KV heads, pages of 16."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(3, 4, 64, generator=generator).bfloat16().to(device)
    k, v = (torch.randn(6, 16, 2, 64, generator=generator).bfloat16().to(device) for _ in "kv")
    offsets, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 3], [9, 33]))
    return {
        "q": q, "k": k, "v": v, "out": torch.full_like(q, torch.nan), "cu_seqlens_q": offsets,
        "cu_seqlens_k": torch.zeros_like(offsets), "seqused_k": lens, "leftpad_k": None,
        "block_table": torch.arange(6, dtype=torch.int32, device=device).view(2, 3), "alibi_slopes": None,
        "max_seqlen_q": 2, "max_seqlen_k": 48, "p_dropout": 0.0, "softmax_scale": 0.125, "zero_tensors": False,
        "is_causal": True, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "return_softmax": False,
        "num_splits": 0, "gen": None,
    }  # fmt: skip


FUNCTIONS: Functions = {"varlen_fwd": (varlen_fwd, ("out",))}
"""Functions of ``torch.ops._vllm_fa2_C`` that paged attention calls."""
REFUSALS = (
    Refusals("FlashAttention 2, varlen_fwd", "varlen_fwd", SimpleNamespace(varlen_fwd=varlen_fwd),
             lambda: operators_of("vllm", "vllm_flash_attn/_vllm_fa2_C"), arguments, VARLEN, (80, 129),
             output=lambda returned: returned[0]),
)  # fmt: skip
"""The entry point and its refusals."""
