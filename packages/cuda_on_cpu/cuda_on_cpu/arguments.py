"""Tensors inside the arguments and results of an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NO_TENSORS = frozenset(
    {int, float, bool, complex, str, slice, type(None), type(...), torch.Size, torch.dtype, torch.device,
     torch.memory_format}
)  # fmt: skip
"""Types that hold no tensor, for a quick test of most arguments."""


def tensors_in(values: Iterable[object], found: list[Tensor]) -> None:
    """Append to `found` every tensor in `values`, in order; lists and tuples are searched, dicts are not."""
    for value in values:
        kind = type(value)
        if kind is Tensor:
            found.append(value)  # type: ignore[arg-type]
        elif kind in NO_TENSORS:
            continue
        elif isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            tensors_in(value, found)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """`value` with every tensor in it replaced by `change(tensor)`. A named tuple comes back as a list."""
    kind = type(value)
    if kind is Tensor:
        return change(value)
    if kind in NO_TENSORS:
        return value
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        return items if isinstance(value, list) or hasattr(value, "_fields") else tuple(items)
    return value
