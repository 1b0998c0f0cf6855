"""Checks of FlashInfer's trtllm-gen launchers, below those of the package's own Python, which the fakes run.

XQA's wrapper reads raw pointers and checks none of the fake's arguments.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from attn_testkit.backends.vendor.provider import EntryPoint, VendorMissing, fake_of, real
from attn_testkit.backends.vendor.trtllm_kernels import CONTEXT, DECODE_GEN, DECODE_MLA, SEMAPHORE_BYTES

from .page_tables import FP8
from .refusals import Arguments, Check, Refusals

_LAUNCHER = "csrc/trtllm_fmha_kernel_launcher.cu"
_DECODE = f"{_LAUNCHER}:trtllm_paged_attention_decode"
_CONTEXT = f"{_LAUNCHER}:trtllm_paged_attention_context"
_RUNNER = f"{_LAUNCHER}:trtllm_paged_attention_launcher"
_PARAMS = "include/flashinfer/trtllm/fmha/kernelParams.h:setKernelParams"
"""Files below ``flashinfer/data``."""
_DIMS = ((64, 64), (128, 128), (256, 256), (576, 512), (320, 256))
_PAGES = (16, 32, 64, 128)
_MISSING = "Missing TRTLLM-GEN kernel"


def _caches(key: Any, value: Any) -> Any:
    return lambda a: {"kv_cache": (key(a["kv_cache"][0]), value(a["kv_cache"][1]))}


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def _narrow(x: torch.Tensor) -> torch.Tensor:
    return x[..., :32].contiguous()


def _of_caches(source: str) -> tuple[Check, ...]:
    """Checks of both launchers."""
    return (
        Check("fewer pages of values", _caches(_unchanged, lambda v: v[:-1]), lambda a: a.k.shape == a.v.shape, "",
              source),
        Check("narrower keys and values", _caches(_narrow, _narrow), lambda a: a.k.shape[-1] == a.query.shape[-1],
              "head_dim_k and head_dim_q must be the same, got ", source),
        Check("sinks in bf16", lambda a: {"sinks": torch.zeros(4, dtype=torch.bfloat16, device=a["query"].device)},
              lambda a: a.sinks is None or a.sinks.dtype == torch.float32, "attention_sinks must be a float tensor",
              source),
        Check("4 query heads, 3 KV heads", _caches(_three_heads, _three_heads),
              lambda a: a.query.shape[1] % a.k.shape[-3] == 0, "num_qo_heads must be a multiple of num_kv_heads, got ",
              _RUNNER),
        Check("pages of 48 slots", _caches(_pages_of_48, _pages_of_48), lambda a: a.k.shape[-2] in _PAGES, _MISSING,
              _RUNNER),
        Check("a head dim of 96", _of_96, lambda a: (a.query.shape[-1], a.out.shape[-1]) in _DIMS, _MISSING, _RUNNER),
    )  # fmt: skip


def _three_heads(cache: torch.Tensor) -> torch.Tensor:
    return cache[:, :1].repeat(1, 3, 1, 1)


def _pages_of_48(cache: torch.Tensor) -> torch.Tensor:
    return cache.repeat(1, 1, 3, 1)


def _of_96(a: Arguments) -> Arguments:
    def wide(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], -1)[..., :96].contiguous()

    return {"query": wide(a["query"]), "kv_cache": tuple(map(wide, a["kv_cache"]))}


DECODE: tuple[Check, ...] = _of_caches(_DECODE)
CONTEXTS: tuple[Check, ...] = (
    *_of_caches(_CONTEXT),
    Check("an FP8 cache under bf16 queries", _caches(lambda k: k.to(FP8), lambda v: v.to(FP8)),
          lambda a: a.k.dtype != FP8 or a.query.dtype == FP8, _MISSING, _RUNNER),
)  # fmt: skip
SPARSE: tuple[Check, ...] = (
    Check("six indices", lambda a: {"sparse_mla_top_k": 6, "block_tables": _six(a)}, lambda a: a.top_k % 4 == 0,
          "SparseMlaTopK must be a multiple of 4", _PARAMS),
)  # fmt: skip
"""Indices are copied 16 bytes at a time."""


def _six(a: Arguments) -> torch.Tensor:
    return torch.zeros(2, 3, 6, dtype=torch.int32, device=a["query"].device)


def _pages(device: torch.device, _: Any = None) -> dict[str, Any]:
    """Two requests of 5 and 20 keys on pages of 16, 4 heads of width 64, 2 KV heads."""
    made = torch.Generator().manual_seed(1)
    query, k, v = (torch.randn(*shape, 64, generator=made).bfloat16() for shape in ((2, 4), (5, 2, 16), (5, 2, 16)))
    return {
        "query": query.to(device), "kv_cache": (k.to(device), v.to(device)),
        "workspace_buffer": torch.zeros(SEMAPHORE_BYTES + (1 << 20), dtype=torch.uint8, device=device),
        "block_tables": torch.tensor([[3, 0], [1, 4]], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([5, 20], dtype=torch.int32, device=device),
    }  # fmt: skip


def _decode_pages(device: torch.device, _: Any = None) -> dict[str, Any]:
    return _pages(device) | {"max_seq_len": 20, "bmm1_scale": 0.2, "bmm2_scale": 0.5, "sinks": None}


def _context_pages(device: torch.device, _: Any = None) -> dict[str, Any]:
    ends, keys = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 2], [0, 5, 25]))
    return _pages(device) | {
        "max_q_len": 1, "max_kv_len": 20, "bmm1_scale": 0.2, "bmm2_scale": 0.5, "batch_size": 2, "cum_seq_lens_q": ends,
        "cum_seq_lens_kv": keys, "sinks": None,
    }  # fmt: skip


def _selected(device: torch.device, _: Any = None) -> dict[str, Any]:
    made = torch.Generator().manual_seed(1)
    query, cache = (
        torch.randn(*shape, 576, generator=made).bfloat16().to(device) for shape in ((2, 3, 16), (5, 1, 32))
    )
    return {
        "query": query.bfloat16(), "kv_cache": cache.bfloat16(),
        "workspace_buffer": torch.zeros(1 << 20, dtype=torch.int8, device=device),
        "qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "block_tables": torch.zeros(2, 3, 4, dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([4, 30], dtype=torch.int32, device=device), "max_seq_len": 128, "bmm1_scale": 0.05,
        "backend": "trtllm-gen", "sparse_mla_top_k": 4,
    }  # fmt: skip


def _by_name(implementation: Any, function: str, given: Arguments) -> Any:
    return implementation.run(**given)


def _of(entry: EntryPoint) -> Any:
    def found() -> Any:
        try:
            return SimpleNamespace(run=real(entry))
        except VendorMissing as missing:
            raise ImportError(str(missing)) from missing

    return found


def refusals() -> tuple[Refusals, ...]:
    """Entry points of trtllm-gen and their refusals. Raises ``VendorMissing`` without the package."""
    return tuple(
        Refusals(f"trtllm-gen, {name}", "run", SimpleNamespace(run=fake_of(entry)), _of(entry), accepted, checks,
                 entry.sm[0], _by_name, lambda returned: returned)
        for name, entry, accepted, checks in (
            ("decode", DECODE_GEN, _decode_pages, DECODE),
            ("context", CONTEXT, _context_pages, CONTEXTS),
            ("sparse MLA", DECODE_MLA, _selected, SPARSE),
        )
    )  # fmt: skip
