"""Fakes of FlashInfer for machines without a GPU, put where SGLang's modules look for FlashInfer.

SGLang's Python is unchanged. Its modules are imported as if FlashInfer could be used, and find fakes that compute in
torch in the package's namespaces. Results show that: ``kernels`` is ``emulated``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from attn_testkit.backends.vendor.flashinfer_kernels import (
    BATCH_DECODE,
    BATCH_MLA_FA2,
    BATCH_PREFILL,
    BATCH_RAGGED,
    MERGE_STATE,
)
from attn_testkit.backends.vendor.gdn_kernels import DECODE, PREFILL, VERIFY
from attn_testkit.backends.vendor.provider import EntryPoint, device_is_real, fake_of, swapped
from attn_testkit.backends.vendor.trtllm_kernels import DECODE_XQA


@dataclass(frozen=True)
class FakeSet:
    """Fakes of a package for one of SGLang's backends."""

    modules: tuple[str, ...]
    """Modules below ``sglang.srt.layers.attention`` that import the package."""
    names: Mapping[str, EntryPoint]
    """``module:name`` in the package, as SGLang looks it up -> its replacement."""
    platform: Mapping[str, bool] = field(default_factory=dict)
    """Answers to SGLang's questions about the machine, for the emulated device."""
    answers: Mapping[str, bool] = field(default_factory=dict)
    """Answers of functions that a module imported: ``module:function`` below ``sglang.srt.layers.attention``."""
    on_cuda: Mapping[str, str] = field(default_factory=dict)
    """``module:name`` that SGLang imports only if it finds CUDA -> ``module:name`` of the imported object, or of its
    fake."""


_WRAPPERS = MappingProxyType(
    {
        "flashinfer:BatchDecodeWithPagedKVCacheWrapper": BATCH_DECODE,
        "flashinfer:BatchPrefillWithPagedKVCacheWrapper": BATCH_PREFILL,
        "flashinfer:BatchPrefillWithRaggedKVCacheWrapper": BATCH_RAGGED,
        "flashinfer:BatchMLAPagedAttentionWrapper": BATCH_MLA_FA2,
        "flashinfer.cascade:merge_state": MERGE_STATE,
    }
)
_OF_WRAPPERS = ("flashinfer_backend", "flashinfer_mla_backend")

_ATTENTION = "sglang.srt.layers.attention"
_KERNELS = "sglang.kernels.ops.attention"
_SPLIT = "fused_qkv_split_gdn_prefill"
_GDN = "sglang.srt.layers.attention.linear.kernels.gdn_flashinfer"
_OF_DSA = {
    each.path: each
    for each in (
        EntryPoint(f"{_KERNELS}.dsv4:get_paged_mqa_logits_metadata", ((90, 103),), f"{__name__}:no_schedule", "sglang"),
        *(
            EntryPoint(f"{_KERNELS}.dsa.fused_metadata_copy:{name}", ((90, 103),), f"{__name__}:not_compiled", "sglang")
            for name in ("fused_metadata_copy_cuda", "fused_metadata_copy_multi_cuda")
        ),
    )
}


def no_schedule(seq_lens: torch.Tensor, page_size: int, num_sm: int) -> torch.Tensor:
    """Schedule of the kernel that scores index keys, which the bridge does not run."""
    return torch.zeros(num_sm + 1, 2, dtype=torch.int32, device=seq_lens.device)


def not_compiled(*_: object) -> None:
    """A CUDA kernel that SGLang compiles at its first call. Without it the class copies each tensor itself."""
    raise ImportError("SGLang compiles this kernel for a GPU")


SETS: Mapping[str, FakeSet] = {
    "wrappers": FakeSet(_OF_WRAPPERS, _WRAPPERS),
    "xqa": FakeSet(
        (*_OF_WRAPPERS, "trtllm_mla_backend", "trtllm_mha_backend"),
        {**_WRAPPERS, "flashinfer.decode:trtllm_batch_decode_with_kv_cache": DECODE_XQA},
        {"is_sm90": True},
    ),
    # The class asks at each call, and plans with its Triton kernels on CUDA only.
    "dsa": FakeSet(("dsa_backend",), _OF_DSA, answers={"dsa_backend:is_cuda": True}),
    # The module keeps what it imports, which needs CuTe DSL, in these names, and whether it could.
    "gdn": FakeSet(
        (),
        {
            f"{_GDN}:_flashinfer_gated_delta_rule_decode": DECODE,
            f"{_GDN}:_flashinfer_gated_delta_rule_mtp": VERIFY,
            f"{_GDN}:_flashinfer_chunk_gated_delta_rule": PREFILL,
        },
        answers={"linear.kernels.gdn_flashinfer:_flashinfer_gdn_available": True, "linear.gdn_backend:is_cuda": True},
        on_cuda={f"{_ATTENTION}.linear.gdn_backend:{_SPLIT}": f"{_KERNELS}.triton_gdn_fused_proj:{_SPLIT}"},
    ),
    "hicache": FakeSet(
        (),
        {},
        on_cuda={
            f"sglang.srt.mem_cache.pool_host.{pools}:{name}": f"attn_testkit_servers.fakes.kvcacheio:{name}"
            for pools in ("mha", "mla")
            for name in (
                "transfer_kv_direct",
                "transfer_kv_per_layer_direct_pf_lf",
                "transfer_kv_all_layer_direct_lf_pf",
            )
        },
    ),
}
"""Name -> set. ``declared.Claims.fakes`` says which."""


def is_needed() -> bool:
    """True on a machine without a GPU."""
    return not device_is_real(torch.device("cuda"))


def put_in_place(name: str) -> None:
    """Import SGLang's modules over the fakes of a set. Call it before anything else imports them.

    Raises ``RuntimeError`` if one was imported already: it would have found no package.
    """
    chosen = SETS[name]
    imported = [module for module in chosen.modules if f"{_ATTENTION}.{module}" in sys.modules]
    if imported:
        raise RuntimeError(f"SGLang's {', '.join(imported)} imported before the fakes of FlashInfer were put in place")
    fakes = {path: fake_of(entry) for path, entry in chosen.names.items()}
    utils = importlib.import_module("sglang.srt.utils")
    with swapped({**fakes, f"{utils.__name__}:is_flashinfer_available": lambda: True}):
        for module in chosen.modules:
            importlib.import_module(f"{_ATTENTION}.{module}")
    # Some are looked up at each call.
    for path, fake in fakes.items():
        module, _, attribute = path.partition(":")
        setattr(importlib.import_module(module), attribute, fake)
    for path, answer in chosen.answers.items():
        module, _, attribute = path.partition(":")
        setattr(importlib.import_module(f"{_ATTENTION}.{module}"), attribute, lambda answer=answer: answer)
    for path, source in chosen.on_cuda.items():
        module, _, attribute = path.partition(":")
        owner, _, name = source.partition(":")
        found = getattr(importlib.import_module(owner), name)
        setattr(importlib.import_module(module), attribute, found)
    if chosen.platform:
        from sglang.srt.runtime_context import override_platform

        override_platform(**chosen.platform).install()
