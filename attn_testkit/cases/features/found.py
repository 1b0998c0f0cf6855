"""Objects of the modules of a folder, so that a new one is a new file and no entry of a list."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Protocol, TypeVar


class _Ordered(Protocol):
    @property
    def order(self) -> int: ...


T = TypeVar("T", bound=_Ordered)


def found_next_to(module: str, kind: type[T]) -> tuple[T, ...]:
    """Every ``kind`` that the modules next to ``module`` define, by ``order``. ``module``: the full name of a module, or
    of a package for those in it. Raises ``ValueError`` for two of the same order.
    """
    here = sys.modules[module]
    package = module if hasattr(here, "__path__") else module.rpartition(".")[0]
    names = [each.name for each in pkgutil.iter_modules(sys.modules[package].__path__) if not each.ispkg]
    others = [importlib.import_module(f"{package}.{name}") for name in names if f"{package}.{name}" != module]
    found = {id(value): value for each in others for value in vars(each).values() if isinstance(value, kind)}
    by_order = {value.order: value for value in found.values()}
    if len(by_order) < len(found):
        same = sorted(value.order for value in found.values() if by_order[value.order] is not value)
        raise ValueError(f"{package}: two {kind.__name__}s have the order {same[0]}; give one of them another")
    return tuple(by_order[order] for order in sorted(by_order))
