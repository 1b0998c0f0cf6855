"""What the package may know and keep: torch, numpy and triton; nothing of attention; what lies below; no state but what
it lists."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import sys
import threading
import weakref
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch

import cuda_on_cpu as emulation

HOME = Path(emulation.__file__).parent
FILES = sorted(HOME.rglob("*.py"))
WITH_CALIBRATION = [*FILES, *sorted((HOME.parent / "calibrate").glob("*.py"))]
"""The programs that it is held to are ordinary CUDA programs, too."""
MODULES = [path for path in sorted(HOME.glob("*.py")) if path.stem != "__init__"]
ALLOWED = {"attn_testkit", "numpy", "torch", "triton"}

SPEAKS_OF_ATTENTION = re.compile(
    r"attention|attend|\bkv|_kv\b|backend|forward_metadata|cuda_graph_state|decod|draft|prefill", re.IGNORECASE
)
NAMES_OF_OTHERS = (
    "_torchdynamo_orig_backend",  # an attribute of torch
    "scaled_dot_product_attention",  # a function of torch
    "triton.backends",  # a package of Triton
    "with arguments from the CUDA backend",  # torch's own words
)
NAMES_IN_STORED_VERDICTS = re.compile(r'"(kv \w+: [^"]+|triton: kv indices|paged attention)"')


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_it_imports_torch_numpy_triton_and_itself_alone(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import hides whose module it is"
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            assert top in ALLOWED or top in sys.stdlib_module_names, name
            assert top != "attn_testkit" or name.startswith("cuda_on_cpu"), name


@pytest.mark.parametrize("path", WITH_CALIBRATION, ids=lambda path: str(path.relative_to(HOME.parent)))
def test_it_says_nothing_of_attention(path):
    for line in path.read_text().splitlines():
        said = NAMES_IN_STORED_VERDICTS.sub("", line)
        for name in NAMES_OF_OTHERS:
            said = said.replace(name, "")
        assert not SPEAKS_OF_ATTENTION.search(said), line


def _floors() -> dict[str, int]:
    """Row by module, from the table of the docs; the uppermost has the lowest number."""
    table = (HOME.parent.parent / "docs" / "contributing" / "emulation.md").read_text().split("## Pieces")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {module: number for number, row in enumerate(rows) for module in re.findall(r"`(\w+)\.py`", row)}


def test_the_docs_list_every_module_that_is_no_benchmark():
    assert set(_floors()) == {path.stem for path in MODULES} - {"bench", "bench_kernel", "bench_watching"}


def _imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, and names of the package itself."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
    return {name.split(".")[2] for name in names if name.startswith("cuda_on_cpu.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_point_down_the_table_of_the_docs(path):
    layers = _floors()
    lowest = layers.get(path.stem, 0)
    assert {name for name in _imports(path) if layers.get(name, lowest) < lowest} == set()


def _names_at_the_top(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)} - {"__all__"}


def _is_listed(module: str, name: str) -> bool:
    return re.search(rf"\b{module}\.{name}\b", emulation.__doc__ or "") is not None


def _can_change(value: object) -> bool:
    kind = type(value)
    if isinstance(value, (list, set, itertools.count, threading.local, weakref.WeakValueDictionary, torch.Generator)):
        return True
    constant = isinstance(value, (type, tuple)) or (is_dataclass(kind) and kind.__dataclass_params__.frozen)
    return kind.__module__.startswith("cuda_on_cpu") and not constant


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_level_state_is_listed_where_a_reader_begins(path):
    if path.stem == "bench_kernel":
        pytest.importorskip("triton")
    module = importlib.import_module(f"cuda_on_cpu.{path.stem}")
    found = {name for name in _names_at_the_top(path) if _can_change(getattr(module, name))}
    assert {name for name in found if not _is_listed(path.stem, name)} == set()


@pytest.mark.parametrize("path", WITH_CALIBRATION, ids=lambda path: str(path.relative_to(HOME.parent)))
def test_no_function_changes_a_name_or_a_table_of_its_module(path):
    constants = {name for name in _names_at_the_top(path) if not _is_listed(path.stem, name)}
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Global), node.names
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            assert node.value.id not in constants, f"line {node.lineno} changes {node.value.id}"


def test_what_is_listed_as_state_exists():
    listed = re.findall(r"(\w+)\.(\w+)", (emulation.__doc__ or "").split("\n\n")[2].replace("`torch.cuda.", "`"))
    assert len(listed) == 9
    for module, name in listed:
        assert hasattr(importlib.import_module(f"cuda_on_cpu.{module}"), name)
