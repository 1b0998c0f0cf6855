"""Kernel files of a project's wheel, loaded without the project around them.

A kernel file imports a handful of names of its server (a logger, what the platform is); the package around it imports
everything. ``load`` imports the file from where the wheel lies, and answers those names from a table. Nothing is
copied, and no package ``__init__`` runs. The adapters and proofs next to this file need torch, triton and the wheels
without their dependencies: ``bash ci/servers.sh public-kernels``.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["FLAG_GEMS", "LIGHTLLM", "SGLANG", "SGLANG_STORE", "VLLM", "load"]

Given = Mapping[str, Mapping[str, Any]]


def load(name: str, given: Given) -> Any:
    """The module ``name``. ``given``: full name of each module that it imports beside -> the names taken from it."""
    if name in sys.modules:
        return sys.modules[name]
    project = name.partition(".")[0]
    if project not in sys.modules:
        _stand_for_package(project)
    for module, names in given.items():
        if module not in sys.modules:
            stub = _parents_of(module)
            stub.__dict__.update(names)
    _parents_of(name, itself=False)
    return importlib.import_module(name)


def _stand_for_package(project: str) -> None:
    found = importlib.util.find_spec(project)
    if found is None or not found.submodule_search_locations:
        raise LookupError(
            f"{project} is not installed: `bash ci/servers.sh public-kernels` makes an environment with it"
        )
    package = ModuleType(project)
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[project] = package


def _parents_of(name: str, itself: bool = True) -> ModuleType:
    """An empty module for each package on the way that is not there; it finds its modules where the wheel has them."""
    parts = name.split(".")
    for length in range(2, len(parts) + itself):
        module, parent = ".".join(parts[:length]), sys.modules[".".join(parts[: length - 1])]
        if module not in sys.modules:
            empty = ModuleType(module)
            empty.__path__ = [f"{folder}/{parts[length - 1]}" for folder in parent.__path__]
            sys.modules[module] = empty
            setattr(parent, parts[length - 1], empty)
    return sys.modules[name if itself else name.rpartition(".")[0]]


class _Silent:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


_KVQuantMode = enum.IntEnum(
    "KVQuantMode", "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD NVFP4", start=0
)


def _at_least(capability: int) -> bool:
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return major * 10 + minor >= capability


VLLM: Given = {
    "vllm.logger": {"init_logger": lambda name: _Silent()},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm._custom_ops": {},
    "vllm.triton_utils": {
        "tl": tl,
        "triton": triton,
        "LOG2E": tl.constexpr(math.log2(math.e)),
        "LOGE2": tl.constexpr(math.log(2)),
    },
    "vllm.platforms": {
        "current_platform": SimpleNamespace(
            fp8_dtype=lambda: torch.float8_e4m3fn,
            is_rocm=lambda: False,
            is_xpu=lambda: False,
            has_device_capability=_at_least,
            get_device_capability=lambda: None,  # asked whether it is Turing
            is_device_capability_family=lambda family: False,  # asked whether it is SM100
        )
    },
    # Importing the real one asks for an AMD GPU. The kernel that it chooses between is ROCm's alone.
    "vllm.platforms.rocm": {"use_rocm_custom_paged_attention": lambda *args: False},
    "vllm.v1.kv_cache_interface": {
        "KVQuantMode": _KVQuantMode,
        "is_quantized_kv_cache": lambda name: name.startswith("fp8"),
    },
    "vllm.model_executor.layers.quantization.utils.quant_utils": {
        "FP8_DTYPE": torch.float8_e4m3fn,
        "get_fp8_min_max": lambda: (-448.0, 448.0),
    },
}
SGLANG: Given = {
    "sglang.kernels.ops.quantization.fp8_kernel": {"is_fp8_fnuz": lambda: False},
    # Read at import, and used on ROCm alone.
    "sglang.srt.environ": {"envs": SimpleNamespace(SGLANG_MLA_HCA_KV_SPLITS=SimpleNamespace(get=lambda: 0))},
    "sglang.srt.utils": {
        "get_device_core_count": lambda index=0: torch.cuda.get_device_properties(index).multi_processor_count,
        "is_cuda": torch.cuda.is_available,
        "is_hip": lambda: False,
        "is_gfx95_supported": lambda: False,
        "is_gfx1250_supported": lambda: False,
    },
    "sglang.srt.utils.common": {"is_gfx95_supported": lambda: False, "is_gfx1250_supported": lambda: False},
}
# Without the compiled store of GPUs with PDL: the Triton kernel behind it runs.
SGLANG_STORE: Given = {
    **SGLANG,
    "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},
    "sglang.kernels.ops.kvcache.set_mla_kv_buffer": {"can_use_set_mla_kv_buffer": None, "set_mla_kv_buffer": None},
    "sglang.srt.platforms": {"current_platform": SimpleNamespace(capabilities=SimpleNamespace(supports_triton=True))},
    "sglang.srt.runtime_context": {"get_parallel": None},  # asked by its context-parallel variant
}
LIGHTLLM: Given = {}
FLAG_GEMS: Given = {
    "flag_gems.runtime": {
        "device": SimpleNamespace(vendor_name="nvidia", name="cuda"),
        "error": None,
        "torch_device_fn": torch.cuda,
    },
    "flag_gems.utils.device_info": {"get_device_capability": lambda: (9, 0)},
    "flag_gems.utils.triton_lang_helper": {"use_tl_extra": lambda function: function},
}
