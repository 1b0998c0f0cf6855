"""Faster kernels of torch, with the same bits, for operations whose CPU kernels are slow for large tensors.

torch converts FP8 values one by one, selects rows element by element, and fills by a mask without vector instructions.
If the other kernel is not faster, or not known to give the same bits (small tensors, odd layouts, gradients), the
operation itself runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cuda_on_cpu.private import direct_call, dtype_of

Step = Callable[[], object]

_aten = torch.ops.aten
_CONVERTS, _PICKS, _FILLS = 2048, 8192, 2048
"""Number of elements from which each kernel is faster."""
_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_ROWS = _FLOATS | {torch.uint8, torch.int16, torch.int32, torch.int64}
_INDICES = frozenset({torch.int32, torch.int64})


@functools.cache
def _numbers(narrow: torch.dtype, wide: torch.dtype) -> Tensor:
    """[256]: every FP8 number, as torch converts it."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(narrow).to(wide)


def _is_plain(tensor: Any, least: int) -> bool:
    """True for a contiguous tensor of `least` elements or more without a gradient."""
    return (
        type(tensor) is Tensor
        and tensor.numel() >= least
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


def _converts(source: Tensor, dtype: Any) -> bool:
    return dtype_of(source) in _FP8 and dtype in _FLOATS and _is_plain(source, _CONVERTS)


def _convert(source: Tensor, target: Tensor) -> Tensor:
    places = source.view(torch.uint8).view(-1).int()
    torch.index_select(_numbers(dtype_of(source), dtype_of(target)), 0, places, out=target.view(-1))
    return target


def _converted(source: Tensor, dtype: Any) -> Tensor | None:
    return _convert(source, torch.empty_like(source, dtype=dtype)) if _converts(source, dtype) else None


def _picks(tensor: Tensor, index: Any) -> bool:
    """True if `tensor[index]` selects whole rows by their numbers."""
    if type(index) is not Tensor or dtype_of(index) not in _INDICES or not index.dim() or not index.is_contiguous():
        return False
    if type(tensor) is not Tensor or dtype_of(tensor) not in _ROWS or not tensor.dim() or not tensor.size(0):
        return False
    return index.numel() * (tensor.numel() // tensor.size(0)) >= _PICKS and _is_plain(tensor, 1)


def _pick(tensor: Tensor, index: Tensor, target: Tensor) -> Tensor:
    """Select rows. Raises IndexError for numbers below 0 too, which `tensor[index]` counts from the end."""
    torch.index_select(tensor, 0, index.view(-1), out=target.view(-1, *tensor.size()[1:]))
    return target


def _picked(tensor: Tensor, index: Any) -> Tensor | None:
    if not _picks(tensor, index):
        return None
    try:
        return _pick(tensor, index, tensor.new_empty((*index.size(), *tensor.size()[1:])))
    except IndexError:
        return None


def _fills(tensor: Tensor, mask: Any, value: Any) -> bool:
    """True if a mask of the tensor's shape fills elements with a number that every dtype can represent."""
    if type(value) not in (int, float) or (math.isfinite(value) and value != 0):
        return False
    if type(mask) is not Tensor or dtype_of(mask) is not torch.bool or not _is_plain(tensor, _FILLS):
        return False
    first = tensor.dim() - mask.dim()
    sizes = tensor.size()[first:] if first >= 0 else ()
    return dtype_of(tensor) in _FLOATS and first >= 0 and all(map(_fits, mask.size(), sizes))


def _fits(size: int, whole: int) -> bool:
    return size in (1, whole)


def _fill(tensor: Tensor, mask: Tensor, value: float, target: Tensor) -> Tensor:
    torch.where(mask, tensor.new_full((), value), tensor, out=target)
    return target


def _filled(tensor: Tensor, mask: Any, value: Any) -> Tensor | None:
    return _fill(tensor, mask, value, torch.empty_like(tensor)) if _fills(tensor, mask, value) else None


def _at_places(tensor: Tensor, index: Any) -> Tensor | None:
    return _picked(tensor, index[0] if type(index) is tuple and len(index) == 1 else index)


def _run_to_copy(source: Tensor, **kwargs: Any) -> Any:
    found = _converted(source, kwargs["dtype"]) if kwargs.keys() == {"dtype"} else None
    return _TO_COPY(source, **kwargs) if found is None else found


def _run_index(tensor: Tensor, indices: Any) -> Any:
    found = _picked(tensor, indices[0]) if len(indices) == 1 else None
    return _INDEX(tensor, indices) if found is None else found


def _run_masked_fill(tensor: Tensor, mask: Any, value: Any) -> Any:
    found = _filled(tensor, mask, value)
    return _MASKED_FILL(tensor, mask, value) if found is None else found


_TO_COPY = direct_call(_aten._to_copy.default)
_INDEX = direct_call(_aten.index.Tensor)
_INDEX_INTO = direct_call(_aten.index.Tensor_out)
_MASKED_FILL = direct_call(_aten.masked_fill.Scalar)
_RUNS: dict[OpOverload, Callable[..., Any]] = {
    _aten._to_copy.default: _run_to_copy,
    _aten.index.Tensor: _run_index,
    _aten.masked_fill.Scalar: _run_masked_fill,
}


def run_of(op: OpOverload) -> Callable[..., Any]:
    """A function that calls `op`, or computes the same bits faster."""
    return _RUNS.get(op) or direct_call(op)


def _to_copy_into(target: Tensor, source: Tensor) -> Step:
    if _converts(source, dtype_of(target)) and target.is_contiguous():
        return functools.partial(_convert, source, target)
    return functools.partial(target.copy_, source)


def _index_into(target: Tensor, tensor: Tensor, indices: Any) -> Step:
    plainly = functools.partial(_INDEX_INTO, tensor, indices, out=target)
    if len(indices) != 1 or not _picks(tensor, indices[0]) or not target.is_contiguous():
        return plainly

    def step() -> None:
        try:
            _pick(tensor, indices[0], target)
        except IndexError:
            plainly()

    return step


def _masked_fill_into(target: Tensor, source: Tensor, mask: Tensor, value: Any) -> Step:
    if _fills(source, mask, value) and target.is_contiguous():
        return functools.partial(torch.where, mask, source.new_full((), value), source, out=target)

    def step() -> None:
        target.copy_(source)
        target.masked_fill_(mask, value)

    return step


INTO: dict[OpOverload, Callable[..., Step]] = {
    _aten._to_copy.default: _to_copy_into,
    _aten.index.Tensor: _index_into,
    _aten.masked_fill.Scalar: _masked_fill_into,
}
"""Operation -> from (target, its positional arguments) the ready call that leaves its only result in `target`."""


def _by_to(source: Tensor, *rest: Any) -> Tensor | None:
    return _converted(source, rest[0]) if len(rest) == 1 and type(rest[0]) is torch.dtype else None


BY_FUNCTION: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.float: lambda source: _converted(source, torch.float32),
    Tensor.to: _by_to,
    Tensor.__getitem__: _at_places,
    Tensor.masked_fill: _filled,
}
"""Function of torch -> from its positional arguments the result that it would give; None: call the function."""
