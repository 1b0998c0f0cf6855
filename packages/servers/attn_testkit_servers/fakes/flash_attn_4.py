"""FlashAttention 4's ``flash_attn_varlen_func`` on SM90 in torch, for packed rows and paged keys.

Fixed shapes and device work only: offsets, lengths and page tables are read when a graph is replayed. Nothing is kept
between calls: on SM90 the kernel has no splits and no schedule. It refuses what the package's Python refuses.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch

from . import paged_attention as paged
from .flash_attn import forward_arguments
from .refusals import Arguments, Check, Refusals, but, of_width, refuse, to, zeros

_HALVES = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None), learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend with rows ``q`` [T, H, D] to pages ``k`` [pages, page size, Hk, D] and ``v`` [pages, page size, Hk, Dv].

    Returns outputs [T, H, Dv], which are not written for rows of no request, and natural log-sum-exps [H, T]. Raises
    ``AssertionError`` for arguments that the package refuses.
    """
    assert qv is None, "the fake supports only the kernels of SM90"
    assert cu_seqlens_q is not None, "the fake supports only packed rows"
    assert seqused_q is None, "the fake supports only packed rows"
    assert page_table is not None, "the fake supports only pages of keys"
    assert seqused_k is not None, "the fake supports only pages of keys"
    refuse(
        VARLEN, AssertionError, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k, page_table=page_table, learnable_sink=learnable_sink, num_splits=num_splits,
    )  # fmt: skip
    before, after = window_size
    window = (-1 if before is None else before, 0 if causal else -1 if after is None else after)
    batch = paged.packed(cu_seqlens_q, len(q), seqused_k, page_table, k.shape[1], window)
    found, lse = paged.attend(
        q, paged.gather(k, batch.keys), paged.gather(v, batch.keys), batch.seen,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, soft_cap=softcap, round_to=v.dtype,
        sinks=learnable_sink,
    )  # fmt: skip
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    out = torch.where(batch.rows.valid[:, None, None], found.to(out.dtype), out)
    return out, lse.t() * 0.6931471805599453


_API = "cute/interface.py:_flash_attn_fwd"
_HEAD_DIMS = "cute/interface.py:_validate_head_dims"
"""Functions of flash-attn-4 4.0.0b36."""


def _offsets(name: str) -> tuple[Check, ...]:
    text = "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be "
    return (
        Check(f"{name} of int64", but(**{name: torch.Tensor.long}), lambda a: getattr(a, name).dtype == torch.int32,
              f"{text}int32", _API),
        Check(f"{name} with a stride", but(name), lambda a: getattr(a, name).stride(0) == 1, f"{text}contiguous", _API),
    )  # fmt: skip


def _in_fp8(a: Arguments) -> Arguments:
    return {name: a[name].to(_FP8[0]) for name in ("q", "k", "v")}


VARLEN: tuple[Check, ...] = (
    Check("offsets of keys with a page table", lambda a: {"cu_seqlens_k": a["cu_seqlens_q"]},
          lambda a: a.cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k", _API),
    Check("a page table of int64", but(page_table=torch.Tensor.long), lambda a: a.page_table.dtype == torch.int32,
          "page_table must be int32", _API),
    Check("a page table of fewer requests", but(page_table=lambda x: x[:1]),
          lambda a: len(a.page_table) == len(a.cu_seqlens_q) - 1, "", _API),
    Check("fewer pages of keys", but(k=lambda x: x[:1]), lambda a: a.k.shape[:3] == a.v.shape[:3], "", _API),
    Check("keys of another width", but(k=lambda x: x[..., :32]), lambda a: a.k.shape[-1] == a.q.shape[-1], "", _API),
    Check("lengths of fewer requests", but(seqused_k=lambda x: x[:1]),
          lambda a: len(a.seqused_k) == len(a.cu_seqlens_q) - 1, "seqused_k must have shape (batch_size,)", _API),
    Check("float32", but(**dict.fromkeys(("q", "k", "v"), torch.Tensor.float)),
          lambda a: a.v.dtype in _HALVES + _FP8, "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2", _API),
    Check("keys of another dtype", but(k=torch.Tensor.half), lambda a: a.q.dtype == a.k.dtype == a.v.dtype,
          "q, k, v, and qv must have the same dtype", _API),
    *_offsets("cu_seqlens_q"),
    *_offsets("seqused_k"),
    Check("sinks of fewer heads", zeros("learnable_sink", 2, torch.float32),
          lambda a: a.learnable_sink is None or a.learnable_sink.shape == a.q.shape[1:2], "", _API),
    Check("sinks in float64", zeros("learnable_sink", 4, torch.float64),
          lambda a: a.learnable_sink is None or a.learnable_sink.dtype in (*_HALVES, torch.float32),
          "learnable_sink must be float16, bfloat16, or float32", _API),
    Check("heads that do not divide", but(q=lambda x: x[:, :3]), lambda a: a.q.shape[1] % a.k.shape[2] == 0,
          "num_head must be divisible by num_head_kv", _API),
    Check("a head dim of 264", of_width(264), lambda a: max(a.q.shape[-1], a.v.shape[-1]) <= 256,
          "head_dim and head_dim_v must be between 8 and 256", _HEAD_DIMS),
    Check("a head dim of 60", of_width(60),
          lambda a: all(x.shape[-1] % (16 // x.element_size()) == 0 for x in (a.q, a.v)),
          "head_dim and head_dim_v must be between 8 and 256", _HEAD_DIMS),
    Check("FP8", _in_fp8, lambda a: a.q.dtype not in _FP8, "FP8 is only supported on SM100", _API),
    Check("2 splits", to(num_splits=2), lambda a: a.num_splits == 1, "SplitKV not supported on SM 9.0", _API),
)  # fmt: skip
"""Checks in their order."""


def varlen_arguments(device: torch.device, _: Any = None) -> dict[str, Any]:
    """Arguments that are accepted: those of FlashAttention 3's fake, by this function's names."""
    given = forward_arguments(device)
    names = ("q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "page_table", "softmax_scale")
    return {name: given[name] for name in names} | {
        "cu_seqlens_k": None, "causal": True, "learnable_sink": None, "num_splits": 1,
    }  # fmt: skip


def _real() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _named(implementation: Any, function: str, arguments: Arguments) -> Any:
    return getattr(implementation, function)(**arguments)


_FAKE = SimpleNamespace(flash_attn_varlen_func=varlen)
REFUSALS = (
    Refusals("FlashAttention 4, flash_attn_varlen_func", "flash_attn_varlen_func", _FAKE, _real, varlen_arguments,
             VARLEN, call=_named, output=lambda returned: returned[0]),
)  # fmt: skip
"""The entry point and its refusals."""
