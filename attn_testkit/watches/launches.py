"""Launches of an author's own kernels: of Triton, and operators that torch does not have.

A backend that falls back to torch gives right numbers and shows nothing about the kernels that its author wrote. The
counter sees what Python launches: a launch that a graph captures counts once, its replays do not. It does not see
functions of extension modules that are not operators, and kernels that Inductor generates. It is not a dispatch mode,
because torch.compile does not compile under one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any

import torch

__all__ = ["Launches", "has_kernels"]

_OF_TORCH = frozenset({"aten", "prim", "prims", "inductor", "higher_order", "profiler", "triton_kernels", "flex_lib"})
"""Namespaces of torch's operators, some of which it registers when they are first used."""
_KERNELS = ("JITFunction", "GluonJITFunction", "InterpretedFunction", "Autotuner", "Heuristics")
"""Classes of Triton whose objects are kernels, by name: Triton need not be installed."""


class Launches:
    """A counter that wraps what launches kernels, in this process, until it is removed."""

    def __init__(self) -> None:
        self._count = 0
        self._replaced: list[tuple[type[Any], str, Any]] = []
        self._triton = False
        self._of_torch = _OF_TORCH | {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}

    def install(self) -> None:
        """Start to count. Call it before the backend is imported, whose namespaces of operators are its own."""
        for owner, name in ((torch._ops.OpOverload, "_name"), (torch._ops.OpOverloadPacket, "_qualified_op_name")):
            self._replace(owner, "__call__", partial(self._operator, name))
        self._install_in_triton()

    def remove(self) -> None:
        """Restore what was wrapped."""
        while self._replaced:
            owner, name, stock = self._replaced.pop()
            setattr(owner, name, stock)
        self._triton = False

    def begin(self) -> bool:
        """Start a case-run at zero. Returns false if Triton is not imported yet, and so cannot be counted."""
        self._count = 0
        return self._install_in_triton()

    def count(self, begun_with_triton: bool) -> int | None:
        """The number since ``begin``; None if Triton was imported meanwhile, so that launches were missed."""
        return None if not begun_with_triton and self._install_in_triton() and not self._count else self._count

    def _install_in_triton(self) -> bool:
        if not self._triton and "triton.runtime.jit" in sys.modules:
            self._triton = True
            self._replace(sys.modules["triton.runtime.jit"].JITFunction, "run", self._kernel)
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter and all(owner is not interpreter.InterpretedFunction for owner, _, _ in self._replaced):
            self._replace(interpreter.InterpretedFunction, "run", self._kernel)
        return self._triton

    def _replace(self, owner: type[Any], name: str, wrapped: Any) -> None:
        stock = getattr(owner, name)
        self._replaced.append((owner, name, stock))
        setattr(owner, name, wrapped(stock))

    def _kernel(self, stock: Any) -> Any:
        def run(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("warmup"):
                self._count += 1
            return stock(kernel, *args, **kwargs)

        return run

    def _operator(self, attribute: str, stock: Any) -> Any:
        of_torch = self._of_torch

        def call(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
            if getattr(operator, attribute).partition("::")[0] not in of_torch:
                self._count += 1
            return stock(operator, *args, **kwargs)

        return call


def has_kernels(modules: Iterable[ModuleType]) -> list[str]:
    """Names of Triton kernels among the globals of modules, by where they are defined; sorted."""
    found = set()
    for module in modules:
        for name, value in list(vars(module).items()):
            if type(value).__name__ in _KERNELS and type(value).__module__.startswith("triton."):
                while type(value).__name__ in _KERNELS:
                    value = value.fn
                found.add(f"{getattr(value, '__module__', module.__name__)}.{getattr(value, '__name__', name)}")
    return sorted(found)
