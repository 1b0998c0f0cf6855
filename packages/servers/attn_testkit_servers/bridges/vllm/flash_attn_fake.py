"""FlashAttention 3's two compiled entry points in torch: vLLM's own ``vllm_flash_attn`` calls them as it does a GPU's.

Fixed shapes and device work only. Lengths, offsets and block tables are read when a graph is replayed, and so is the
schedule, which ``get_scheduler_metadata`` makes and vLLM keeps in a buffer of its builder. Splits of the keys are
decided on the host, as in the kernel (``flash_attn_plan``). A replay whose schedule has another layout than the
captured kernels expect leaves rows unwritten, as on an H100.

Both refuse the arguments that the compiled code refuses: ``_checks`` and ``_later_checks`` have its checks in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from attn_testkit_servers.fakes import paged_attention as paged

from .flash_attn_plan import SM_COUNT, SplitPlan, split_plan

Functions = Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]]
"""Name of an operator -> its function, and the arguments that it writes."""

_FP8 = torch.float8_e4m3fn
_DTYPES = (torch.float16, torch.bfloat16, _FP8)
_HEADS_IN_L2 = 1
"""An entry of the schedule by which the kernel orders heads; which number it is has no influence on results."""


def _refuse(checks: Iterable[tuple[bool, str]]) -> None:
    """Raise ``RuntimeError`` with the text of the first check that does not hold."""
    for holds, text in checks:
        if not holds:
            raise RuntimeError(text)


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
    _refuse((
        (qkv_dtype in _DTYPES, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type"),
        (num_heads % num_heads_k == 0, "Number of heads in key/value must divide number of heads in query"),
    ))  # fmt: skip
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

    None at all if the counter of tiles is not 0, and none of a request whose number of splits has no place in the
    partial results.
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
    _refuse(_checks(q, k, v, out, page_table, cu_seqlens_q, seqused_k))
    plan = split_plan(
        bs, max_seqlen_q, max_seqlen_k, heads, kv_heads, dim, q.dtype.itemsize, is_causal, window_size_left,
        window_size_right, num_splits,
    )  # fmt: skip
    _refuse(_later_checks(plan, scheduler_metadata, s_aux, heads, kv_heads, q_descale, k_descale, v_descale))
    # Rows and keys that a grid of the largest row count and key count reaches.
    blocks = min(blocks, -(-max_seqlen_k // k.shape[1]))
    bounds = torch.arange(bs + 1, dtype=torch.int32, device=q.device) * blocks
    rows = paged.rows_of_requests(cu_seqlens_q, rows_of_q)
    keys = paged.keys_of_pages(bounds, page_table[:, :blocks].reshape(-1), seqused_k, k.shape[1])
    q_lens = cu_seqlens_q.diff()
    seen = (rows.request[:, None] == keys.request[None]) & keys.valid[None] & rows.valid[:, None]
    last = (seqused_k.long() - q_lens.long())[rows.request] + rows.offset
    ahead = keys.offset[None] - last[:, None]
    if is_causal:
        window_size_right = 0
    if window_size_right >= 0:
        seen = seen & (ahead <= window_size_right)
    if window_size_left >= 0:
        seen = seen & (ahead >= -window_size_left)
    queries, key_rows, value_rows = q.float(), paged.gather(k, keys), paged.gather(v, keys)
    if q.dtype == _FP8:
        if q_descale is not None:
            queries = queries * q_descale[rows.request].repeat_interleave(heads // kv_heads, 1)[..., None]
        if k_descale is not None:
            key_rows = key_rows * k_descale[keys.request][..., None]
        if v_descale is not None:
            value_rows = value_rows * v_descale[keys.request][..., None]
    found, lse = paged.attend(
        queries, key_rows, value_rows, seen, softmax_scale, soft_cap=softcap, round_to=v.dtype, sinks=s_aux
    )
    written = rows.valid & (rows.offset < max_seqlen_q)
    if scheduler_metadata is not None:
        written = written & (rows.offset < _scheduled(scheduler_metadata, plan, bs, heads // kv_heads)[rows.request])
    out.copy_(torch.where(written[:, None, None], found.to(out.dtype), out))
    nothing = out.new_empty(0)
    return out, lse.t() * 0.6931471805599453, nothing, nothing.clone()


def _checks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor, seqused_k: torch.Tensor,
) -> Iterable[tuple[bool, str]]:  # fmt: skip
    """Checks of ``mha_fwd`` before it plans: whether each holds, and its text."""
    bs, (total, heads, dim), kv_heads = page_table.shape[0], q.shape, k.shape[2]
    aligned = 16 if q.dtype == _FP8 else 8
    out_dtype = torch.bfloat16 if q.dtype == _FP8 else q.dtype
    yield q.dtype in _DTYPES, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type"
    yield k.dtype == q.dtype, "query and key must have the same dtype"
    yield v.dtype == q.dtype, "query and value must have the same dtype"
    yield all(x.stride(-1) == 1 for x in (q, k, v)), "Input tensor must have contiguous last dimension"
    yield page_table.dtype == torch.int32, "page_table must have dtype torch.int32"
    yield page_table.stride(-1) == 1, "page_table must have contiguous last dimension"
    yield cu_seqlens_q.is_contiguous(), "cu_seqlens_q must be contiguous"
    yield cu_seqlens_q.dtype == torch.int32, "cu_seqlens_q must have dtype torch.int32"
    yield cu_seqlens_q.shape == (bs + 1,), "batch_size must be equal to batch_size_k"
    yield dim <= 256, "FlashAttention forward only supports head dimension at most 256"
    yield heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query"
    yield v.shape[-1] == dim, "If V headdim is different from Q/K dim, only some pairs are supported"
    yield k.shape == (*k.shape[:2], kv_heads, dim), "k must have shape (num_pages, page_size, num_heads_k, head_size)"
    yield v.shape[:3] == k.shape[:3], "v must have shape (num_pages, page_size, num_heads_k, head_size_v)"
    yield seqused_k.dtype == torch.int32, "seqused_k must have dtype int32"
    yield seqused_k.is_contiguous(), "seqused_k must be contiguous"
    yield seqused_k.shape == (bs,), "seqused_k must have shape (batch_size)"
    yield dim % aligned == 0, f"head_size should be a multiple of {aligned}"
    yield (
        out.dtype == out_dtype,
        "For FP16/BF16 input, output must have the same dtype as inputs. For FP8 input, output must have dtype BF16",
    )
    yield out.stride(-1) == 1, "Output tensor must have contiguous last dimension"
    yield out.shape == (total, heads, v.shape[-1]), "out must have shape (total_q, num_heads, head_size_v)"


def _later_checks(
    plan: SplitPlan, schedule: torch.Tensor | None, s_aux: torch.Tensor | None, heads: int, kv_heads: int,
    *descales: torch.Tensor | None,
) -> Iterable[tuple[bool, str]]:  # fmt: skip
    """Checks of ``mha_fwd`` once it has planned: whether each holds, and its text."""
    if schedule is not None:
        yield schedule.shape == (plan.size,), "scheduler_metadata must have shape (metadata_size)"
        yield schedule.is_contiguous(), "scheduler_metadata must be contiguous"
        yield schedule.dtype == torch.int32, "scheduler_metadata must have dtype int32"
    yield plan.splits <= 256, "num_splits > 256 not supported"
    for descale in descales:
        yield (
            descale is None or descale.shape == (plan.requests, kv_heads),
            "a descale must have shape (batch_size, num_heads_k)",
        )
    if s_aux is not None:
        yield heads <= 64, "We only support query heads <= 64 with S aux"
        yield s_aux.dtype == torch.bfloat16, "We only support bf16 dtype for S aux."
        yield s_aux.shape == (heads,), "s_aux must have shape (num_heads)"
        yield s_aux.is_contiguous(), "s_aux must be contiguous"


FUNCTIONS: Functions = {"fwd": (fwd, ("out",)), "get_scheduler_metadata": (get_scheduler_metadata, ())}
"""Functions of ``torch.ops._vllm_fa3_C``."""
