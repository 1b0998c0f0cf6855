"""Checks of FlashInfer's compiled modules, below those of the package's own Python, which the fakes run.

The modules of MLA check nothing that the package's Python does not refuse before, and XQA refuses in the generator of
its source, which is Python too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from attn_testkit.backends.vendor.flashinfer_kernels import BATCH_DECODE, BATCH_PREFILL, MERGE_STATE
from attn_testkit.backends.vendor.provider import EntryPoint, VendorMissing, fake_of, real

from .refusals import Arguments, Check, Refusals, but, strided

_GROUP_SIZES = (1, 2, 3, 4, 6, 8, 16)
_MOST_THREADS = 1024
_TYPE = "Inconsistency of Tensor type"

_DECODE = "csrc/batch_decode.cu"
_SCHEDULER = "include/flashinfer/attention/scheduler.cuh"
_UTILS = "include/flashinfer/utils.cuh"
_CASCADE_CU = "csrc/cascade.cu:merge_state"
"""Files below ``flashinfer/data``."""


def _never_falls(offsets: torch.Tensor) -> bool:
    return not bool((offsets[1:] < offsets[:-1]).any())


DECODE_PLAN: tuple[Check, ...] = (
    Check("offsets of pages of int64", but(indptr=torch.Tensor.long), lambda a: a.indptr.dtype == torch.int32,
          f"{_TYPE}: indptr", f"{_DECODE}:BatchDecodeWithPagedKVCachePlan"),
    Check("5 query heads per KV head", lambda a: {"q": a["q"][:, :1].repeat(1, 10, 1), "num_qo_heads": 10},
          lambda a: a.num_qo_heads // a.num_kv_heads in _GROUP_SIZES, "Unsupported group_size: ",
          f"{_UTILS}:DISPATCH_GQA_GROUP_SIZE"),
)  # fmt: skip
DECODE_RUN: tuple[Check, ...] = (
    Check("page ids of int64", but(indices=torch.Tensor.long), lambda a: a.indices.dtype == torch.int32,
          f"{_TYPE}: paged_kv_indices", f"{_DECODE}:BatchDecodeWithPagedKVCacheRun"),
    Check("lengths of last pages of int64", but(last_page=torch.Tensor.long),
          lambda a: a.last_page.dtype == torch.int32, f"{_TYPE}: paged_kv_last_page_len",
          f"{_DECODE}:BatchDecodeWithPagedKVCacheRun"),
    Check("values with other strides than keys", but(v=lambda v: v.transpose(1, 2).contiguous().transpose(1, 2)),
          lambda a: a.k.stride() == a.v.stride(), "K/V strides differ at dim ",
          f"{_DECODE}:BatchDecodeWithPagedKVCacheRun"),
)  # fmt: skip
"""Checks of kernels without tensor cores. K and V must have the same strides there."""

PREFILL_PLAN: tuple[Check, ...] = (
    Check("4 query heads, 3 KV heads", lambda a: {"k": _three(a["k"]), "v": _three(a["v"]), "num_kv_heads": 3},
          lambda a: a.num_qo_heads % a.num_kv_heads == 0, "should be divisible by num_kv_heads ",
          f"{_SCHEDULER}:PrefillPlan"),
    Check("decreasing offsets of rows", but(qo_indptr=lambda x: x[[0, 2, 1, 3]]), lambda a: _never_falls(a.qo_indptr),
          "should be non-negative", f"{_SCHEDULER}:PrefillSplitQOKVIndptr"),
    Check("decreasing offsets of pages", but(indptr=lambda x: x[[0, 2, 1, 3]]), lambda a: _never_falls(a.kv_indptr),
          "should be non-negative", f"{_SCHEDULER}:PrefillSplitQOKVIndptr"),
)  # fmt: skip
"""Checks of kernels with tensor cores. A module is compiled for the dtype of the offsets of pages, and the kernel looks
at the dtype of no other integer."""


def _three(cache: torch.Tensor) -> torch.Tensor:
    return cache[:, :, :1].repeat(1, 1, 3, 1)


def _contiguous(name: str) -> Check:
    return Check(f"{name} with a stride", lambda a: {name: strided(a[name])},
                 lambda a: getattr(a, name).is_contiguous(), f"{name} must be contiguous", _CASCADE_CU)  # fmt: skip


def _dimensions(name: str, count: int) -> Check:
    text = f"{name} must be a {count}D tensor"
    return Check(f"{name} with one dimension more", lambda a: {name: a[name][None]},
                 lambda a: getattr(a, name).dim() == count, text, _CASCADE_CU)  # fmt: skip


def _threads(a: Any) -> int:
    """Threads of a block, which has all heads of a row (``include/flashinfer/attention/cascade.cuh:MergeState``)."""
    dim = a.v_a.shape[-1]
    return int(a.v_a.shape[1] * (dim // max(16 // a.v_a.element_size(), dim // 32)))


MERGE: tuple[Check, ...] = (
    *map(_contiguous, ("v_a", "s_a", "v_b", "s_b")),
    *(_dimensions(name, count) for name, count in (("v_a", 3), ("s_a", 2), ("v_b", 3), ("s_b", 2))),
    Check("v_b of fewer rows", but(v_b=lambda x: x[:1]), lambda a: a.v_a.shape == a.v_b.shape,
          "v_a.size(0) and v_b.size(0) mismatch", _CASCADE_CU),
    Check("s_b of fewer rows", but(s_b=lambda x: x[:1]), lambda a: a.s_a.shape == a.s_b.shape,
          "s_a.size(0) and s_b.size(0) mismatch", _CASCADE_CU),
    Check("sums of fewer rows", but(s_a=lambda x: x[:1], s_b=lambda x: x[:1]),
          lambda a: a.v_a.shape[:2] == a.s_a.shape, "", _CASCADE_CU),
    Check("states in float32", but(v_a=torch.Tensor.float, v_b=torch.Tensor.float),
          lambda a: a.v_a.dtype in (torch.float16, torch.bfloat16), "failed to dispatch data type", _CASCADE_CU),
    Check("160 heads of width 64", lambda a: {x: a[x].repeat_interleave(40, 1) for x in ("v_a", "s_a", "v_b", "s_b")},
          lambda a: _threads(a) <= _MOST_THREADS, "MergeState kernel launch failed: ", _CASCADE_CU),
)  # fmt: skip
"""Checks of ``merge_state`` in the order of ``cascade.cu``."""


def _ints(device: torch.device | str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _pages(device: torch.device, _: Any) -> dict[str, Any]:
    """Three requests of 6, 4 and 9 keys on pages of 4, and one row each."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(*shape, 64, generator=draw).half() for shape in ((3, 4), (8, 4, 2), (8, 4, 2)))
    return {
        "q": q.to(device), "k": k.to(device), "v": v.to(device), "qo_indptr": _ints("cpu", 0, 1, 2, 3),
        "indptr": _ints("cpu", 0, 2, 3, 6), "indices": _ints(device, 5, 1, 7, 2, 6, 3),
        "last_page": _ints("cpu", 2, 4, 1), "num_qo_heads": 4, "num_kv_heads": 2,
    }  # fmt: skip


