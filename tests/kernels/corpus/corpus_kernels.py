"""Which kernels of a project belong to the corpus: a rule of modules, and what those define."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Project:
    """A package: modules whose name matches `touches` and not `leaves_out` are of attention or state memory.

    `elsewhere` gives reasons, by module name, for kernels that are of another vendor's hardware.
    """

    package: str
    distribution: str
    touches: str
    leaves_out: str = r"^$"
    elsewhere: tuple[tuple[str, str], ...] = ()


_OTHER_HARDWARE = (
    (r"_hip\b|_hip\.|rocm|\.amd\.|_aiter|aiter_|gfx\d|flydsl|_amd\b|\.hip\b", "AMD only"),
    (r"\.xpu|_xpu", "Intel only"),
    (r"ascend|\.npu|_npu", "Ascend only"),
    (r"\.musa|mthreads", "Moore Threads only"),
    (r"\.cpu\.", "CPU only"),
)

PROJECTS: dict[str, Project] = {
    "fla": Project(
        "fla",
        "fla-core",
        r"^fla\.(ops|modules\.(causal_conv1d|token_shift|rotary))\b",
        r"\.utils\.sinkhorn|attnres",
        _OTHER_HARDWARE,
    ),
    "sglang": Project(
        "sglang",
        "sglang",
        r"^sglang\.(kernels\.ops\.(attention|kvcache|mamba|memory|speculative|kv_canary)|srt\.(layers\.(attention|dcp)|mem_cache"
        r"|disaggregation\.common)|srt\.models\.inkling_common\.(kernels\.)?sconv|srt\.hardware_backend\.xpu\.kernels\.fla)\b",
        r"\.test\b|\.tests\b",
        _OTHER_HARDWARE,
    ),
    "vllm": Project(
        "vllm",
        "vllm",
        r"^vllm\.(v1\.(attention|kv_offload|spec_decode|worker\.(block_table|mamba_utils|utils|gpu\.(block_table|cp_utils|input_batch"
        r"|model_states|spec_decode|buffer_utils)))|model_executor\.layers\.(mamba|lightning_attn|sparse_attn_indexer|attention)"
        r"|third_party\.flash_linear_attention"
        r"|models\..*(attention|attn|cache|compress|indexer|index_topk|kda|sparse|swa|qsa|topk|states|sconv|recoverssm|qkv|keylist|ring"
        r"|summary_update|conv_ops|rel_attention))",
        r"\.third_party\.triton_kernels|metrics",
        _OTHER_HARDWARE,
    ),
    "flag_gems": Project(
        "flag_gems",
        "flag-gems",
        r"^flag_gems\.(fused\.(FLA|DSA|flash|reshape_and_cache|concat_and_cache|sparse_attention|rotary|rwkv)"
        r"|ops\.(attention|flash|get_scheduler_metadata|get_paged_mqa))",
        r"^$",
        _OTHER_HARDWARE,
    ),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A jit function of a module; `called` says whether another jit function of the project calls it."""

    name: str
    function: Any
    called: bool


def module_names(project: Project) -> list[str]:
    """Modules of the installed package that the rule names and whose source has a jit function."""
    spec = importlib.util.find_spec(project.package)
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join((project.package, *(parts[:-1] if parts[-1] == "__init__" else parts)))
        if (
            re.search(project.touches, name)
            and not re.search(project.leaves_out, name)
            and (re.search(r"^\s*@(triton\.)?jit\b", path.read_text(errors="ignore"), re.M))
        ):
            found.append(name)
    return found


def written(project: Project, module: str) -> list[str]:
    """Names of the jit functions in a module's source, for modules that cannot be imported."""
    spec = importlib.util.find_spec(project.package)
    assert spec is not None
    assert spec.submodule_search_locations
    base = Path(next(iter(spec.submodule_search_locations))).joinpath(*module.split(".")[1:])
    path = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
    return re.findall(r"^\s*@(?:triton\.)?jit\b[^\n]*\n(?:\s*@[^\n]*\n)*\s*def (\w+)", path.read_text(), re.M)


def elsewhere(project: Project, module: str) -> str:
    """For other hardware than NVIDIA's: which. Empty otherwise."""
    return next((reason for pattern, reason in project.elsewhere if re.search(pattern, module)), "")


def inner(value: Any, interpreted: type) -> Any:
    """The interpreter's function below tuners and heuristics, or None."""
    for _ in range(8):
        if isinstance(value, interpreted):
            return value
        value = getattr(value, "fn", None)
    return None


def kernels(project: Project, interpreted: type) -> Iterator[tuple[str, list[Kernel] | str]]:
    """Each module with its jit functions, or with why it does not import."""
    found: dict[str, Any] = {}
    for name in module_names(project):
        if elsewhere(project, name):
            yield name, elsewhere(project, name)
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = importlib.import_module(name)
        except BaseException as failure:
            yield name, f"does not import: {type(failure).__name__}: {' '.join(str(failure).split())[:160]}"
    yield from of_modules(found, interpreted)


def of_modules(found: dict[str, Any], interpreted: type) -> Iterator[tuple[str, list[Kernel]]]:
    """Each of these modules with the jit functions that it defines."""
    functions: dict[str, list[Any]] = {}
    for module in found.values():
        name = module.__name__
        own = {id(one): one for value in vars(module).values() if (one := inner(value, interpreted)) is not None}
        functions[name] = [one for one in own.values() if one.fn.__module__ == name]
    called = {
        id(one)
        for several in functions.values()
        for caller in several
        for word in caller.fn.__code__.co_names
        if (one := inner(caller.fn.__globals__.get(word), interpreted)) is not None and one is not caller
    }
    for name, several in functions.items():
        yield name, [Kernel(f"{name}.{one.fn.__name__}", one, id(one) in called) for one in several]
