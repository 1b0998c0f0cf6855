"""FlashAttention 3's two compiled entry points in torch: vLLM's own ``vllm_flash_attn`` calls them like the compiled
ones on a GPU.

Fixed shapes and device work only. Lengths, offsets and block tables are read when a graph is replayed, and so is the
schedule, which ``get_scheduler_metadata`` makes and vLLM keeps in a buffer of its builder. Splits of the keys are
decided on the host, as in the kernel (``flash_attn_plan``). A replay whose schedule has another layout than the
captured kernels expect leaves rows unwritten, as on an H100.

Both refuse the arguments that the compiled code refuses: ``FORWARD``, ``PLANNED`` and ``METADATA`` have its checks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from . import paged_attention as paged
from .flash_attn_plan import SM_COUNT, SplitPlan, split_plan
from .refusals import (
    Arguments,
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

_FP8 = torch.float8_e4m3fn
_DTYPES = (torch.float16, torch.bfloat16, _FP8)
_HEADS_IN_L2 = 1
"""An entry of the schedule by which the kernel orders heads. Its value does not affect results."""


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads: int, num_heads_k: int, headdim: int,
    headdim_v: int, qkv_dtype: torch.dtype, seqused_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, cu_seqlens_k_new: torch.Tensor | None, seqused_q: torch.Tensor | None,
    leftpad_k: torch.Tensor | None, page_size: int | None, max_seqlen_k_new: int, is_causal: bool,
    window_size_left: int, window_size_right: int, has_softcap: bool, num_splits: int, pack_gqa: bool | None,
    sm_margin: int,
) -> torch.Tensor:  # fmt: skip
    """Make the schedule, int32: the vectors of ``SplitPlan`` and a counter of tiles, which begins at 0.

    Raises ``RuntimeError`` for arguments that the compiled code refuses.
    """
    refuse(METADATA, qkv_dtype=qkv_dtype, num_heads=num_heads, num_heads_k=num_heads_k)
    assert cu_seqlens_q is not None
    plan = split_plan(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, qkv_dtype.itemsize, is_causal,
        window_size_left, window_size_right, num_splits,
    )  # fmt: skip
    made = torch.zeros(plan.size, dtype=torch.int32, device=seqused_k.device)
    rows = cu_seqlens_q.diff() * (num_heads // num_heads_k)
    splits = _splits(plan, rows, seqused_k, num_heads_k)
    values = {"rows": rows, "splits": splits, "heads_in_l2": torch.full_like(rows, _HEADS_IN_L2)}
    for vector in plan.vectors:
        made[plan.start(vector) : plan.start(vector) + batch_size] = values[vector]
    return made


def _splits(plan: SplitPlan, rows: torch.Tensor, seqused_k: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[requests] int32: splits of each request, more for those with more keys, on the device."""
    row_tiles = (rows + plan.rows_per_tile - 1) // plan.rows_per_tile
    key_tiles = (seqused_k + plan.keys_per_tile - 1) // plan.keys_per_tile
    per_sm = ((row_tiles * key_tiles).sum() * 1.1 * kv_heads / SM_COUNT).ceil().clamp(min=1).int()
    return ((key_tiles + per_sm - 1) // per_sm).clamp(1, plan.splits)


def _scheduled(schedule: torch.Tensor, plan: SplitPlan, bs: int, ratio: int) -> torch.Tensor:
    """[requests]: how many rows of each the launch computes by a schedule, read in the layout of ``plan``.

    It computes none if the counter of tiles is not 0, and none of a request with more splits than the partial results
    have room for.
    """
    rows = schedule[:bs] // ratio
    for vector, most in (("splits", plan.splits), ("heads_in_l2", torch.iinfo(torch.int32).max)):
        if vector in plan.vectors:
            values = schedule[plan.start(vector) : plan.start(vector) + bs]
            rows = torch.where((values >= 1) & (values <= most), rows, 0)
    return torch.where(schedule[plan.size - 1] == 0, rows, 0)


def fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_new: torch.Tensor | None, v_new: torch.Tensor | None,
    q_v: torch.Tensor | None, out: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None,
    cu_seqlens_k_new: torch.Tensor | None, seqused_q: torch.Tensor | None, seqused_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, page_table: torch.Tensor, kv_batch_idx: torch.Tensor | None,
    leftpad_k: torch.Tensor | None, rotary_cos: torch.Tensor | None, rotary_sin: torch.Tensor | None,
    seqlens_rotary: torch.Tensor | None, q_descale: torch.Tensor | None, k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None, softmax_scale: float, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, is_rotary_interleaved: bool, scheduler_metadata: torch.Tensor | None,
    num_splits: int, pack_gqa: bool | None, sm_margin: int, s_aux: torch.Tensor | None, cp_world_size: int,
    cp_rank: int, cp_tot_seqused_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend with rows ``q`` [T, H, D] to pages ``k``, ``v`` [blocks, block size, Hk, D]; rows of no request and rows
    that the schedule leaves out stay as they were.

    ``q_descale``, ``k_descale``, ``v_descale`` [requests, Hk] float32 belong to FP8 and are ignored without it.
    Returns ``out``, the log-sum-exp [H, T] and two empty tensors, as the kernel does. Raises ``RuntimeError`` for
    arguments that the compiled code refuses.
    """
    assert q_v is None
    assert cu_seqlens_k is None
    assert cp_world_size == 1
    (bs, blocks), (rows_of_q, heads, dim), kv_heads = page_table.shape, q.shape, k.shape[2]
    refuse(
        FORWARD, q=q, k=k, v=v, out=out, page_table=page_table, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k
    )  # fmt: skip
    plan = split_plan(
        bs, max_seqlen_q, max_seqlen_k, heads, kv_heads, dim, q.dtype.itemsize, is_causal, window_size_left,
        window_size_right, num_splits,
    )  # fmt: skip
    refuse(
        PLANNED, plan=plan, dtype=q.dtype, scheduler_metadata=scheduler_metadata, s_aux=s_aux, heads=heads,
        kv_heads=kv_heads, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    # Rows and keys that a grid of the largest row count and key count reaches.
    blocks = min(blocks, -(-max_seqlen_k // k.shape[1]))
    window = (window_size_left, 0 if is_causal else window_size_right)
    batch = paged.packed(cu_seqlens_q, rows_of_q, seqused_k, page_table[:, :blocks], k.shape[1], window)
    rows, keys = batch.rows, batch.keys
    queries, key_rows, value_rows = q.float(), paged.gather(k, keys), paged.gather(v, keys)
    if q.dtype == _FP8:
        if q_descale is not None:
            queries = queries * q_descale[rows.request].repeat_interleave(heads // kv_heads, 1)[..., None]
        if k_descale is not None:
            key_rows = key_rows * k_descale[keys.request][..., None]
        if v_descale is not None:
            value_rows = value_rows * v_descale[keys.request][..., None]
    found, lse = paged.attend(
        queries, key_rows, value_rows, batch.seen, softmax_scale, soft_cap=softcap, round_to=v.dtype,
        factor=_FP8_FACTOR if q.dtype == _FP8 else 1.0, sinks=s_aux,
    )  # fmt: skip
    written = rows.valid & (rows.offset < max_seqlen_q)
    if scheduler_metadata is not None:
        written = written & (rows.offset < _scheduled(scheduler_metadata, plan, bs, heads // kv_heads)[rows.request])
    out.copy_(torch.where(written[:, None, None], found.to(out.dtype), out))
    nothing = out.new_empty(0)
    return out, lse.t() * 0.6931471805599453, nothing, nothing.clone()


_FP8_FACTOR = 2.0**8
"""Factor of FP8 probabilities before they are rounded: ``Max_offset`` in hopper/softmax.h."""
_API = "hopper/flash_api.cpp:mha_fwd"
"""A file of vLLM's FlashAttention at 617264c1."""
_API_METADATA = "hopper/flash_api.cpp:mha_fwd_get_scheduler_metadata"
_ONLY = "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type"
_DIVIDE = "Number of heads in key/value must divide number of heads in query"
_OUT_DTYPE = "output must have the same dtype as inputs. For FP8 input, output must have dtype BF16"


def _of_68_heads(a: Arguments) -> Arguments:
    sinks = torch.zeros(68, dtype=torch.bfloat16, device=a["q"].device)
    return {"s_aux": sinks, **{x: a[x].repeat(1, 17, 1) for x in ("q", "out")}}


def _of_80_and_64(a: Arguments) -> Arguments:
    return {**of_width(80, "out")(a), "v": a["v"], "out": a["out"]}


def _widths_fit(a: Any) -> bool:
    """True if this version has a kernel for keys and values of these widths."""
    width, of_values = a.q.shape[-1], a.v.shape[-1]
    return bool(
        of_values == width or (width <= 64 and of_values <= 512) or (128 < width <= 192 and 96 < of_values <= 128)
    )


def _aligned(a: Any) -> bool:
    return bool(a.q.shape[-1] % (16 if a.q.dtype == _FP8 else 8) == 0)


def _descale(name: str) -> Check:
    """The check of a scale, which is ignored without FP8."""

    def change(a: Arguments) -> Arguments:
        return {x: a[x].to(_FP8) for x in ("q", "k", "v")} | {name: torch.ones(2, device=a["q"].device)}

    def holds(a: Any) -> bool:
        scale = getattr(a, name)
        return a.dtype != _FP8 or scale is None or scale.shape == (a.plan.requests, a.kv_heads)

    return Check(f"{name} for each request", change, holds, f"{name} must have shape (batch_size, num_heads_k)", _API)


FORWARD: tuple[Check, ...] = (
    Check("float32 queries", but(q=torch.Tensor.float), lambda a: a.q.dtype in _DTYPES, _ONLY, _API),
    Check("keys of another dtype", but(k=torch.Tensor.half), lambda a: a.k.dtype == a.q.dtype,
          "query and key must have the same dtype", _API),
    Check("values of another dtype", but(v=torch.Tensor.half), lambda a: a.v.dtype == a.q.dtype,
          "query and value must have the same dtype", _API),
    Check("queries with a stride", but(q=strided_heads), lambda a: all(x.stride(-1) == 1 for x in (a.q, a.k, a.v)),
          "Input tensor must have contiguous last dimension", _API),
    Check("a page table of int64", but(page_table=torch.Tensor.long), lambda a: a.page_table.dtype == torch.int32,
          "page_table must have dtype torch.int32", _API),
    Check("a page table with a stride", but("page_table"), lambda a: a.page_table.stride(-1) == 1,
          "page_table must have contiguous last dimension", _API),
    Check("offsets with a stride", but("cu_seqlens_q"), lambda a: a.cu_seqlens_q.is_contiguous(),
          "cu_seqlens_q must be contiguous", _API),
    Check("offsets of int64", but(cu_seqlens_q=torch.Tensor.long), lambda a: a.cu_seqlens_q.dtype == torch.int32,
          "cu_seqlens_q must have dtype torch.int32", _API),
    Check("offsets of more requests", but(cu_seqlens_q=lambda x: torch.cat([x, x[-1:]])),
          lambda a: len(a.cu_seqlens_q) == len(a.page_table) + 1, "batch_size must be equal to batch_size_k", _API),
    Check("a head dim of 264", of_width(264, "out"), lambda a: a.q.shape[-1] <= 256,
          "FlashAttention forward only supports head dimension at most 256", _API),
    Check("heads that do not divide", but(q=lambda x: x[:, :3], out=lambda x: x[:, :3]),
          lambda a: a.q.shape[1] % a.k.shape[2] == 0, _DIVIDE, _API),
    Check("narrower values", _of_80_and_64, _widths_fit, "If V headdim is different from Q/K dim, ", _API),
    Check("keys of another width", but(k=lambda x: x[..., :32]), lambda a: a.k.shape[-1] == a.q.shape[-1],
          "k must have shape (num_pages, page_size, num_heads_k, head_size)", _API),
    Check("fewer pages of values", but(v=lambda x: x[:1]), lambda a: a.v.shape[:3] == a.k.shape[:3],
          "v must have shape (num_pages, page_size, num_heads_k, head_size_v)", _API),
    Check("lengths of int64", but(seqused_k=torch.Tensor.long), lambda a: a.seqused_k.dtype == torch.int32,
          "seqused_k must have dtype int32", _API),
    Check("lengths with a stride", but("seqused_k"), lambda a: a.seqused_k.is_contiguous(),
          "seqused_k must be contiguous", _API),
    Check("lengths of fewer requests", but(seqused_k=lambda x: x[:1]),
          lambda a: len(a.seqused_k) == len(a.page_table), "seqused_k must have shape (batch_size)", _API),
    Check("a head dim of 60", of_width(60, "out"), _aligned, "head_size should be a multiple of ", _API),
    Check("outputs of another dtype", but(out=torch.Tensor.half),
          lambda a: a.out.dtype == (torch.bfloat16 if a.q.dtype == _FP8 else a.q.dtype), _OUT_DTYPE, _API),
    Check("outputs with a stride", but(out=strided_heads), lambda a: a.out.stride(-1) == 1,
          "Output tensor must have contiguous last dimension", _API),
    Check("outputs of fewer rows", but(out=lambda x: x[:2]), lambda a: a.out.shape == (*a.q.shape[:2], a.v.shape[-1]),
          "out must have shape (total_q, num_heads, head_size_v)", _API),
)  # fmt: skip
"""Checks of ``fwd`` before it plans, in their order."""
PLANNED: tuple[Check, ...] = (
    Check("a longer schedule", zeros("scheduler_metadata", 99, torch.int32),
          lambda a: a.scheduler_metadata is None or a.scheduler_metadata.shape == (a.plan.size,),
          "scheduler_metadata must have shape (metadata_size)", _API),
    Check("a schedule with a stride", zeros("scheduler_metadata", 9, torch.int32, 2),
          lambda a: a.scheduler_metadata is None or a.scheduler_metadata.is_contiguous(),
          "scheduler_metadata must be contiguous", _API),
    Check("a schedule of int64", zeros("scheduler_metadata", 9, torch.int64),
          lambda a: a.scheduler_metadata is None or a.scheduler_metadata.dtype == torch.int32,
          "scheduler_metadata must have dtype int32", _API),
    Check("257 splits", to(num_splits=257), lambda a: a.plan.splits <= 256, "num_splits > 256 not supported", _API),
    *map(_descale, ("q_descale", "k_descale", "v_descale")),
    Check("sinks of 68 heads", _of_68_heads, lambda a: a.s_aux is None or a.heads <= 64,
          "We only support query heads <= 64 with S aux", _API),
    Check("sinks in float32", zeros("s_aux", 4, torch.float32),
          lambda a: a.s_aux is None or a.s_aux.dtype != torch.float32,
          "We only support bf16 dtype for S aux.", _API),
    Check("sinks in fp16", zeros("s_aux", 4, torch.float16),
          lambda a: a.s_aux is None or a.s_aux.dtype == torch.bfloat16,
          "We only support bf16 dtype for S aux.", _API),
    Check("sinks of fewer heads", zeros("s_aux", 2, torch.bfloat16),
          lambda a: a.s_aux is None or a.s_aux.shape == (a.heads,), "s_aux must have shape (num_heads)", _API),
    Check("sinks with a stride", zeros("s_aux", 4, torch.bfloat16, 2),
          lambda a: a.s_aux is None or a.s_aux.is_contiguous(),
          "s_aux must be contiguous", _API),
)  # fmt: skip
"""Checks of ``fwd`` once it has planned."""
METADATA: tuple[Check, ...] = (
    Check("float32", to(qkv_dtype=torch.float32), lambda a: a.qkv_dtype in _DTYPES, _ONLY, _API_METADATA),
    Check("heads that do not divide", to(num_heads=3), lambda a: a.num_heads % a.num_heads_k == 0, _DIVIDE,
          _API_METADATA),
)  # fmt: skip
"""Checks of ``get_scheduler_metadata``."""


def _lens(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of two requests, and offsets of their rows: one, and two."""
    lens, starts = ([9, 33], [0, 1, 3])
    return (torch.tensor(x, dtype=torch.int32, device=device) for x in (lens, starts))  # type: ignore[return-value]


def metadata_arguments(device: torch.device, _: Any = None) -> dict[str, Any]:
    """Arguments of ``get_scheduler_metadata`` that are accepted: 4 heads of width 64, 2 KV heads, pages of 16."""
    lens, starts = _lens(device)
    return {
        "batch_size": 2, "max_seqlen_q": 2, "max_seqlen_k": 48, "num_heads": 4, "num_heads_k": 2, "headdim": 64,
        "headdim_v": 64, "qkv_dtype": torch.bfloat16, "seqused_k": lens, "cu_seqlens_q": starts, "cu_seqlens_k": None,
        "cu_seqlens_k_new": None, "seqused_q": None, "leftpad_k": None, "page_size": 16, "max_seqlen_k_new": 0,
        "is_causal": True, "window_size_left": -1, "window_size_right": -1, "has_softcap": False, "num_splits": 0,
        "pack_gqa": None, "sm_margin": 0,
    }  # fmt: skip


def forward_arguments(
    device: torch.device, _: Any = None, *, most_keys: int = 48, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Arguments of ``fwd`` that are accepted: the same batch, and a page table with room for ``most_keys`` keys."""
    generator, pages = torch.Generator().manual_seed(1), -(-most_keys // 16)
    lens, starts = _lens(device)
    q = torch.randn(3, 4, 64, generator=generator).to(dtype).to(device)
    k, v = (torch.randn(2 * pages, 16, 2, 64, generator=generator).to(dtype).to(device) for _ in "kv")
    out = torch.full((3, 4, 64), torch.nan, dtype=torch.bfloat16 if dtype == _FP8 else dtype, device=device)
    return {
        "q": q, "k": k, "v": v, "k_new": None, "v_new": None, "q_v": None, "out": out, "cu_seqlens_q": starts,
        "cu_seqlens_k": None, "cu_seqlens_k_new": None, "seqused_q": None, "seqused_k": lens, "max_seqlen_q": 2,
        "max_seqlen_k": most_keys,
        "page_table": torch.arange(2 * pages, dtype=torch.int32, device=device).view(2, pages),
        "kv_batch_idx": None, "leftpad_k": None, "rotary_cos": None, "rotary_sin": None, "seqlens_rotary": None,
        "q_descale": None, "k_descale": None, "v_descale": None, "softmax_scale": 0.125, "is_causal": True,
        "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True,
        "scheduler_metadata": None, "num_splits": 0, "pack_gqa": None, "sm_margin": 0, "s_aux": None,
        "cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None,
    }  # fmt: skip


FUNCTIONS: Functions = {"fwd": (fwd, ("out",)), "get_scheduler_metadata": (get_scheduler_metadata, ())}
"""Functions of ``torch.ops._vllm_fa3_C``."""
_FAKE = SimpleNamespace(**{name: function for name, (function, _) in FUNCTIONS.items()})
REFUSALS = (
    Refusals("FlashAttention 3, fwd", "fwd", _FAKE, lambda: operators_of("vllm", "vllm_flash_attn/_vllm_fa3_C"),
             forward_arguments, FORWARD + PLANNED, output=lambda returned: returned[0]),
    Refusals("FlashAttention 3, get_scheduler_metadata", "get_scheduler_metadata", _FAKE,
             lambda: operators_of("vllm", "vllm_flash_attn/_vllm_fa3_C"), metadata_arguments, METADATA),
)  # fmt: skip
"""Entry points and their refusals."""
