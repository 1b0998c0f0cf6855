"""Functions of torch that read no value on the host: eager code may call them directly while host syncs are refused.

For a function that is not in these tables, every operation below it is inspected, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_on_cpu.arguments import NO_TENSORS
from cuda_on_cpu.private import dtype_of, modes_entered, vmap_level
from cuda_on_cpu.shortcuts import VIEWS, only_looks, operation_of


def _functions(names: str) -> Iterable[Any]:
    """Methods of a tensor, and functions of torch, with these names."""
    found = (getattr(owner, name, None) for name in names.split() for owner in (Tensor, torch))
    return (each for each in found if callable(each))


TENSORS_AT: dict[Any, frozenset[int]] = {
    **dict.fromkeys(_functions("arange full zeros ones"), frozenset()),
    **dict.fromkeys(
        _functions(
            "float double half bfloat16 int long bool contiguous clone flatten reshape zero_ fill_ new_zeros new_ones "
            "new_full zeros_like ones_like full_like abs neg exp log tanh sqrt square cumsum any all sum amax amin "
            "logsumexp softmax"
        ),
        frozenset({0}),
    ),
    **dict.fromkeys(VIEWS, frozenset({0})),
    **dict.fromkeys(_functions("repeat_interleave"), frozenset({0})),
    F.pad: frozenset({0}),
    **dict.fromkeys(
        _functions(
            "add sub mul div add_ sub_ mul_ div_ remainder floor_divide maximum minimum logaddexp copy_ masked_fill "
            "masked_fill_ searchsorted __and__ __or__ __floordiv__"
        ),
        frozenset({0, 1}),
    ),
    **dict.fromkeys((*_functions("clamp clamp_"), torch.where), frozenset({0, 1, 2})),
    **dict.fromkeys(_functions("index_select gather"), frozenset({0, 2})),
}
"""Function -> positions at which it may have a tensor; at any other position it would read the tensor's value."""

_AT_LEAST = {torch.where: 3, torch.repeat_interleave: 2, Tensor.repeat_interleave: 2}
"""Function -> its smallest number of arguments; with fewer the size of the result depends on values."""
_OF_LISTS = frozenset({torch.cat, torch.stack})
_INDICES = frozenset({torch.int32, torch.int64})


def reads_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """True if a call reads no value on the host, provided that all its tensors are on the device.

    False inside of vmap, and if the program has its own dispatch mode.
    """
    if modes_entered() or vmap_level() is not None:
        return False
    if kwargs:
        for value in kwargs.values():
            if type(value) not in NO_TENSORS:
                return False
    places = TENSORS_AT.get(func)
    if places is not None:
        if len(args) < _AT_LEAST.get(func, 0):
            return False
        for position, value in enumerate(args):
            if not (position in places if type(value) is Tensor else _is_number(value)):
                return False
        return True
    if not args:
        return False
    if func in _OF_LISTS:
        return type(args[0]) in (list, tuple) and _are_tensors(args[0]) and all(map(_is_number, args[1:]))
    if func is Tensor.index_put_:
        return _puts_by_number(args)
    if kwargs:
        return False
    if func is Tensor.to:
        return len(args) == 2 and type(args[1]) is torch.dtype
    return only_looks(func, args) or operation_of(func, args) is not None


def _is_number(value: Any) -> bool:
    """True for a number, a size, or another plain value."""
    kind = type(value)
    return kind in NO_TENSORS or (kind in (list, tuple) and all(type(each) in (int, float) for each in value))


def _are_tensors(values: Iterable[Any]) -> bool:
    return all(type(value) is Tensor for value in values)


def _puts_by_number(args: tuple[Any, ...]) -> bool:
    """True if rows are stored by index values; for a mask the host would have to count."""
    if len(args) != 3 or type(args[1]) not in (list, tuple) or not _are_tensors((args[0], args[2])):
        return False
    return _are_tensors(args[1]) and all(dtype_of(index) in _INDICES for index in args[1])
