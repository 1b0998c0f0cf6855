"""Objects of the modules of a package, so that a new one is a new file and no entry of a list."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Protocol, TypeVar


class _Ordered(Protocol):
    @property
    def order(self) -> int: ...


T = TypeVar("T", bound=_Ordered)


def modules_of(package: str, *but: str) -> list[ModuleType]:
    """Modules of a package by the order of their names, without the packages in it and without ``but``."""
    found = pkgutil.iter_modules(sys.modules[package].__path__, f"{package}.")
    return [importlib.import_module(each.name) for each in found if not each.ispkg and each.name not in but]


def found_next_to(module: str, kind: type[T]) -> tuple[T, ...]:
    """Every ``kind`` that the modules next to ``module`` define, by ``order``. ``module``: the full name of a module.
    Raises ``ValueError`` for two of the same order.
    """
    package = module.rpartition(".")[0]
    values = (value for each in modules_of(package, module) for value in vars(each).values())
    found = {id(value): value for value in values if isinstance(value, kind)}
    by_order = {value.order: value for value in found.values()}
    if len(by_order) < len(found):
        same = sorted(value.order for value in found.values() if by_order[value.order] is not value)
        raise ValueError(f"{package}: two {kind.__name__}s have the order {same[0]}; give one of them another order")
    return tuple(by_order[order] for order in sorted(by_order))
