"""A substitute for ``sgl_kernel``, SGLang's package of compiled kernels, if it is not installed or does not load.

SGLang's modules import its functions by name, for every backend. The substitute has every name, and a call raises an
error that says what is missing. Classes whose capabilities require the package are not run.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

_PACKAGE = "sgl_kernel"


class _Missing:
    """A function, class or table of the package. It can be imported and inspected, but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *_arguments: Any, **_named: Any) -> Any:
        raise RuntimeError(f"{self.__name__} is compiled in sglang-kernel, which is not usable here")


class _Module(ModuleType):
    """A module of the package that lacks every name, except Python's own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return _IN_PYTHON.get(full) or _Missing(full)


def _is_arch_support_pdl() -> bool:
    """True if the device can launch a kernel before the previous one ends."""
    return torch.cuda.get_device_capability()[0] >= 9


_IN_PYTHON: dict[str, Callable[..., Any]] = {"sgl_kernel.utils.is_arch_support_pdl": _is_arch_support_pdl}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != _PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> str:
    """Let imports of the package pass if it cannot be imported. Returns the reason why it cannot; empty if it can."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return _why[0]
    try:
        importlib.import_module(_PACKAGE)
    except Exception as error:
        _why[:] = [f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST]}"]
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Finder())
        return _why[0]
    return ""


_why: list[str] = []
_MOST = 200
"""Most characters of an import's error, which for a library names every symbol."""
