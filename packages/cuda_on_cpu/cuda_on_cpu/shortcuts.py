"""Functions of torch with a known path through the dispatcher: those that only view memory differently, and those that
are one operation. A capture records both without the dispatcher; tests compare every row with the dispatcher."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_on_cpu.private import OpOverload

Taken = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
"""An operation and its arguments."""

_aten = torch.ops.aten
_INTEGERS = frozenset({int, type(None)})
_NUMBERS = frozenset({int, float})
_NOTHING: dict[str, Any] = {}

VIEWS = frozenset(
    {Tensor.view, Tensor.as_strided, Tensor.transpose, Tensor.permute, Tensor.unsqueeze, Tensor.squeeze, Tensor.expand,
     Tensor.select, Tensor.narrow, Tensor.t, Tensor.unbind, Tensor.diagonal, Tensor.unfold, Tensor.movedim,
     Tensor.swapaxes, Tensor.swapdims, Tensor.detach}
)  # fmt: skip
"""Functions that, with plain numbers, return memory of their first argument, run no kernel and read no value."""

_WITHOUT_CONTENTS = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided, Tensor.view_as,
     Tensor.expand_as}
)  # fmt: skip
_LOOKS_IF_CONTIGUOUS = frozenset({Tensor.contiguous, Tensor.reshape, Tensor.flatten})

_BINARY = {
    Tensor.add: (_aten.add.Tensor, _aten.add.Tensor),
    Tensor.sub: (_aten.sub.Tensor, _aten.sub.Tensor),
    Tensor.mul: (_aten.mul.Tensor, _aten.mul.Tensor),
    Tensor.div: (_aten.div.Tensor, _aten.div.Tensor),
    Tensor.lt: (_aten.lt.Tensor, _aten.lt.Scalar),
    Tensor.le: (_aten.le.Tensor, _aten.le.Scalar),
    Tensor.gt: (_aten.gt.Tensor, _aten.gt.Scalar),
    Tensor.ge: (_aten.ge.Tensor, _aten.ge.Scalar),
    Tensor.__eq__: (_aten.eq.Tensor, _aten.eq.Scalar),
    Tensor.__ne__: (_aten.ne.Tensor, _aten.ne.Scalar),
    Tensor.__and__: (_aten.bitwise_and.Tensor, _aten.bitwise_and.Scalar),
    Tensor.__or__: (_aten.bitwise_or.Tensor, _aten.bitwise_or.Scalar),
}
"""Operations of two tensors, or of a tensor and a number."""

_UNARY = {
    Tensor.__invert__: _aten.bitwise_not.default,
    Tensor.neg: _aten.neg.default,
    Tensor.clone: _aten.clone.default,
}

_OF_ONE_DIMENSION = {
    Tensor.any: _aten.any.dim,
    Tensor.all: _aten.all.dim,
    Tensor.cumsum: _aten.cumsum.default,
}

_PRODUCTS = {
    Tensor.matmul: _aten.matmul.default,
    torch.matmul: _aten.matmul.default,
    F.linear: _aten.linear.default,
}

_SOFTMAX = frozenset({torch.softmax, Tensor.softmax})

_CASTS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.int: torch.int32,
    Tensor.long: torch.int64,
    Tensor.bool: torch.bool,
}


def only_looks(func: Any, args: tuple[Any, ...]) -> bool:
    """True if a call without keywords runs no kernel and returns memory of its first argument."""
    if type(args[0]) is not Tensor:  # a subclass may do anything
        return False
    return has_numbers_alone(args) if func in VIEWS else func is Tensor.__getitem__ and _is_basic(args[1])


def launches_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """True if a call starts no kernel: it makes memory without contents, or looks at the memory of its argument."""
    if func in _WITHOUT_CONTENTS:
        return True
    if not args or type(args[0]) is not Tensor:
        return False
    return only_looks(func, args) or (func in _LOOKS_IF_CONTIGUOUS and args[0].is_contiguous())


def has_numbers_alone(args: tuple[Any, ...]) -> bool:
    """True if the arguments of a tensor's method are only numbers, sizes, or a type, so nothing must be read from
    memory."""
    return all(type(value) in _INTEGERS or _is_shape(value) for value in args[1:])


def _is_shape(value: Any) -> bool:
    kind = type(value)
    if kind is tuple or kind is list or kind is torch.Size:
        return all(type(size) is int for size in value)
    return kind is torch.dtype


def _is_basic(index: Any) -> bool:
    """True if an index is made only of numbers, slices of numbers, None and `...`."""
    kind = type(index)
    if kind is slice:
        return type(index.start) in _INTEGERS and type(index.stop) in _INTEGERS and type(index.step) in _INTEGERS
    if kind is tuple:
        return all(map(_is_basic, index))
    return kind in _INTEGERS or index is Ellipsis


def operation_of(func: Any, args: tuple[Any, ...]) -> Taken | None:
    """The only operation of a call without keywords, if all its tensors are in one place; None: use the dispatcher. The
    operation writes none of its arguments.
    """
    count = len(args)
    if func is torch.einsum:
        return _einsum(*args)
    if not count or type(args[0]) is not Tensor:
        return None
    product = _PRODUCTS.get(func)
    if product is not None:
        return (product, args, _NOTHING) if _are_floating(args) else None
    if count == 2:
        return _of_two(func, args)
    if count == 1:
        op = _UNARY.get(func)
        return _cast(args[0], _CASTS.get(func)) if op is None else (op, args, _NOTHING)
    if count == 3 and func is Tensor.masked_fill and type(args[1]) is Tensor and type(args[2]) in _NUMBERS:
        return _aten.masked_fill.Scalar, args, _NOTHING
    return None


def _of_two(func: Any, args: tuple[Any, ...]) -> Taken | None:
    first, second = args
    kind = type(second)
    both = _BINARY.get(func)
    if both is not None:
        return (both[0 if kind is Tensor else 1], args, _NOTHING) if kind is Tensor or kind in _NUMBERS else None
    if kind is int:
        if func in _SOFTMAX:
            return _aten._softmax.default, (first, second, False), _NOTHING
        op = _OF_ONE_DIMENSION.get(func)
        return None if op is None else (op, args, _NOTHING)
    if func is Tensor.to and kind is torch.dtype:
        return _cast(first, second)
    if func is Tensor.__getitem__:
        indices = [second] if kind is Tensor else list(second) if kind is tuple else []
        return (_aten.index.Tensor, (first, indices), _NOTHING) if indices and all(map(_is_index, indices)) else None
    return None


def _is_index(value: Any) -> bool:
    """True if a tensor is an integer index with dimensions; an index without dimensions is a number that has to be
    read."""
    return type(value) is Tensor and value.dtype in _INDICES and value.dim() > 0


def _einsum(equation: Any, *operands: Any) -> Taken | None:
    if len(operands) == 1 and type(operands[0]) in (list, tuple):
        operands = tuple(operands[0])
    # Of three and more torch chooses an order first.
    if type(equation) is str and 0 < len(operands) < 3 and _are_floating(operands):
        return _aten.einsum.default, (equation, list(operands)), _NOTHING
    return None


def _are_floating(values: tuple[Any, ...]) -> bool:
    """True if all are plain tensors of floating-point numbers: CUDA multiplies no matrices of integers."""
    return all(type(value) is Tensor and value.dtype.is_floating_point for value in values)


def _cast(tensor: Any, dtype: torch.dtype | None) -> Taken | None:
    if dtype is None or tensor.dtype is dtype:  # without a change of type it returns its argument
        return None
    return _aten._to_copy.default, (tensor,), {"dtype": dtype}


_INDICES = frozenset({torch.int32, torch.int64})
