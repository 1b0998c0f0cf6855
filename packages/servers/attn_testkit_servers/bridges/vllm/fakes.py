"""Fakes in torch of vLLM's compiled code, for machines without a GPU or if compiled modules do not load.

Builders, metadata and masks stay vLLM's.

They replace operators that store keys and values, FlashAttention, FlashMLA, and FlexAttention's
kernel, which torch compiles. If one of them attends, ``AttentionBackend.kernels`` shows it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import torch

from attn_testkit.backends.vendor.flashinfer_kernels import BATCH_DECODE, BATCH_PREFILL
from attn_testkit.backends.vendor.provider import fake_of, swapped
from attn_testkit_servers.fakes import flash_attn, flash_attn_2, flash_mla, vllm_caches
from attn_testkit_servers.fakes import paged_attention as paged
from attn_testkit_servers.fakes.refusals import Functions

_held: list[torch.library.Library] = []

_QUESTIONS = ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported")
"""Names in ``torch.ops._C``, of operators that report whether a device has a kernel for quantized layers; here it has
none."""
_WRAPPERS = {
    "flashinfer:BatchDecodeWithPagedKVCacheWrapper": BATCH_DECODE,
    "flashinfer:BatchPrefillWithPagedKVCacheWrapper": BATCH_PREFILL,
}
"""``module:name`` in FlashInfer, as vLLM looks it up -> the kit's fake."""


def put_in_place() -> None:
    """Define the operators, and give FlexAttention's module its kernel. Safe to call again."""
    if _held:
        return
    define_operators()
    _define("_vllm_fa3_C", flash_attn.FUNCTIONS)
    _define("_vllm_fa2_C", flash_attn_2.FUNCTIONS)
    _define("_flashmla_C", {name: (each, ()) for name, each in vars(flash_mla.FUNCTIONS).items()})
    _define("_flashmla_extension_C", {name: (each, ()) for name, each in vars(flash_mla.EXTENSION).items()})
    from vllm.v1.attention.backends import flex_attention as of_vllm

    of_vllm.flex_attention_compiled = flex_attention
    of_sparse = importlib.import_module("vllm.v1.attention.backends.mla.index_group")
    # The emulated device has the streams of torch.cuda only, and these are a torch.Stream and torch.Events.
    of_sparse._create_side_stream, of_sparse._create_event = _side_stream, _event  # type: ignore[attr-defined]
    if importlib.util.find_spec("flashinfer") is None:
        return  # its class is not requested, or reports it
    with swapped({path: fake_of(entry) for path, entry in _WRAPPERS.items()}):
        importlib.import_module("vllm.v1.attention.backends.flashinfer")
    # vLLM leaves the choice to FlashInfer, which asks for the CUDA version of torch. The fakes are of "fa2".
    importlib.import_module("flashinfer.prefill").determine_attention_backend = _fa2  # type: ignore[attr-defined]


def define_operators() -> None:
    """Define in torch what ``vllm._C_stable_libtorch`` has compiled and attention calls, also for a real device."""
    _define("_C", dict.fromkeys(_QUESTIONS, (_has_no_kernel, ())))
    _define("_C_cache_ops", vllm_caches.FUNCTIONS)


def _define(namespace: str, functions: Functions) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, (function, written) in functions.items():
        if hasattr(getattr(torch.ops, namespace), name):
            continue
        library.define(name + torch.library.infer_schema(function, mutates_args=written))  # type: ignore[no-untyped-call]
        library.impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    _held.append(library)


def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _fa2(*_of_batch: Any, **_of_heads: Any) -> str:
    return "fa2"


def _has_no_kernel(cuda_device_capability: int) -> bool:
    return False


def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: float,
    **_options: Any,
) -> torch.Tensor:  # fmt: skip
    """Compute ``flex_attention_compiled``: ``query`` [1, H, T, D], keys and values of all slots [1, Hk, S, D].

    A block of query rows reaches the first ``kv_num_blocks`` entries of its row of ``kv_indices``. That row continues
    after the end of the mask's view of it, and this function reads there because the kernel does. ``mask_mod`` decides
    on the rest. As in the kernel, hidden values of a reached block are multiplied by 0, so a NaN there makes the row
    NaN.
    """
    assert score_mod is None, "no declared capability needs a score_mod"
    rows, slots = query.shape[2], key.shape[2]
    q_block, kv_block = block_mask.BLOCK_SIZE
    counts, listed = block_mask.kv_num_blocks[0, 0], block_mask.kv_indices[0, 0]
    listed = listed.as_strided((listed.shape[0], listed.stride(0)), listed.stride())
    blocks = slots // kv_block
    in_use = torch.arange(listed.shape[1], device=query.device) < counts[:, None]
    reached = torch.zeros(listed.shape[0], blocks + 1, dtype=torch.bool, device=query.device)
    reached.scatter_(1, torch.where(in_use, listed, blocks).long(), True)
    reached = reached[:, :blocks].repeat_interleave(q_block, 0)[:rows].repeat_interleave(kv_block, 1)
    none = torch.zeros((), dtype=torch.long, device=query.device)
    row, slot = torch.arange(rows, device=query.device), torch.arange(slots, device=query.device)
    seen = reached & block_mask.mask_mod(none, none, row[:, None], slot[None, :])
    rows_first, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    found, _ = paged.attend(rows_first, keys.float(), values.float(), seen, scale, round_to=query.dtype)
    spoiled = reached.float() @ (~values.isfinite().all(-1)).float() > 0  # [rows, Hk]
    found = found.masked_fill(spoiled.repeat_interleave(query.shape[1] // key.shape[1], 1)[..., None], math.nan)
    return found.to(query.dtype).transpose(0, 1)[None]
