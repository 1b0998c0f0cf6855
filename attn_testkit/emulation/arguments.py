"""The tensors inside what an operation is called with, and inside what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_in(value: object, found: list[Tensor]) -> None:
    """Append to `found` every tensor in `value`, in order; lists and tuples are searched, dicts are not."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            tensors_in(item, found)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """`value` with every tensor in it replaced by `change(tensor)`. A named tuple comes back as a list."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        return items if isinstance(value, list) or hasattr(value, "_fields") else tuple(items)
    return value
