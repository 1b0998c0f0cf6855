"""No oracle in a worker: only the judge may compute the right answer, and any process with the kit could import the
oracle."""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any, NoReturn

from ...families.table import FAMILIES

_EXPECTED = "attn_testkit.families.expected"
_KIT = "attn_testkit."


def _sealed(*_: Any, **__: Any) -> NoReturn:
    # Names are looked up in the module that this code is put into: there must be none.
    raise RuntimeError("attn_testkit's oracle was asked by a process that runs a backend; it answers only the judge")


def seal_oracle() -> None:
    """Make every function of the oracle and of the families' answers raise in this process, also for code that holds a
    reference."""
    for name, module in list(sys.modules.items()):
        if name.startswith((_EXPECTED, *_sealed_packages())) and name not in _open_modules():
            for function in map(inspect.unwrap, filter(callable, list(vars(module).values()))):
                if inspect.isfunction(function) and function.__module__ == name:
                    function.__code__ = _sealed.__code__
    for family in FAMILIES.values():
        for each in (family.answer, family.supposed):
            if isinstance(each, FunctionType):
                each.__code__ = _sealed.__code__


def _sealed_packages() -> set[str]:
    """Packages of the kit in which answers are computed."""
    modules = {family.answer.__module__ for family in FAMILIES.values()}
    return {module.rpartition(".")[0] + "." for module in modules if module.startswith(_KIT)}


def _open_modules() -> set[str]:
    """Modules of a family that a worker needs."""
    asked = (
        (
            family.layers,
            family.data,
            *vars(family.memory).values(),
            *(vars(family.texts).values() if family.texts else ()),
            family.beside and family.beside.changes,
        )
        for family in FAMILIES.values()
    )
    return {each.__module__ for functions in asked for each in functions if each}
