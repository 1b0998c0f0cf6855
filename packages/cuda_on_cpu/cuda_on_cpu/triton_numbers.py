"""Python's numbers in place of a compiled kernel's tensors: the counter of a loop, and arguments that are floats. They
compute like the interpreter's numbers, and support `i.to(tl.int64)` like the tensor that they are on a GPU.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

_OPERATORS = ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow", "and_", "or_", "xor", "lshift", "rshift")
_SIGNS = ("neg", "pos", "abs", "invert")


class PythonNumber:
    """A Python number with the attributes of a tensor."""

    __slots__ = ()


@functools.cache
def python_number(module: Any) -> Callable[[Any], Any]:
    """Function that makes such numbers from an int or a float, for the interpreter `module`; other values are
    unchanged."""
    kinds: dict[type, type] = {}

    def number(value: Any) -> Any:
        kind = kinds.get(type(value))
        return value if kind is None else kind(value)

    tensor = module.tl.core.tensor
    for kind in (int, float):
        kinds[kind] = _kind_of(kind, number, lambda value: as_tensor(module, value), tensor)
    return number


def as_tensor(module: Any, number: Any) -> Any:
    """The tensor that the language makes from a number."""
    return module.interpreter_semantic.to_tensor(number, False)


def _kind_of(kind: type, number: Callable[[Any], Any], tensor_of: Callable[[Any], Any], tensor: type) -> type:
    def of_tensor(self: Any, name: str) -> Any:
        if name.startswith("_") or not hasattr(tensor, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return getattr(tensor_of(kind(self)), name)

    def computed(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)

        def compute(self: Any, *others: Any) -> Any:
            return number(plain(self, *others))

        return compute

    members: dict[str, Any] = {"__slots__": (), "__getattr__": of_tensor}
    wanted = [f"__{form}{name.rstrip('_')}__" for name in _OPERATORS for form in ("", "r")]
    for name in (*wanted, *[f"__{name}__" for name in _SIGNS]):
        if hasattr(kind, name):
            members[name] = computed(name)
    return type(kind.__name__, (kind, PythonNumber), members)


def plain(value: Any) -> Any:
    """A Python number without the attributes of a tensor; anything else unchanged."""
    if not isinstance(value, PythonNumber):
        return value
    made: Any = value
    return operator.index(made) if isinstance(made, int) else float(made)
