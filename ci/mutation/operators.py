"""Operators of ``packages/corpus``, loaded by their files: the process that mutates the kit imports nothing of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parents[2] / "packages" / "corpus" / "attn_testkit_corpus" / "mutants"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{__name__}_{name}_of_the_kit", _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_operators = _load("operators")
Mutant, mutants_of, read_mutants = _operators.Mutant, _operators.mutants_of, _operators.read_mutants
OPERATORS = _operators.OPERATORS
read_equivalents = _load("equivalents").read_equivalents
