"""Launches of an author's own kernels: of Triton, and operators that torch does not have.

A backend that falls back to torch gives right results and proves nothing about the kernels that its author wrote. The
counter counts launches by Python: a launch that a graph captures counts once, its replays do not. It does not count
functions of extension modules that are not operators, or kernels that Inductor generates. Kernels of CuTe DSL and
TVM-FFI are such functions: where these are imported, a count of zero says nothing. It is not a dispatch mode,
because torch.compile does not compile under one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any

import torch

_OF_TORCH = frozenset({"aten", "prim", "prims", "inductor", "higher_order", "profiler", "triton_kernels", "flex_lib"})
"""Namespaces of torch's operators, some of which it registers when they are first used."""
_KERNELS = ("JITFunction", "GluonJITFunction", "InterpretedFunction", "Autotuner", "Heuristics")
"""Classes of Triton whose objects are kernels, by name: Triton need not be installed."""


_NOT_COUNTED = ("cutlass", "tvm_ffi")
"""Packages whose kernels Python calls without a function that could be wrapped."""


class _Wrapped:
    """The functions of this process that launch kernels, wrapped once, however many counters there are."""

    def __init__(self) -> None:
        self.count = 0
        """Launches in this process while something was wrapped."""
        self._users = 0
        self._replaced: list[tuple[type[Any], str, Any]] = []
        self._of_torch: frozenset[str] = frozenset()

    def enter(self) -> None:
        """Wrap the functions that launch kernels, unless they are wrapped already."""
        self._users += 1
        if self._users > 1:
            return
        self._of_torch = _OF_TORCH | {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
        for owner, name in ((torch._ops.OpOverload, "_name"), (torch._ops.OpOverloadPacket, "_qualified_op_name")):
            self._replace(owner, "__call__", partial(self._operator, name))
        self.with_triton()

    def leave(self) -> None:
        """Restore the wrapped functions when the last counter is removed."""
        self._users -= 1
        while self._replaced and not self._users:
            owner, name, stock = self._replaced.pop()
            setattr(owner, name, stock)

    def with_triton(self) -> bool:
        """Wrap Triton's launches if it is imported. Returns false if it is not."""
        compiled = sys.modules.get("triton.runtime.jit")
        if compiled:
            self._replace(compiled.JITFunction, "run", self._kernel)
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter:
            self._replace(interpreter.InterpretedFunction, "run", self._kernel)
        return compiled is not None

    def _replace(self, owner: type[Any], name: str, wrapped: Any) -> None:
        if all(each is not owner for each, _, _ in self._replaced):
            stock = getattr(owner, name)
            self._replaced.append((owner, name, stock))
            setattr(owner, name, wrapped(stock))

    def _kernel(self, stock: Any) -> Any:
        def run(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if not kwargs.get("warmup"):
                self.count += 1
            return stock(kernel, *args, **kwargs)

        return run

    def _operator(self, attribute: str, stock: Any) -> Any:
        of_torch = self._of_torch

        def call(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if getattr(operator, attribute).partition("::")[0] not in of_torch:
                self.count += 1
            return stock(operator, *args, **kwargs)

        return call


_WRAPPED = _Wrapped()


class Launches:
    """A counter of launches in this process, from ``install`` until ``remove``."""

    def __init__(self) -> None:
        self._first = 0
        self._installed = False

    def install(self) -> None:
        """Start counting. Call it before the import of the backend: operator namespaces that appear later belong to the
        backend."""
        if not self._installed:
            self._installed = True
            _WRAPPED.enter()

    def remove(self) -> None:
        """Stop to count, once."""
        if self._installed:
            self._installed = False
            _WRAPPED.leave()

    def begin(self) -> bool:
        """Start a case-run at zero. Returns false if Triton is not imported yet, and so cannot be counted."""
        self._first = _WRAPPED.count
        return _WRAPPED.with_triton()

    def count(self, begun_with_triton: bool) -> int | None:
        """The number since ``begin``; None if none was counted and some may have been missed: Triton was imported
        meanwhile, or a package of ``_NOT_COUNTED`` is."""
        found = _WRAPPED.count - self._first
        missed = (not begun_with_triton and _WRAPPED.with_triton()) or any(name in sys.modules for name in _NOT_COUNTED)
        return None if missed and not found else found


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
