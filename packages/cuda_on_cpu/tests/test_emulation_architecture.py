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

import torch
from rules_of_programs import changed_names, lines_of_attention, names_at_the_top

import cuda_on_cpu as emulation

HOME = Path(emulation.__file__).parent
FILES = sorted(HOME.rglob("*.py"))
MODULES = [path for path in sorted(HOME.glob("*.py")) if path.stem != "__init__"]
ALLOWED = {"cuda_on_cpu", "numpy", "torch", "triton"}


def _outside(path: Path) -> list[str]:
    """Imports of a file that are not of torch, numpy, triton, Python or the package, and relative ones."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        found += [name for name in names if name.split(".")[0] not in ALLOWED | sys.stdlib_module_names]
    return found


def test_it_imports_torch_numpy_triton_and_itself_alone():
    """Here and below all files at once: a test for each is collected longer than it runs."""
    assert {path.name: found for path in FILES if (found := _outside(path))} == {}


def test_it_says_nothing_of_attention():
    assert {path.name: found for path in FILES if (found := lines_of_attention(path))} == {}


def _floors() -> dict[str, int]:
    """Row by module, from the table of the docs; the uppermost has the lowest number."""
    table = (HOME / "README.md").read_text().split("## Pieces")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {module: number for number, row in enumerate(rows) for module in re.findall(r"`(\w+)\.py`", row)}


def test_the_docs_list_every_module():
    assert set(_floors()) == {path.stem for path in MODULES}


def _imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, and names of the package itself."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("cuda_on_cpu.")}


def test_imports_point_down_the_table_of_the_docs():
    layers = _floors()
    assert [
        f"{path.stem} imports {name}"
        for path in MODULES
        for name in _imports(path)
        if name in layers and layers[name] < layers[path.stem]
    ] == []


def _is_listed(module: str, name: str) -> bool:
    return re.search(rf"\b{module}\.{name}\b", emulation.__doc__ or "") is not None


def _can_change(value: object) -> bool:
    kind = type(value)
    if isinstance(value, (list, set, itertools.count, threading.local, weakref.WeakValueDictionary, torch.Generator)):
        return True
    constant = isinstance(value, (type, tuple)) or (is_dataclass(kind) and kind.__dataclass_params__.frozen)
    return kind.__module__.startswith("cuda_on_cpu") and not constant


def test_module_level_state_is_listed_where_a_reader_begins():
    for path in MODULES:
        module = importlib.import_module(f"cuda_on_cpu.{path.stem}")
        found = {name for name in names_at_the_top(path) if _can_change(getattr(module, name))}
        assert {name for name in found if not _is_listed(path.stem, name)} == set(), path.stem


def test_no_function_changes_a_name_or_a_table_of_its_module():
    for path in FILES:
        constants = {name for name in names_at_the_top(path) if not _is_listed(path.stem, name)}
        assert changed_names(path, constants) == [], path.stem


def test_what_is_listed_as_state_exists():
    listed = re.findall(r"(\w+)\.(\w+)", (emulation.__doc__ or "").split("\n\n")[2].replace("`torch.cuda.", "`"))
    assert len(listed) == 9
    for module, name in listed:
        assert hasattr(importlib.import_module(f"cuda_on_cpu.{module}"), name)
