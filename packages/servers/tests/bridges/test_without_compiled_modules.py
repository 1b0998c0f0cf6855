"""What a bridge does where a server's compiled modules do not load, and the rows that it gives. Without any server."""

from __future__ import annotations

import _ctypes
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attn_testkit_servers.bridges.rows import as_projected
from attn_testkit_servers.bridges.sglang import absent
from attn_testkit_servers.bridges.vllm import imports
from attn_testkit_servers.bridges.vllm.capabilities import CAPABILITIES


@pytest.fixture
def real_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules, finders = set(sys.modules), list(sys.meta_path)
    monkeypatch.setattr(imports, "device_is_real", lambda device: True)
    monkeypatch.setattr(imports, "_missing", {})
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.startswith(("vllm.", "sgl_kernel")) or name == "sgl_kernel":
            del sys.modules[name]


def _not_loading(module: str) -> str:
    return "" if module == imports.FA3 else "ImportError: undefined symbol: _ZN3c10"


def test_on_a_gpu_missing_modules_of_vllm_are_named_and_torch_stores_in_their_place(
    real_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "_why_not", _not_loading)
    for _ in range(2):  # safe to call again
        machine = imports.prepare(CAPABILITIES["triton_mla"])
        assert not machine.without_gpu
        missing = [module for module in imports.COMPILED if module != imports.FA3]
        assert machine.missing == dict.fromkeys(missing, "ImportError: undefined symbol: _ZN3c10")
    assert imports.STABLE in sys.modules, "imports by name pass"
    assert imports.FA3 not in sys.modules, "and what loads is its own"
    latent, rope = torch.randn(3, 512), torch.randn(3, 1, 64)[:, 0]
    cache, slots = torch.zeros(2, 16, 576), torch.tensor([17, -1, 3])
    torch.ops._C_cache_ops.concat_and_cache_mla(latent, rope, cache, slots, "auto", torch.ones(1), True)
    rows = torch.cat([latent, rope], -1)
    assert torch.equal(cache[1, 1], rows[0])
    assert torch.equal(cache[0, 3], rows[2])
    assert int((cache != 0).any(-1).sum()) == 2, "a row of slot -1 is not stored"


def test_on_a_gpu_with_all_modules_nothing_is_in_their_place(
    real_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "_why_not", lambda module: "")
    assert imports.prepare(CAPABILITIES["triton"]) == imports.Machine(False)
    assert imports.STABLE not in sys.modules


@pytest.mark.parametrize("module", [imports.STABLE, imports.FA2, imports.FA3])
def test_why_a_module_does_not_load_is_asked_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    package = tmp_path / "vllm"
    (package / "vllm_flash_attn").mkdir(parents=True)
    for folder in (package, package / "vllm_flash_attn"):
        (folder / "__init__.py").write_text("raise ImportError('nobody imports it')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert imports._why_not(module) == "it is not installed"
    library = package.joinpath(*module.split(".")[1:]).with_suffix(".abi3.so")
    library.write_bytes(b"no library")
    why = imports._why_not(module)
    assert why.startswith("OSError: ")
    assert "too short" in why or "invalid ELF" in why
    library.write_bytes(Path(_ctypes.__file__).read_bytes())
    assert imports._why_not(module) == ""


def test_which_names_of_vllm_store_or_attend_by_compiled_modules() -> None:
    assert {name for name, declared in CAPABILITIES.items() if not declared.compiled_store} == {
        "triton", "triton_2d", "triton_invariant", "triton_fp8", "triton_per_token_head", "gdn", "gdn_hybrid", "mamba2",
        "mamba2_hybrid", "bailing", "linear", "triton_pd",
    }  # fmt: skip
    modules = {name: c.compiled_module for name, c in CAPABILITIES.items() if c.compiled_module}
    assert modules == {
        **dict.fromkeys(("flash_attn", "flash_attn_sinks", "flash_attn_fp8"), imports.FA3),
        "flash_attn_2": imports.FA2, "flashmla": imports.MLA, "flashmla_sparse": imports.MLA,
        "flashmla_fp8": imports.MLA_FP8,
    }  # fmt: skip


def test_names_of_sglangs_compiled_package_can_be_imported_and_say_what_is_missing_when_called(
    real_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    why = absent.stand_in()
    assert why == "ModuleNotFoundError: No module named 'sgl_kernel'"
    assert absent.stand_in() == why
    attention = importlib.import_module("sgl_kernel.flash_attn")
    with pytest.raises(RuntimeError, match=r"sgl_kernel.flash_attn.flash_attn_varlen_func is compiled in sglang-"):
        attention.flash_attn_varlen_func(1, causal=True)
    scalars = importlib.import_module("sgl_kernel.scalar_type").scalar_types
    assert scalars.uint4b8.__name__ == "sgl_kernel.scalar_type.scalar_types.uint4b8", "a constant of a table"
    utils = importlib.import_module("sgl_kernel.utils")
    assert utils.is_arch_support_pdl() is True


def test_rows_are_given_as_a_projection_has_them() -> None:
    packed = torch.arange(3 * 12).view(3, 12)
    q, k = packed[:, :8].unflatten(1, (4, 2)), packed[:, 8:].unflatten(1, (2, 2))
    for rows in (q, k):
        found = as_projected(rows)
        assert found.shape == (3, rows.shape[1] * 2)
        assert found.stride() == (12, 1)
        assert found.data_ptr() == rows.data_ptr()
    assert as_projected(q[:1]).view(-1, 4, 2).stride() == (8, 2, 1), "the stride of a lone row is tidied, as by a layer"
    assert as_projected(q[:0]).view(-1, 4, 2).shape == (0, 4, 2)
    with pytest.raises(RuntimeError, match="view"):
        as_projected(torch.zeros(3, 2, 4)[..., :2])
