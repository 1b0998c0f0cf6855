"""Fakes of FlashInfer's ``trtllm_*`` entry points: the package's Python over modules that compute in torch.

Arguments are dispatched, refused, defaulted and reshaped by the installed package. What is replaced is the compiled
module below: XQA (SM90, SM120) and trtllm-gen (SM100). The package passes raw pointers to both. So a wrong dtype is
misread and not refused, strides that the kernel ignores are ignored, and lengths, tables, masks and counters are read
on the device at every replay.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from attn_testkit.backends.vendor.provider import swapped

from . import page_tables as paged
from .refusals import refuse
from .trtllm_checks import CONTEXTS, DECODE, SPARSE

_LOG2E = 1.4426950408889634
_SM_COUNT = {90: 132, 100: 148}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first element on, as read by a kernel that gets a shape but no strides."""
    strides = []
    step = 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= size
    return tensor.as_strided(tensor.shape, tuple(reversed(strides)))


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    """``data_ptr()`` of a tensor as an ``int*``: other integers are misread."""
    return tensor if tensor.dtype == torch.int32 else tensor.contiguous().view(-1).view(torch.int32)


def _lens(tensor: torch.Tensor, bs: int) -> torch.Tensor:
    return _int32(tensor).reshape(-1)[:bs]


def _table(tensor: torch.Tensor, bs: int) -> torch.Tensor:
    """[bs, width] int32, with contiguous rows."""
    return _int32(_raw(tensor)).reshape(-1)[: bs * tensor.shape[-1]].view(bs, tensor.shape[-1])


