"""Device tensors that a backend keeps, and their memory."""

from __future__ import annotations

from typing import Any

import torch

_MAX_DEPTH = 5


def block_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory that a tensor is a view of."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def tensors_held_by(backend: object, skip: tuple[object, ...] = ()) -> dict[str, torch.Tensor]:
    """Every device tensor reachable from an object's attributes, by path such as ``_plans[4].lens``.

    ``skip``: objects not to look into. Empty tensors, callables, classes and objects deeper than five attributes are
    left out.
    """
    found: dict[str, torch.Tensor] = {}
    seen = {id(item) for item in skip}
    todo: list[tuple[str, Any, int]] = [("", backend, 0)]
    while todo:
        path, value, depth = todo.pop()
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_cuda and value.numel():
                found[path.lstrip(".")] = value
        elif isinstance(value, dict):
            todo += [(f"{path}[{key!r}]", item, depth + 1) for key, item in list(value.items())]
        elif isinstance(value, (list, tuple)):
            todo += [(f"{path}[{i}]", item, depth + 1) for i, item in enumerate(value)]
        elif hasattr(value, "__dict__") and not isinstance(value, (type, type(torch))) and not callable(value):
            todo += [(f"{path}.{name}", item, depth + 1) for name, item in list(vars(value).items())]
    return found