def _states(device: torch.device, _: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    v_a, v_b = (torch.randn(3, 4, 64, generator=draw).half().to(device) for _ in "ab")
    s_a, s_b = (torch.randn(3, 4, generator=draw).to(device) for _ in "ab")
    return {"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b}


def _decoded(wrapper: Any, function: str, given: Arguments) -> Any:
    """Plan and run a decode without tensor cores."""
    made = wrapper(_workspace(given), use_tensor_cores=False, backend="fa2")
    made.plan(
        given["indptr"], given["indices"], given["last_page"], given["num_qo_heads"], given["num_kv_heads"], 64, 4,
        q_data_type=torch.float16, sm_scale=0.3,
    )  # fmt: skip
    return made.run(given["q"], (given["k"], given["v"]))


def _prefilled(wrapper: Any, function: str, given: Arguments) -> Any:
    """Plan and run a prefill."""
    made = wrapper(_workspace(given), backend="fa2")
    made.plan(
        given["qo_indptr"], given["indptr"], given["indices"], given["last_page"], given["num_qo_heads"],
        given["num_kv_heads"], 64, 4, causal=True, q_data_type=torch.float16, sm_scale=0.3,
    )  # fmt: skip
    return made.run(given["q"], (given["k"], given["v"]))


def _workspace(given: Arguments) -> torch.Tensor:
    return torch.empty(64 << 20, dtype=torch.uint8, device=given["q"].device)


def _package(entry: EntryPoint) -> Callable[[], Any]:
    def found() -> Any:
        try:
            return real(entry)
        except VendorMissing as missing:
            raise ImportError(str(missing)) from missing

    return found


def refusals() -> tuple[Refusals, ...]:
    """Entry points of FlashInfer's wrappers and their refusals. Raises ``VendorMissing`` without the package."""
    merge = SimpleNamespace(merge_state=fake_of(MERGE_STATE))
    sm80 = (80, 129)
    return (
        Refusals("FlashInfer, decode without tensor cores", "", fake_of(BATCH_DECODE), _package(BATCH_DECODE), _pages,
                 DECODE_PLAN + DECODE_RUN, sm80, _decoded, lambda returned: returned),
        Refusals("FlashInfer, prefill", "", fake_of(BATCH_PREFILL), _package(BATCH_PREFILL), _pages, PREFILL_PLAN,
                 sm80, _prefilled, lambda returned: returned),
        Refusals("FlashInfer, merge_state", "merge_state", merge,
                 lambda: SimpleNamespace(merge_state=_package(MERGE_STATE)()), _states, MERGE, sm80,
                 output=lambda returned: returned[0]),
    )  # fmt: skip