def _unless(dirty: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """NaN if counters are not zero at launch: the kernel would then reduce too few of the parts, or none."""
    return out.masked_fill(dirty, torch.nan)


def _xqa_module(*compiled_for: Any, **named: Any) -> SimpleNamespace:
    """``flashinfer.xqa.get_xqa_module``: the package's own generator refuses arguments, and the module that it would
    compile is replaced."""
    importlib.import_module("flashinfer.jit.xqa").gen_xqa_module(*compiled_for, **named)
    return SimpleNamespace(xqa=_xqa)


def _xqa(
    run_sm90_fp8_mha: bool, sm_count: int, num_kv_heads: int, sliding_win_size: int, q_scale: float,
    output: torch.Tensor, rcp_out_scale: float, q: torch.Tensor, sinks: torch.Tensor | None, k_cache: torch.Tensor,
    v_cache: torch.Tensor, k_sf_cache: torch.Tensor | None, v_sf_cache: torch.Tensor | None, page_table: torch.Tensor,
    max_seq_len: int, seq_lens: torch.Tensor, batch_size: int, kv_scale: float, semaphores: torch.Tensor,
    workspace_buffer: torch.Tensor, enable_pdl: bool, q_seq_len: int, q_cu_seq_lens: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:  # fmt: skip
    """The kernel: caches [pages, P, Hk, D] by their strides, everything else by its address."""
    heads, dim = q.shape[-2], q.shape[-1]
    lens = _lens(seq_lens, batch_size)
    rows = _raw(q).reshape(batch_size, q_seq_len, heads, dim)
    if run_sm90_fp8_mha:  # the FP8 kernel of SM90 rounds queries and probabilities to FP8; the generic one widens KV
        rows = rows.float().clamp(-paged.FP8_MAX, paged.FP8_MAX).to(paged.FP8)
    width = torch.full_like(lens, q_seq_len)
    queries = paged.Queries(rows, width.long(), torch.arange(batch_size, device=q.device) * q_seq_len)
    table = _table(page_table, batch_size)
    keys = paged.gather(k_cache, table, lens)
    # One set of strides is taken from K and used for both.
    values = paged.gather(v_cache.as_strided(v_cache.shape, k_cache.stride()), table, lens)
    seen = paged.visible_causal(queries, keys, sliding_win_size - 1)
    if mask is not None:
        seen = _draft_mask(mask, queries, keys, sliding_win_size)
    out = paged.attend(
        rows, keys.rows, values.rows, seen, q_scale * kv_scale / dim**0.5,
        probabilities=paged.FP8 if run_sm90_fp8_mha else q.dtype,
        sinks=None if sinks is None else sinks.reshape(-1),
    )  # fmt: skip
    out = paged.through_scratch(out * (kv_scale * rcp_out_scale), workspace_buffer)
    counters = semaphores.view(torch.int32)[: batch_size * num_kv_heads]
    output.copy_(_unless(counters.ne(0).any(), out).view(output.shape))


def _draft_mask(mask: torch.Tensor, queries: paged.Queries, keys: paged.Keys, win_size: int) -> torch.Tensor:
    """[bs, n, S]: the prefix is always visible, and of the draft block the nodes in the row's bits; both only inside
    the window."""
    bs, n = queries.rows.shape[:2]
    row_bytes = 4 * ((n + 31) // 32)
    held = mask.contiguous().view(-1).view(torch.uint8)
    if held.numel() < bs * n * row_bytes:
        raise RuntimeError(f"XQA reads {bs * n * row_bytes} bytes of mask, but the mask has only {held.numel()}")
    bits = held[: bs * n * row_bytes].view(bs, n, row_bytes)
    at = torch.arange(keys.rows.shape[1], device=mask.device)
    node = (at - (keys.lens - n)[:, None]).clamp(0, n - 1)
    byte = bits.gather(2, (node // 8)[:, None].expand(bs, n, -1))
    allowed = (byte.int() >> (node % 8)[:, None].int()) & 1 != 0
    first = (keys.lens - n)[:, None, None]
    seen = (at < keys.lens[:, None, None]) & ((at < first) | allowed)
    if win_size > 0:
        row = torch.arange(n, device=mask.device)[:, None]
        seen &= at > first + row - win_size
    return seen


def _lens_of_rows(
    seq_lens: torch.Tensor, bs: int, q_len: int, top_k: int, cum_seq_lens_q: torch.Tensor | None
) -> torch.Tensor:
    """[bs * q_len] int32, sparse MLA: number of columns that each query row reads in its row of the table.

    These are as many as the keys that a causal row sees, but at most ``top_k`` (``fmhaReduction.cu``). An index of -1
    among them is a key outside the pool: the package's documentation allows -1 only after them.
    """
    refuse(SPARSE, top_k=top_k)
    if cum_seq_lens_q is not None:
        raise NotImplementedError("the fake of sparse MLA supports queries of four dimensions, not cum_seq_lens_q")
    seen = _lens(seq_lens, bs)[:, None] - q_len + 1 + torch.arange(q_len, dtype=torch.int32, device=seq_lens.device)
    return seen.clamp(0, top_k).flatten()


def _tokens(cache: torch.Tensor) -> torch.Tensor:
    """[tokens, 1, 1, D] from latent pages: sparse MLA ignores pages and the strides between them."""
    return _raw(cache).flatten(0, 2)[:, None, None]


def _scale(value: float | torch.Tensor) -> float | torch.Tensor:
    """Scale of the first product: a tensor arrives in log2 form."""
    return value / _LOG2E if isinstance(value, torch.Tensor) else value


def _gen_decode(
    out: torch.Tensor, out_sf: Any, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    workspace: torch.Tensor, counters: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int, bmm1: float | torch.Tensor, bmm2: float | torch.Tensor, o_sf_scale: float,
    o_sf_vec_size: int, o_sf_start: int, batch_size: int, window_left: int, sparse_top_k: int, sm_count: int,
    enable_pdl: bool, workspace_size: int, sinks: torch.Tensor | None, cum_seq_lens_q: torch.Tensor | None,
    *rest: Any,
) -> None:  # fmt: skip
    """Decode kernel; also for MLA, where both caches are the one latent cache."""
    refuse(DECODE, query=query, out=out, k=k_cache, v=v_cache, sinks=sinks)
    if sparse_top_k > 0:
        seq_lens = _lens_of_rows(seq_lens, batch_size, max_q_len, sparse_top_k, cum_seq_lens_q)
        k_cache = v_cache = _tokens(k_cache)
        batch_size, max_q_len = batch_size * max_q_len, 1
    if cum_seq_lens_q is None:
        starts = torch.arange(batch_size, device=query.device) * max_q_len
        counts = torch.full_like(starts, max_q_len)
    else:
        bounds = _lens(cum_seq_lens_q, batch_size + 1)
        starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
    blocks = max(batch_size * query.shape[1], sm_count)
    dirty = counters.view(torch.int32)[:blocks].ne(0).any()
    _gen_attend(
        out, query, k_cache, v_cache, workspace, block_tables, seq_lens, batch_size, starts, counts, max_q_len,
        max_kv_len, window_left, bmm1, bmm2, sinks, dirty,
    )  # fmt: skip


def _gen_context(
    out: torch.Tensor, out_sf: Any, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    workspace: torch.Tensor, counters: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int, bmm1: float | torch.Tensor, bmm2: float | torch.Tensor, o_sf_scale: float,
    o_sf_vec_size: int, o_sf_start: int, batch_size: int, window_left: int, cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor, sm_count: int, enable_pdl: bool, workspace_size: int,
    sinks: torch.Tensor | None, *rest: Any,
) -> None:  # fmt: skip
    refuse(CONTEXTS, query=query, out=out, k=k_cache, v=v_cache, sinks=sinks)
    bounds = _lens(cum_seq_lens_q, batch_size + 1)
    _gen_attend(
        out, query, k_cache, v_cache, workspace, block_tables, seq_lens, batch_size, bounds[:-1],
        bounds[1:] - bounds[:-1], max_q_len, max_kv_len, window_left, bmm1, bmm2, sinks, None,
    )  # fmt: skip


def _gen_attend(
    out: torch.Tensor, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, workspace: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, bs: int, starts: torch.Tensor, counts: torch.Tensor,
    max_q_len: int, max_kv_len: int, window_left: int, bmm1: float | torch.Tensor, bmm2: float | torch.Tensor,
    sinks: torch.Tensor | None, dirty: torch.Tensor | None,
) -> None:  # fmt: skip
    """Caches are [..., Hk, P, D] by their strides. Causal, aligned to the end of ``seq_lens``."""
    queries = paged.pad_rows(query, starts, counts, max_q_len)
    lens, table = _lens(seq_lens, bs), _table(block_tables, bs)
    keys = paged.gather(k_cache.transpose(-3, -2), table, lens)
    if k_cache.data_ptr() == v_cache.data_ptr():
        values = keys.rows[..., : out.shape[-1]]
    else:
        values = paged.gather(v_cache.transpose(-3, -2), table, lens).rows
    # Blocks of work are laid out for max_kv_len keys: keys after it are in no block.
    seen = paged.visible_causal(queries, keys, window_left)
    seen &= torch.arange(seen.shape[-1], device=seen.device) < max_kv_len
    result = paged.attend(queries.rows, keys.rows, values, seen, _scale(bmm1), probabilities=query.dtype, sinks=sinks)
    result = paged.through_scratch(result * bmm2, workspace)
    if dirty is not None:
        result = _unless(dirty, result)
    paged.pack_rows(result, queries, out.view(-1, *out.shape[-2:]))


def _on(sm: int, module: str, *names: str) -> dict[str, Callable[..., Any]]:
    """Answers to the package's questions about the device, for an SM that is not here."""
    answers: Mapping[str, Callable[..., Any]] = {
        "get_compute_capability": lambda device: divmod(sm, 10),
        "get_device_sm_count": lambda device: _SM_COUNT[sm],
        "device_support_pdl": lambda device: True,
    }
    return {f"{module}:{name}": answers[name] for name in names}


def _over(original: Callable[..., Any], fakes: Mapping[str, Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        with swapped(fakes):
            return original(*args, **kwargs)

    return call


def make_xqa_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    """``trtllm_batch_decode_with_kv_cache`` as on SM90."""
    asked = ("get_compute_capability", "get_device_sm_count", "device_support_pdl")
    return _over(
        original,
        {
            **_on(90, "flashinfer.decode", *asked),
            **_on(90, "flashinfer.xqa", *asked),
            "flashinfer.xqa:get_xqa_module": _xqa_module,
        },
    )


def _gen_module() -> SimpleNamespace:
    return SimpleNamespace(trtllm_paged_attention_decode=_gen_decode, trtllm_paged_attention_context=_gen_context)


def make_gen_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    """``trtllm_batch_decode_with_kv_cache`` as on SM100."""
    asked = ("get_compute_capability", "get_device_sm_count", "device_support_pdl")
    return _over(
        original,
        {**_on(100, "flashinfer.decode", *asked), "flashinfer.decode:get_trtllm_gen_fmha_module": _gen_module},
    )


def make_gen_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """``trtllm_batch_context_with_kv_cache``, which supports only SM100."""
    return _over(
        original,
        {
            **_on(100, "flashinfer.prefill", "get_device_sm_count", "device_support_pdl"),
            "flashinfer.prefill:get_trtllm_gen_fmha_module": _gen_module,
        },
    )


def make_gen_mla(original: Callable[..., Any]) -> Callable[..., Any]:
    """``trtllm_batch_decode_with_kv_cache_mla`` as on SM100."""
    asked = ("get_compute_capability", "get_device_sm_count", "device_support_pdl")
    return _over(
        original,
        {
            **_on(100, "flashinfer.mla._core", *asked),
            "flashinfer.mla._core:get_trtllm_gen_fmha_module": _gen_module,
            # Every call asks whether CuTe DSL would do as well, and imports its compiler to know.
            "flashinfer.mla._core:_cute_dsl_incompatibility_reason": lambda *args, **kwargs: "not emulated",
        },
    )
