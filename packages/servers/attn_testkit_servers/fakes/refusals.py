"""Refusals of compiled code, as tables: the condition, the error's text, the source, and how to provoke it.

A fake refuses what the kernel that it stands for refuses, and nothing else. A table of ``Check`` lists these arguments.
``Refusals`` joins the tables of one entry point to arguments that are accepted. The tests provoke every check on the
fake, and ``ci/vendor_agreement.py --refusals`` on the kernel as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

Arguments = Mapping[str, Any]
"""Name of an argument -> its value."""
Functions = Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]]
"""Name of an operator -> its function, and the arguments that it writes."""
Change = Callable[[Arguments], Arguments]
"""Function from arguments that are accepted to those that replace some of them."""


@dataclass(frozen=True)
class Check:
    """One check of an entry point."""

    tried: str
    """Arguments that it refuses, in words: "float32 queries"."""
    change: Change
    """Function that makes such arguments. Earlier checks must accept them."""
    holds: Callable[[Any], bool]
    """Returns true if arguments, given as attributes, pass."""
    text: str
    """The part of the error's text that does not depend on values; empty if the source gives none."""
    source: str
    """``file:function`` in the source of the kernel's package."""


def refuse(checks: Iterable[Check], error: type[Exception] = RuntimeError, /, **given: Any) -> None:
    """Raise ``error`` with the text of the first check that does not hold for the arguments ``given``.

    If the compiled code's text goes on with values, the message names an example instead.
    """
    arguments = SimpleNamespace(**given)
    for check in checks:
        if not check.holds(arguments):
            raise error(f"{check.text.strip()} (refused, for example: {check.tried})".strip())


def call(implementation: Any, function: str, arguments: Arguments) -> Any:
    """Call a function with arguments by position: operators of compiled modules have no names for them."""
    return getattr(implementation, function)(*arguments.values())


@dataclass(frozen=True)
class Refusals:
    """Refusals of one entry point, and how it is called."""

    entry: str
    """Name of the entry point for readers."""
    function: str
    """Name of the function in both implementations."""
    fake: Any
    """The fake's functions as attributes."""
    real: Callable[[], Any]
    """The kernel's functions as attributes. Raises ``ImportError`` if they are not installed or do not load."""
    accepted: Callable[[torch.device, Any], dict[str, Any]]
    """Function that makes accepted arguments, in their order, for a device and an implementation."""
    checks: tuple[Check, ...]
    sm: tuple[int, int] = (90, 90)
    """First and last compute capability with this kernel."""
    call: Callable[[Any, str, Arguments], Any] = call
    output: Callable[[Any], torch.Tensor | None] = lambda returned: None
    """Function that returns the tensor to compare from the result of a call."""


def strided(x: torch.Tensor) -> torch.Tensor:
    """A tensor with the values of ``x`` and a stride of 2 in the last dimension."""
    return x.repeat_interleave(2, -1)[..., ::2]


def but(*names: str, **changed: Callable[[torch.Tensor], Any]) -> Change:
    """A change of single arguments: ``but(q=torch.Tensor.float)``. Each argument in ``names`` becomes ``strided``."""
    made: dict[str, Callable[[torch.Tensor], Any]] = {**dict.fromkeys(names, strided), **changed}
    return lambda given: {name: change(given[name]) for name, change in made.items()}


def to(**values: Any) -> Change:
    """A change of arguments to other values: ``to(num_splits=257)``."""
    return lambda given: values


def strided_heads(x: torch.Tensor) -> torch.Tensor:
    """[N, H, D] -> the same values, with neighboring heads next to each other in memory instead of channels."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def of_width(width: int, *others: str) -> Change:
    """A change of ``q``, ``k``, ``v`` and ``others`` to another head dim, at most five times as wide."""
    return but(**dict.fromkeys(("q", "k", "v", *others), lambda x: torch.cat([x] * 5, -1)[..., :width]))


def zeros(name: str, count: int, dtype: torch.dtype, step: int = 1) -> Change:
    """A change of an argument to [count] zeros with a stride of ``step``: a check refuses it before it is read."""
    return lambda given: {name: torch.zeros(count * step, dtype=dtype, device=given["q"].device)[::step]}


def operators_of(package: str, module: str, namespace: str = "") -> Any:
    """``torch.ops.namespace`` of a compiled module ``package/module.abi3.so``, loaded without importing the package.

    Without a ``namespace``, the module's name is used.

    Raises ``ImportError`` if it is not installed or does not load.
    """
    found = importlib.util.find_spec(package)
    folders = (found.submodule_search_locations or []) if found else []
    libraries = [path for folder in folders for path in sorted(Path(folder).glob(f"{module}.*so"))]
    if not libraries:
        raise ImportError(f"{package} has no compiled {module} here")
    try:
        torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(f"{libraries[0].name} does not load: {error}") from error
    return getattr(torch.ops, namespace or Path(module).name)
