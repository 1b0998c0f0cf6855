"""Fakes of FlashInfer's paged wrappers: the package's own classes over compiled modules that compute in torch.

Everything a wrapper remembers, refuses or copies is done by the installed package's Python: a mask buffer selects the
custom mode for ever, a plan is frozen into a graph, ``window_left`` of a run must be the planned one. Only the compiled
module below the wrapper is replaced: its ``plan`` stores the schedule in the int workspace, and its ``run`` reads that
and the index buffers on the device, so an old plan is as stale in a replay as on a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from attn_testkit.backends.vendor.provider import swapped

from . import paged_attention as paged
from .flashinfer_checks import DECODE_PLAN, DECODE_RUN, MERGE, PREFILL_PLAN
from .refusals import refuse

_CAUSAL, _CUSTOM = 1, 2  # flashinfer.utils.MaskMode; checked in _compiled()


def _leave(int_workspace: torch.Tensor, pinned: torch.Tensor, *parts: torch.Tensor) -> list[int]:
    """Write int32 host tensors into the int workspace, one after another; returns where each begins and ends.

    They go through the wrapper's one pinned buffer by an asynchronous copy, as in ``DecodePlan`` (scheduler.h), so the
    next plan must not begin before the device has made that copy (vLLM #40756).
    """
    whole = torch.cat([part.to(torch.int32) for part in parts])
    if whole.numel() * 4 > int_workspace.numel():
        # Of AlignedAllocator (allocator.h). The kernel's plan is larger than this one.
        raise RuntimeError(f"Buffer overflow when allocating memory for a plan with size {whole.numel() * 4}")
    source = pinned[: whole.numel() * 4]
    source.copy_(whole.view(torch.uint8))
    int_workspace[: whole.numel() * 4].copy_(source, non_blocking=True)
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    return [0, *ends]


def _found(int_workspace: torch.Tensor, bounds: list[int]) -> list[torch.Tensor]:
    whole = int_workspace.view(torch.int32)
    return [whole[start:end] for start, end in itertools.pairwise(bounds)]


def _decode_plan(
    float_workspace: torch.Tensor, int_workspace: torch.Tensor, pinned: torch.Tensor, indptr: torch.Tensor,
    batch_size: int, num_qo_heads: int, num_kv_heads: int, page_size: int, graph: bool, window_left: int,
    soft_cap: float, head_dim_qk: int, head_dim_vo: int, empty_q: torch.Tensor, empty_kv: torch.Tensor,
) -> list[int]:  # fmt: skip
    refuse(DECODE_PLAN, indptr=indptr, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)
    return _leave(int_workspace, pinned, (indptr[1:] - indptr[:-1]) * page_size)


def _decode_run(
    has_window: bool, has_cap: bool,
    float_workspace: torch.Tensor, int_workspace: torch.Tensor, plan_info: list[int], q: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last_page: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor | None, layout: int, window_left: int, enable_pdl: bool,
    alibi: torch.Tensor | None, soft_cap: float, sm_scale: float, rope_scale: float, rope_theta: float,
) -> None:  # fmt: skip
    refuse(DECODE_RUN, indptr=indptr, indices=indices, last_page=last_page, k=k_cache, v=v_cache)
    (planned,) = _found(int_workspace, plan_info)
    one = torch.ones_like(last_page)
    qo_indptr = torch.arange(q.shape[0] + 1, device=q.device)
    _attend_pages(
        q, k_cache, v_cache, qo_indptr, indptr, indices, last_page, out, lse, layout == 1, planned_q=one,
        planned_kv=planned, window_left=window_left if has_window else -1,
        soft_cap=soft_cap if has_cap else 0.0, sm_scale=sm_scale, round_to=None,
    )  # fmt: skip


def _prefill_plan(
    float_workspace: torch.Tensor, int_workspace: torch.Tensor, pinned: torch.Tensor, qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor, kv_lens: torch.Tensor, total_rows: int, batch_size: int, num_qo_heads: int,
    num_kv_heads: int, page_size: int, graph: bool, head_dim_qk: int, head_dim_vo: int, causal: bool, window_left: int,
    fixed_split_size: int, disable_split_kv: bool, colocated_ctas: int = 0, uniform_q_len: int = 0,
) -> list[int]:  # fmt: skip
    refuse(
        PREFILL_PLAN, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, qo_indptr=qo_indptr, kv_indptr=kv_indptr
    )  # fmt: skip
    return _leave(int_workspace, pinned, qo_indptr[1:] - qo_indptr[:-1], (kv_indptr[1:] - kv_indptr[:-1]) * page_size)


def _prefill_run(
    has_window: bool, has_cap: bool,
    float_workspace: torch.Tensor, int_workspace: torch.Tensor, plan_info: list[int], q: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, qo_indptr: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor,
    last_page: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, mask_mode: int, layout: int,
    window_left: int, enable_pdl: bool, custom_mask: torch.Tensor | None, mask_indptr: torch.Tensor | None,
    alibi: torch.Tensor | None, prefix_len: torch.Tensor | None, token_pos: torch.Tensor | None,
    max_item_len: torch.Tensor | None, soft_cap: float, sm_scale: float, *others: Any,
) -> None:  # fmt: skip
    qo_indptr, indices, last_page = (_read_as(indptr, each) for each in (qo_indptr, indices, last_page))
    planned_q, planned_kv = _found(int_workspace, plan_info)
    _attend_pages(
        q, k_cache, v_cache, qo_indptr, indptr, indices, last_page, out, lse, layout == 1, planned_q=planned_q,
        planned_kv=planned_kv, window_left=window_left if has_window else -1,
        soft_cap=soft_cap if has_cap else 0.0, sm_scale=sm_scale, round_to=q.dtype,
        causal=mask_mode == _CAUSAL, mask=(custom_mask, mask_indptr) if mask_mode == _CUSTOM else None,
    )  # fmt: skip


def _ragged_run(
    has_window: bool, has_cap: bool,
    float_workspace: torch.Tensor, int_workspace: torch.Tensor, plan_info: list[int], q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, mask_mode: int, layout: int, window_left: int, enable_pdl: bool,
    custom_mask: torch.Tensor | None, mask_indptr: torch.Tensor | None, alibi: torch.Tensor | None,
    prefix_len: torch.Tensor | None, token_pos: torch.Tensor | None, max_item_len: torch.Tensor | None,
    soft_cap: float, sm_scale: float, *others: Any,
) -> None:  # fmt: skip
    """Keys [S, Hk, D] of one request after the other, as pages of one slot, in order."""
    qo_indptr = _read_as(kv_indptr, qo_indptr)
    planned_q, planned_kv = _found(int_workspace, plan_info)
    if layout == 1:
        raise NotImplementedError("the fake of the ragged wrapper supports layout NHD, not HND")
    _attend_pages(
        q, k.unsqueeze(1), v.unsqueeze(1), qo_indptr, kv_indptr, torch.arange(len(k), device=q.device),
        torch.ones_like(kv_indptr[1:]), out, lse, False, planned_q=planned_q, planned_kv=planned_kv,
        window_left=window_left if has_window else -1, soft_cap=soft_cap if has_cap else 0.0, sm_scale=sm_scale,
        round_to=q.dtype, causal=mask_mode == _CAUSAL,
        mask=(custom_mask, mask_indptr) if mask_mode == _CUSTOM else None,
    )  # fmt: skip


def _read_as(like: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Numbers as a kernel reads them that was compiled for the dtype of ``like``: others are misread, not refused."""
    if numbers.dtype == like.dtype:
        return numbers
    if numbers.dtype.itemsize < like.dtype.itemsize:
        raise NotImplementedError(f"{numbers.dtype} read as {like.dtype}: the kernel reads past the end")
    return numbers.contiguous().view(like.dtype)[: len(numbers)]


def _of_pages(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """A latent cache as the kernel addresses it: slots of the plan's pages, by the strides of the cache it is given."""
    if cache.shape[1] == page_size:
        return cache
    page, slot, *inner = cache.stride()
    room = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    pages = max((room - (page_size - 1) * slot - cache.shape[-1]) // page + 1, 0)
    return cache.as_strided((min(pages, cache.shape[0]), page_size, cache.shape[-1]), (page, slot, *inner))


def _attend_pages(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, qo_indptr: torch.Tensor, indptr: torch.Tensor,
    indices: torch.Tensor, last_page: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, heads_first: bool, *,
    planned_q: torch.Tensor, planned_kv: torch.Tensor, window_left: int, soft_cap: float, sm_scale: float,
    round_to: torch.dtype | None, causal: bool = False, mask: tuple[Any, Any] | None = None,
) -> None:  # fmt: skip
    page_size = k_cache.shape[2 if heads_first else 1]
    pages = indptr[1:] - indptr[:-1]
    kv_lens = torch.where(pages > 0, (pages - 1) * page_size + last_page, 0)
    q_lens = qo_indptr[1:] - qo_indptr[:-1]
    rows = paged.rows_of_requests(qo_indptr, q.shape[0])
    keys = paged.keys_of_pages(indptr, indices, kv_lens, page_size)
    # The schedule holds tiles of the planned lengths, and a longer batch has no tile for the rest.
    planned_rows = rows.valid & (rows.offset < planned_q[rows.request])
    planned_keys = keys.valid & (keys.offset < planned_kv[keys.request])
    loaded = (rows.request[:, None] == keys.request[None]) & planned_rows[:, None] & planned_keys[None]
    visible = loaded
    window = paged.windowed(rows, keys, q_lens, kv_lens, window_left)
    if window is not None:
        visible = visible & window
    if mask is not None:
        visible = visible & paged.mask_bits(mask[0], mask[1], rows, keys, kv_lens)
    elif causal:
        visible = visible & paged.causal(rows, keys, q_lens, kv_lens)
    result, sums = paged.attend(
        q, paged.gather(k_cache, keys, heads_first), paged.gather(v_cache, keys, heads_first), visible, sm_scale,
        soft_cap=soft_cap, round_to=round_to, loaded=loaded,
    )  # fmt: skip
    # Rows without a tile are not written.
    out.copy_(torch.where(planned_rows[:, None, None], result.to(out.dtype), out))
    if lse is not None:
        lse.copy_(torch.where(planned_rows[:, None], sums, lse))


def _mla_plan(
    float_workspace: torch.Tensor, int_workspace: torch.Tensor, pinned: torch.Tensor, qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor, kv_len: torch.Tensor, num_heads: int, head_dim_o: int, causal: bool,
) -> list[int]:  # fmt: skip
    # Two blocks share the rows of a request if there are many: the grid has another shape then.
    cluster = 2 if int(qo_indptr[-1]) * num_heads // kv_len.shape[0] > 64 else 1
    return [cluster, *_leave(int_workspace, pinned, qo_indptr, kv_indptr, kv_len, torch.tensor([cluster]))]


def _mla_run(
    float_workspace: torch.Tensor, int_workspace: torch.Tensor, plan_info: list[int], q_nope: torch.Tensor,
    q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor, kv_indices: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, mask_mode: int, num_heads: int, page_size: int, sm_scale: float, base_e: bool,
    ckv_scale: float, kpe_scale: float, ckv_scale_arr: torch.Tensor | None,
) -> None:  # fmt: skip
    if ckv_scale_arr is not None:
        raise NotImplementedError("the fake of MLA does not support per-block scales")
    ckv_cache, kpe_cache = (_of_pages(cache, page_size) for cache in (ckv_cache, kpe_cache))
    # The kernel reads lengths and offsets from the plan, not from the caller's buffers.
    qo_indptr, kv_indptr, kv_lens, cluster = _found(int_workspace, plan_info[1:])
    rows = paged.rows_of_requests(qo_indptr, q_nope.shape[0])
    keys = paged.keys_of_pages(kv_indptr, kv_indices, kv_lens, page_size)
    visible = loaded = (rows.request[:, None] == keys.request[None]) & rows.valid[:, None] & keys.valid[None]
    if mask_mode == _CAUSAL:
        visible = visible & paged.causal(rows, keys, qo_indptr[1:] - qo_indptr[:-1], kv_lens)
    latent = paged.gather(ckv_cache.unsqueeze(2), keys) * ckv_scale
    rope = paged.gather(kpe_cache.unsqueeze(2), keys) * kpe_scale
    result, sums = paged.attend(
        torch.cat([q_nope, q_pe], -1), torch.cat([latent, rope], -1), latent, visible, sm_scale,
        round_to=q_nope.dtype, loaded=loaded,
    )  # fmt: skip
    # A launch of another cluster size than the plan's leaves work without a block. NaN if that is left to chance.
    result = torch.where(cluster == plan_info[0], result, torch.nan)
    out.copy_(torch.where(rows.valid[:, None, None], result.to(out.dtype), out))
    if lse is not None:
        lse.copy_(sums * 0.6931471805599453 if base_e else sums)


# A module is compiled with or without a window and a soft cap, as the plan says. A run's argument for something that
# was compiled out is ignored (sglang #31501, #33915).


@functools.cache
def _decode_module(*compiled_for: Any) -> Any:
    window, cap = compiled_for[-2:]
    return SimpleNamespace(plan=_decode_plan, run=functools.partial(_decode_run, bool(window), bool(cap)))


@functools.cache
def _prefill_module(backend: str, *compiled_for: Any) -> Any:
    if backend != "fa2":
        raise NotImplementedError(f"the fake of the paged wrappers supports backend fa2, not {backend}")
    window, cap, _ = compiled_for[-3:]
    compiled = bool(window), bool(cap)
    paged_run, ragged_run = (functools.partial(run, *compiled) for run in (_prefill_run, _ragged_run))
    return SimpleNamespace(plan=_prefill_plan, paged_run=paged_run, ragged_run=ragged_run)


@functools.cache
def _mla_module(backend: str, *args: Any) -> Any:
    return SimpleNamespace(plan=_mla_plan, run=_mla_run)


def _segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, packed_indptr: torch.Tensor, bitorder: str, packed: torch.Tensor
) -> None:
    """Bits of each segment packed from its own first byte on. Runs in ``plan``, outside captures."""
    shifts = torch.arange(8, device=x.device) if bitorder == "little" else torch.arange(7, -1, -1, device=x.device)
    at, source = packed_indptr.tolist(), indptr.tolist()
    for index in range(len(at) - 1):
        bits = x[source[index] : source[index + 1]].long()
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
        packed[at[index] : at[index + 1]] = (bits << shifts).sum(-1).to(torch.uint8)


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _compiled() -> dict[str, Any]:
    from flashinfer.utils import MaskMode

    assert (MaskMode.CAUSAL.value, MaskMode.CUSTOM.value) == (_CAUSAL, _CUSTOM)
    backends = "flashinfer.mla._batch_mla._backends"
    found = {
        "flashinfer.decode:get_batch_decode_module": _decode_module,
        "flashinfer.decode:get_batch_prefill_module": _prefill_module,
        "flashinfer.prefill:get_batch_prefill_module": _prefill_module,
        "flashinfer.quantization.packbits:get_quantization_module": lambda: SimpleNamespace(
            segment_packbits=_segment_packbits
        ),
        f"{backends}.fa2_backend:get_batch_mla_module": _mla_module,
        f"{backends}.fa3_backend:get_batch_mla_module": _mla_module,
    }
    if torch.version.cuda is None:
        # The package compares the version of CUDA, and a CPU build of torch has none.
        found[f"{backends}._fa_common:is_sm90a_supported"] = _is_hopper
        found["flashinfer.mla._batch_mla._auto_policy:is_sm90a_supported"] = _is_hopper
    return found


def _planning_in_torch(original: Any, **more: Any) -> type:
    """The package's class, except for what its plans compile. ``more``: other names that are faked in a plan."""
    planned = original.plan

    @functools.wraps(planned)
    def plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        with swapped({**_compiled(), **more}):
            return planned(self, *args, **kwargs)

    names = {"plan": plan}
    if getattr(original, "begin_forward", None) is planned:
        names["begin_forward"] = plan  # its older name, which servers call
    return type(f"Fake{original.__name__}", (original,), names)


def _merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, v_merged: torch.Tensor,
    s_merged: torch.Tensor,
) -> None:  # fmt: skip
    """Merge states whose log-sum-exps are in base 2. Empty states have weight 0, also if both are empty."""
    refuse(MERGE, v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    top = torch.maximum(s_a, s_b)
    weight_a, weight_b = (torch.exp2(torch.where(s == -torch.inf, s, s - top)) for s in (s_a, s_b))
    total = weight_a + weight_b
    merged = (v_a.float() * weight_a[..., None] + v_b.float() * weight_b[..., None]) / total.clamp(min=1e-38)[..., None]
    v_merged.copy_(merged.to(v_a.dtype))
    s_merged.copy_(top + total.log2())


def make_merge_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """``flashinfer.merge_state`` over a compiled module that computes in torch."""
    fakes = {"flashinfer.cascade:get_cascade_module": lambda: SimpleNamespace(merge_state=_merge_state)}

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with swapped(fakes):
            return original(*args, **kwargs)

    return call


def make_paged_wrapper(original: type) -> type:
    """A class that is FlashInfer's decode or prefill wrapper, planned onto torch."""
    return _planning_in_torch(original)


def make_ragged_wrapper(original: type) -> type:
    """A class that is FlashInfer's ragged prefill wrapper, planned onto torch, as if its fa2 kernels were chosen."""
    return _planning_in_torch(original, **{"flashinfer.prefill:determine_attention_backend": lambda *_, **__: "fa2"})


def make_mla_wrapper(original: type) -> type:
    """A class that is FlashInfer's MLA wrapper, planned onto torch."""
    return _planning_in_torch(original)
