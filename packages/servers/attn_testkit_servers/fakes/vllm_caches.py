"""Operators of ``torch.ops._C_cache_ops`` in torch: vLLM's compiled functions that store keys and values.

Padded rows have a negative slot. Nothing is kept between calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .refusals import Check, Functions, Refusals, but, operators_of, refuse, strided

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_STEP, _ROPE = 512, 64


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_cache_dtype: str,
    scale: torch.Tensor, skip_scale: bool,
) -> None:  # fmt: skip
    """Store rows [T, rank] and [T, rope] in ``kv_cache`` [blocks, block size, rank + rope].

    Raises ``RuntimeError`` for arguments that the compiled code refuses.
    """
    refuse(CONCAT_AND_CACHE, kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    rows = torch.cat([kv_c, k_pe], dim=-1)[: slot_mapping.shape[0]]
    _store(rows, kv_cache, slot_mapping, kv_cache_dtype, None if skip_scale else scale)


def reshape_and_cache_flash(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor, v_scale: torch.Tensor,
) -> None:  # fmt: skip
    """Store rows [T, heads, D] in caches [blocks, block size, heads, D].

    Raises ``RuntimeError`` for arguments that the compiled code refuses.
    """
    refuse(
        RESHAPE_AND_CACHE, key=key, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        by_head = scale if scale.numel() == 1 else scale.reshape(-1, 1)
        _store(rows[: slot_mapping.shape[0]], cache, slot_mapping, kv_cache_dtype, by_head)


def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, q_out: torch.Tensor) -> None:
    """Write both parts of queries, [T, H, rank] and [T, H, 64], into ``q_out``, which may have more heads.

    Raises ``RuntimeError`` for arguments that the compiled code refuses.
    """
    refuse(CONCAT_QUERIES, ql_nope=ql_nope, q_pe=q_pe, q_out=q_out)
    rows, heads = ql_nope.shape[:2]
    q_out[:rows, :heads].copy_(torch.cat([ql_nope, q_pe], -1))


def _store(
    rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor | None
) -> None:
    """Store rows, except those of negative slots, without a shape that depends on data: slot 0 stays unchanged."""
    if kv_cache_dtype != "auto":
        most = torch.finfo(torch.float8_e4m3fn).max
        scaled = rows.float() if scale is None else rows.float() / scale
        rows, cache = scaled.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8), cache.view(torch.uint8)
    kept = (slots >= 0).view(-1, *[1] * (rows.dim() - 1))
    block, offset = slots.clamp(min=0) // cache.shape[1], slots.clamp(min=0) % cache.shape[1]
    cache[block, offset] = torch.where(kept, rows, cache[block, offset])


_FILE = "csrc/libtorch_stable/cache_kernels.cu"
_RESHAPE, _CONCAT, _QUERIES = (
    f"{_FILE}:{name}" for name in ("reshape_and_cache_flash", "concat_and_cache_mla", "concat_mla_q")
)


def _slots(source: str) -> Check:
    return Check("slots of int32", but(slot_mapping=torch.Tensor.int), lambda a: a.slot_mapping.dtype == torch.int64,
                 "expected scalar type torch::headeronly::ScalarType::Long but found ", source)  # fmt: skip


def _inner_stride(name: str) -> Check:
    text = f"{name} must have stride 1 in dim 2"
    return Check(f"{name} with a stride", lambda a: {name: strided(a[name])},
                 lambda a: getattr(a, name).stride(2) == 1, text, _QUERIES)  # fmt: skip


RESHAPE_AND_CACHE: tuple[Check, ...] = (
    Check("values with another stride of blocks", but(value_cache=lambda x: x.repeat_interleave(2, 0)[::2]),
          lambda a: a.key_cache.stride(0) == a.value_cache.stride(0), "", _RESHAPE),
    Check("scales of two shapes", but(v_scale=lambda x: x.repeat(2)), lambda a: a.k_scale.shape == a.v_scale.shape,
          "k_scale and v_scale must have the same shape", _RESHAPE),
    Check("three scales for two heads", but(k_scale=lambda x: x.repeat(3), v_scale=lambda x: x.repeat(3)),
          lambda a: a.k_scale.numel() in (1, a.key.shape[1]),
          "k_scale and v_scale must be of shape [1] or [num_heads]", _RESHAPE),
    Check("keys of int32", but(key=torch.Tensor.int), lambda a: a.key.dtype in _FLOATS,
          "Unsupported input type of kv cache: ", _RESHAPE),
    _slots(_RESHAPE),
)  # fmt: skip
"""Checks of ``reshape_and_cache_flash``. Rows are read by their first stride only, and caches by those of keys."""
CONCAT_AND_CACHE: tuple[Check, ...] = (
    Check("a wider cache", but(kv_cache=lambda x: torch.cat([x, x], -1)),
          lambda a: a.kv_cache.shape[2] == a.kv_c.shape[1] + a.k_pe.shape[1], "", _CONCAT),
    Check("latent rows of int32", but(kv_c=torch.Tensor.int), lambda a: a.kv_c.dtype in _FLOATS,
          "Unsupported input type of kv cache: ", _CONCAT),
    _slots(_CONCAT),
)  # fmt: skip
CONCAT_QUERIES: tuple[Check, ...] = (
    Check("a latent part of 256", but(ql_nope=lambda x: x[..., :256]), lambda a: a.ql_nope.shape[2] % _STEP == 0,
          "nope_dim must be a multiple of 512, got ", _QUERIES),
    Check("a rope part of 32", but(q_pe=lambda x: x[..., :32]), lambda a: a.q_pe.shape[2] == _ROPE,
          "rope_dim must be 64, got ", _QUERIES),
    Check("narrower outputs", but(q_out=lambda x: x[..., :_STEP]),
          lambda a: a.q_out.shape[2] == a.ql_nope.shape[2] + a.q_pe.shape[2], "", _QUERIES),
    *map(_inner_stride, ("ql_nope", "q_pe", "q_out")),
    Check("queries in float32", but(ql_nope=torch.Tensor.float),
          lambda a: a.ql_nope.dtype in (torch.float16, torch.bfloat16),
          "ql_nope must be float16 or bfloat16 dtype", _QUERIES),
)  # fmt: skip

FUNCTIONS: Functions = {
    "concat_and_cache_mla": (concat_and_cache_mla, ("kv_cache",)),
    "reshape_and_cache_flash": (reshape_and_cache_flash, ("key_cache", "value_cache")),
    "concat_mla_q": (concat_mla_q, ("q_out",)),
}
"""Operators of ``torch.ops._C_cache_ops``."""


def _key_rows(device: torch.device, _: Any) -> dict[str, Any]:
    """Three rows, of which the second is padding."""
    key = torch.arange(3 * 2 * 16.0, device=device).view(3, 2, 16).bfloat16()
    cache = torch.zeros(4, 8, 2, 16, dtype=torch.bfloat16, device=device)
    one = torch.ones(1, device=device)
    return {
        "key": key, "value": -key, "key_cache": cache, "value_cache": cache.clone(),
        "slot_mapping": torch.tensor([9, -1, 3], device=device), "kv_cache_dtype": "auto", "k_scale": one,
        "v_scale": one.clone(),
    }  # fmt: skip


def _latent_rows(device: torch.device, _: Any) -> dict[str, Any]:
    rows = torch.arange(3 * 576.0, device=device).view(3, 576).bfloat16()
    return {
        "kv_c": rows[:, :_STEP], "k_pe": rows[:, _STEP:],
        "kv_cache": torch.zeros(4, 8, 576, dtype=torch.bfloat16, device=device),
        "slot_mapping": torch.tensor([9, -1, 3], device=device), "kv_cache_dtype": "auto",
        "scale": torch.ones(1, device=device), "skip_scale": True,
    }  # fmt: skip


def _queries(device: torch.device, _: Any) -> dict[str, Any]:
    rows = torch.arange(3 * 2 * 576.0, device=device).view(3, 2, 576).bfloat16()
    out = torch.zeros(3, 4, 576, dtype=torch.bfloat16, device=device)
    return {"ql_nope": rows[..., :_STEP], "q_pe": rows[..., _STEP:], "q_out": out}


_FAKE = SimpleNamespace(**{name: function for name, (function, _) in FUNCTIONS.items()})
REFUSALS = tuple(
    Refusals(f"vLLM, {name}", name, _FAKE, lambda: operators_of("vllm", "_C_stable_libtorch", "_C_cache_ops"),
             accepted, checks, (80, 129))
    for name, accepted, checks in (
        ("reshape_and_cache_flash", _key_rows, RESHAPE_AND_CACHE),
        ("concat_and_cache_mla", _latent_rows, CONCAT_AND_CACHE),
        ("concat_mla_q", _queries, CONCAT_QUERIES),
    )
)  # fmt: skip
"""Entry points and their refusals."""
