"""Shorter ways to compute a call of the interpreter, with the one NumPy function that does its work. The interpreter
inspects its operands in every call; here a call in a path is inspected once. An operand need not be broadcast over a
block first, because NumPy broadcasts by itself. A shorter way is used if it gave the same array, with the same memory
layout, when the path was recorded, so that sums over it add up in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cuda_on_cpu import triton_memory

Array = npt.NDArray[Any]
Run = Callable[..., Any]

_CAST = re.compile("create_([us]i_to_fp|fp_to_[us]i|fp_ext|fp_trunc|int_cast)")
_WORDS = re.compile("bf16|fp8.*|pointer.*")
"""Types whose arrays do not hold their values."""
_OF_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_SPREADS = ("create_splat", "create_broadcast")
_TAKES_SMALLER = {"create_addptr": (1,), "create_masked_load": (1, 2), "create_masked_store": (2,)}
"""Operands of functions in `triton_memory.py` that may be smaller than the block."""


def shorter(
    handle: Any, name: object, run: Run, operands: Sequence[Sequence[Any]], answer: Any
) -> tuple[Run, Sequence[int]] | None:
    """A shorter way to `answer`, and the operands that it uses; None if there is none. `operands` lists the possible
    ones of each argument: the one in the call, then those from which it was broadcast. `handle` is the interpreter's
    class of tensors.
    """
    if name in _TAKES_SMALLER and getattr(run, "__module__", None) == triton_memory.__name__:
        may = _TAKES_SMALLER[str(name)]
        return run, [len(choices) - 1 if i in may else 0 for i, choices in enumerate(operands)]
    if _CAST.fullmatch(str(name)):
        operands = operands[:1]
    made_with = [choices[0] for choices in operands]
    if not all(type(value) is handle and not _WORDS.match(value.dtype.name) for value in [answer, *made_with]):
        return None
    compute = _function_of(str(name), run, made_with, answer)
    if compute is None:
        return None
    for chosen in _choices([len(choices) for choices in operands]):
        values = [choices[i] for choices, i in zip(operands, chosen, strict=True)]
        if _alike(compute(*[value.data for value in values]), answer.data):
            return _on_tensors(handle, compute, len(chosen), answer.dtype), chosen
    return None


def _on_tensors(handle: Any, compute: Run, operands: int, dtype: Any) -> Run:
    new = object.__new__

    def made(data: Array) -> Any:  # the interpreter would check what was checked when the path was noted down
        answer = new(handle)
        answer.data, answer.dtype, answer.attr = data, dtype, {}
        return answer

    if operands == 1:
        return lambda one: made(compute(one.data))
    if operands == 2:
        return lambda one, two: made(compute(one.data, two.data))
    return lambda *values: made(compute(*[value.data for value in values]))


def _function_of(name: str, run: Run, operands: Sequence[Any], answer: Any) -> Run | None:
    if _CAST.fullmatch(name):
        dtype = answer.data.dtype
        return lambda data: data.astype(dtype)
    function = _asked(run, len(operands))
    if all(value.data.dtype == np.bool_ for value in operands) and function not in _OF_BITS:
        return None  # the interpreter computes with numbers of one bit
    return function


def _asked(run: Run, operands: int) -> Run | None:
    """The NumPy function that a method of the builder applies to its operands, if it does nothing else."""
    probe = SimpleNamespace(
        unary_op=lambda _, function: function,
        binary_op=lambda _, __, function: function,
        ternary_op=lambda _, __, ___, function: function,
    )
    try:
        function = run.__func__(probe, *[None] * operands)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return None
    return function if isinstance(function, np.ufunc) or function is np.where else None


def _choices(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of operands to try: as many others as possible, then one, then none."""
    yield [length - 1 for length in lengths]
    for i, length in enumerate(lengths):
        if length > 1:
            yield [length - 1 if i == j else 0 for j in range(len(lengths))]
    yield [0] * len(lengths)


def _alike(one: Array, other: Array) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape and one.strides == other.strides
    return same and one.tobytes() == other.tobytes()


class Reduced(NamedTuple):
    """A result of a reduction, like the tensor of the language that the interpreter makes."""

    handle: Any
    type: Any


def shorter_reduction(
    handle: Any, ufunc: np.ufunc, axis: int | None, keep_dims: bool, one: Any, answer: Any
) -> Run | None:
    """A shorter way to a reduction of one block: ``answer``, as the interpreter computes it from ``one``; None if NumPy
    leaves other bits."""
    if type(one) is not handle or _WORDS.match(one.dtype.name):
        return None
    new, dtype, kind, numbers = object.__new__, answer[0].handle.dtype, answer[0].type, answer[0].handle.data.dtype

    def run(block: Any) -> tuple[Reduced]:
        data = ufunc.reduce(block.data, axis=axis, keepdims=keep_dims)
        made = new(handle)
        made.data = data.astype(numbers, copy=False) if data.ndim else np.array([data]).astype(numbers)
        made.dtype, made.attr = dtype, {}
        return (Reduced(made, kind),)

    return run if len(answer) == 1 and _alike(run(one)[0].handle.data, answer[0].handle.data) else None


def reduction_together(ufunc: np.ufunc, axis: int | None, keep_dims: bool, one: Any, answer: Any) -> Run:
    """The same reduction of the blocks of several programs, which have one more axis in front."""
    dtype, kind, numbers, rank = answer[0].handle.dtype, answer[0].type, answer[0].handle.data.dtype, one.data.ndim
    axes = tuple(range(1, rank + 1)) if axis is None else (axis % rank) + 1

    def run(block: Any) -> tuple[Reduced]:
        data = ufunc.reduce(block.data, axis=axes, keepdims=keep_dims).astype(numbers, copy=False)
        made = object.__new__(type(block))
        made.data, made.dtype, made.attr = data.reshape(len(data), -1) if data.ndim == 1 else data, dtype, {}
        return (Reduced(made, kind),)

    return run


def spreads(name: object) -> bool:
    """True if a call only spreads a tensor over a block."""
    return name in _SPREADS
