"""Loads and stores of Triton's interpreter as NumPy does them, twenty times as fast.

The stock interpreter copies element by element, masked or not, and adds up 64-bit pointers for all of them. Here all
memory is one array that starts near address 0, and a pointer is an index into it. A block of pointers is mostly the sum
of a column and a row; it keeps that form until it is used, and rows that are masked off are never added up. The results
equal those of the stock functions, bit by bit. Pointers that are unaligned, or not an address, are left to the stock
functions.

An offset, a mask or a value for masked elements may be smaller than the block if NumPy would broadcast it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cuda_on_cpu.triton_addresses import memory, places_of, read
from cuda_on_cpu.triton_bounds import (
    barriers_looked_at,
    exchanges_looked_at,
    look_at_load,
    look_at_store,
    pointers_of_its_own,
    programs_named,
    undefined,
)

Array = npt.NDArray[Any]
Replacement = tuple[Any, str, Any]


def replacements(module: Any) -> list[Replacement]:
    """(object, attribute, faster replacement) for the interpreter `module`; none if it is another one."""
    try:
        builder, pointers = module.InterpreterBuilder, pointers_of(module.TensorHandle)
        found = [
            (builder, "create_load", _load_of(module, pointers, builder.create_load)),
            (builder, "create_masked_load", _masked_load_of(module, pointers, builder.create_masked_load)),
            (builder, "create_masked_store", _masked_store_of(pointers, builder.create_masked_store)),
            (builder, "create_addptr", _addptr_of(pointers, builder.create_addptr)),
            (builder, "create_splat", _splat_of(module, pointers, builder.create_splat)),
            (builder, "create_expand_dims", _expand_dims_of(module, pointers, builder.create_expand_dims)),
            (builder, "create_broadcast", _broadcast_of(module, pointers, builder.create_broadcast)),
            (builder, "create_int_to_ptr", pointers_of_its_own(builder.create_int_to_ptr)),
            (builder, "create_barrier", barriers_looked_at(builder.create_barrier)),
            (builder, "set_grid_idx", programs_named(builder.set_grid_idx)),
            (builder, "create_atomic_cas", exchanges_looked_at(builder.create_atomic_cas)),
        ]
        stock = {name: getattr(builder, name) for _, name, _ in found}
        works = np.array_equal(_sample(module, stock), _sample(module, {name: new for _, name, new in found}))
    except (AttributeError, TypeError, ValueError):
        return []
    return found if works else []


def _sample(module: Any, functions: dict[str, Any]) -> Array:
    """Contents of a buffer after a few loads and stores."""
    language, builder, handle = module.tl, module.interpreter_builder, module.TensorHandle

    def hints(name: str, before: int) -> list[None]:
        return [None] * (len(inspect.signature(getattr(type(builder), name)).parameters) - before)

    rows, columns = 8, 4
    buffer = np.arange(64, dtype=np.float32)
    shape, kind = [rows, columns], language.pointer_type(language.float32)
    start = handle(np.array([buffer.ctypes.data], np.uint64), kind)
    at = functions["create_splat"](builder, language.block_type(kind, shape), start)
    for steps in (np.arange(rows)[::-1, None] * 5, np.arange(columns)[None, :], np.full((1, 1), 7)):
        at = functions["create_addptr"](builder, at, handle(np.broadcast_to(steps, shape), language.int64))
    column = functions["create_expand_dims"](builder, handle(np.arange(rows), language.int64), 1)
    at = functions["create_addptr"](builder, at, functions["create_broadcast"](builder, column, shape))
    for mask in (np.arange(rows)[:, None] % 2 == 0, np.arange(rows * columns).reshape(shape) % 3 == 0):
        where = handle(np.broadcast_to(mask, shape), language.int1)
        other = handle(np.full(shape, 0.5, np.float32), language.float32)
        found = functions["create_masked_load"](builder, at, where, other, *hints("create_masked_load", 4))
        whole = functions["create_load"](builder, at, *hints("create_load", 2))
        sum_of_both = handle(found.data + whole.data, language.float32)
        functions["create_masked_store"](builder, at, sum_of_both, where, *hints("create_masked_store", 4))
    return buffer


@functools.cache
def pointers_of(handle: Any) -> Any:
    """The class of blocks of pointers, for the interpreter's class of tensors."""

    class Pointers(handle):  # type: ignore[misc]
        """A block of pointers, as the sum of `parts`: int64, of its rank, of length 1 along axes with equal
        elements. `base`: the pointer that the kernel was given, if it is known."""

        def __init__(
            self, parts: Sequence[Array], shape: tuple[int, ...], dtype: Any, element: Any, base: int | None = None
        ) -> None:
            self.parts, self.shape, self.dtype, self.element, self.base = parts, shape, dtype, element, base
            self.attr: dict[str, Any] = {}

        @functools.cached_property
        def data(self) -> Array:
            """All pointers, in the form of the stock interpreter."""
            return _spread(_sum(self.parts), self.shape).view(np.uint64)

        def get_element_ty(self) -> Any:
            """Type of the elements that they point to."""
            return self.element

    return Pointers


def _sum(parts: Sequence[Array]) -> Array:
    return functools.reduce(np.add, parts)


def _spread(values: Array, shape: tuple[int, ...]) -> Array:
    """`np.broadcast_to`, five times as fast if possible."""
    if values.shape == shape:
        return values
    if values.ndim != len(shape) or not values.flags.c_contiguous or not _fits(values.shape, shape):
        return np.broadcast_to(values, shape)
    strides = [stride if n > 1 else 0 for n, stride in zip(values.shape, values.strides, strict=True)]
    return np.ndarray(shape, values.dtype, values, 0, strides)


def _fits(shape: Sequence[int], block: Sequence[int]) -> bool:
    return all(n in (1, size) for n, size in zip(shape, block, strict=True))


def _without_copies(values: Array) -> Array:
    """A view of length 1 along every axis along which all elements are one."""
    if 0 not in values.strides:
        return values
    return values[tuple(slice(1) if stride == 0 else slice(None) for stride in values.strides)]


def as_pointers(ptr: Any, pointers: Any) -> Any:
    """A tensor of pointers as a block of the class ``pointers`` (``pointers_of``)."""
    if type(ptr) is pointers:
        return ptr
    parts = (_without_copies(ptr.data).view(np.int64),)
    return pointers(parts, ptr.data.shape, ptr.dtype, ptr.get_element_ty(), _base_of(ptr))


def _base_of(ptr: Any) -> int | None:
    """Argument of the kernel from which ``ptr`` was computed; ``ptr`` itself if it is a single new pointer."""
    base: int | None = getattr(ptr, "base", None)
    return int(ptr.data.reshape(-1).view(np.int64)[0]) if base is None and ptr.data.size == 1 else base


def _narrow(values: Array, shape: tuple[int, ...]) -> Array | None:
    """A view of the rank of `shape`, as small as NumPy can spread over it; None if it cannot."""
    if values.size == 1:
        return values if values.ndim == len(shape) else values.reshape((1,) * len(shape))
    if values.ndim != len(shape) or not _fits(values.shape, shape):
        return None
    return _without_copies(values)


def _live(mask: Array, parts: Sequence[Array], shape: tuple[int, ...]) -> tuple[Any, Sequence[Array]]:
    """Part of a block that is not masked off: an index into the block, and the parts of the pointers there."""
    if mask.all():
        return (..., parts)
    if mask.size == len(mask) == shape[0]:
        live = mask.reshape(-1).nonzero()[0]
        return (live, [part[live] if len(part) > 1 or not live.size else part for part in parts])
    if len(shape) > 2 and mask.size == mask.shape[0] * mask.shape[1]:
        rows = _spread(mask, (*shape[:2], *mask.shape[2:])).reshape(shape[:2]).nonzero()
        return (rows, [_rows_of(part, rows) for part in parts])
    where = _spread(mask, shape)
    return (where, [_spread(_sum(parts), shape)[where]])


def _rows_of(part: Array, rows: tuple[Array, ...]) -> Array:
    """Elements of an array of pointers at these places of its first two axes, along which it may have length 1."""
    i, j = (0 if size == 1 else row for size, row in zip(part.shape[:2], rows, strict=True))
    found: Array = part[i, j]
    found = found[None] if found.ndim == part.ndim - 2 else found
    return found if rows[0].size else found[:0]


def _bits(mask: Any) -> Array:
    """The array of a mask: Triton before 3.8 passes that of a descriptor or of a block pointer unchanged."""
    return mask if type(mask) is np.ndarray else mask.data


def _is_volatile(rest: Sequence[Any]) -> bool:
    """The last argument of a load."""
    return bool(rest) and rest[-1] is True


def _everything_looked_at(look: Any, at: Any, mask: Any, size: int) -> None:
    """Check a load or a store that is left to the stock function."""
    addresses, chosen = np.asarray(at.data).view(np.int64), np.asarray(_bits(mask), dtype=bool)
    if chosen.size == addresses.size:
        addresses = addresses.reshape(-1)[chosen.reshape(-1)]
    look((addresses,), size, at.base)


def _load_of(module: Any, pointers: Any, stock: Any) -> Any:
    handle = module.TensorHandle

    def create_load(self: Any, ptr: Any, *rest: Any, **named: Any) -> Any:
        at = as_pointers(ptr, pointers)
        dtype = module._get_np_dtype(at.element)
        look_at_load(at.parts, dtype.itemsize, at.base, volatile=_is_volatile(rest), shape=at.shape)
        found = read(places_of(at.parts, dtype.itemsize), dtype)
        if found is None:
            return stock(self, ptr, *rest, **named)
        return handle(found if found.shape == at.shape else _spread(found, at.shape).copy(), at.element)

    return create_load


def _masked_load_of(module: Any, pointers: Any, stock: Any) -> Any:
    handle = module.TensorHandle

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        at = as_pointers(ptrs, pointers)
        dtype, chosen = module._get_np_dtype(at.element), _narrow(_bits(mask), at.shape)
        if chosen is None or (other is not None and other.data.dtype != dtype):
            _everything_looked_at(look_at_load, at, mask, dtype.itemsize)
            return stock(self, ptrs, mask, other, *rest, **named)
        where, parts = _live(chosen, at.parts, at.shape)
        look_at_load(parts, dtype.itemsize, at.base, volatile=_is_volatile(rest), shape=at.shape, where=where)
        live = read(places_of(parts, dtype.itemsize), dtype)
        if live is None:
            return stock(self, ptrs, mask, other, *rest, **named)
        found = np.zeros(at.shape, dtype)
        if where is not ...:
            found[...] = undefined(at.element, dtype) if other is None else other.data
        if live.size:
            found[where] = live
        return handle(found, at.element)

    return create_masked_load


def _masked_store_of(pointers: Any, stock: Any) -> Any:
    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        at, values = as_pointers(ptrs, pointers), value.data
        chosen = _narrow(_bits(mask), at.shape)
        if values.shape != at.shape and values.size == math.prod(at.shape):
            values = values.reshape(at.shape)  # a row that a descriptor scatters
        if chosen is None or values.shape != at.shape:
            _everything_looked_at(look_at_store, at, mask, values.itemsize)
            return stock(self, ptrs, value, mask, *rest, **named)
        where, parts = _live(chosen, at.parts, at.shape)
        written = values[where]
        look_at_store(parts, values.itemsize, at.base, written, shape=at.shape, where=where)
        places = places_of(parts, values.itemsize)
        if places is None:
            return stock(self, ptrs, value, mask, *rest, **named)
        if places.size:
            try:
                memory(values.dtype)[_spread(places, written.shape)] = written
            except IndexError:  # no address
                return stock(self, ptrs, value, mask, *rest, **named)
        return None

    return create_masked_store


def _addptr_of(pointers: Any, stock: Any) -> Any:
    def create_addptr(self: Any, ptr: Any, offset: Any) -> Any:
        at = as_pointers(ptr, pointers)
        steps = _narrow(offset.data, at.shape) if at.shape else None
        if steps is None:
            moved = stock(self, ptr, offset)
            moved.base = at.base
            return moved
        step = steps.astype(np.int64)
        step *= max(1, at.element.primitive_bitwidth // 8)
        return pointers(_with_part(at.parts, step), at.shape, ptr.dtype, at.element, at.base)

    return create_addptr


def _with_part(parts: Sequence[Array], step: Array) -> Sequence[Array]:
    """`parts` with one more part, which is added to another one if that does not enlarge it."""
    for i, part in enumerate(parts):
        if part.shape == step.shape or step.size == 1 or part.size == 1:
            return (*parts[:i], part + step, *parts[i + 1 :])
    return (*parts, step)


def _splat_of(module: Any, pointers: Any, stock: Any) -> Any:
    pointer = module.tl.pointer_type

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if not isinstance(arg.dtype, pointer) or arg.data.size != 1:
            return stock(self, ret_ty, arg)
        shape = tuple(int(size) for size in ret_ty.shape)
        parts = (arg.data.view(np.int64).reshape((1,) * len(shape)),)
        return pointers(parts, shape, arg.dtype.scalar, arg.get_element_ty(), _base_of(arg))

    return create_splat


def _expand_dims_of(module: Any, pointers: Any, stock: Any) -> Any:
    handle = module.TensorHandle

    def create_expand_dims(self: Any, arg: Any, axis: int) -> Any:
        if axis < 0:
            return stock(self, arg, axis)
        where = (slice(None),) * axis + (None,)
        if type(arg) is not pointers:
            return handle(arg.data[where], arg.dtype.scalar)
        shape = (*arg.shape[:axis], 1, *arg.shape[axis:])
        return pointers([part[where] for part in arg.parts], shape, arg.dtype.scalar, arg.element, arg.base)

    return create_expand_dims


def _broadcast_of(module: Any, pointers: Any, stock: Any) -> Any:
    handle = module.TensorHandle

    def create_broadcast(self: Any, arg: Any, shape: Any) -> Any:
        block = tuple(int(size) for size in shape)
        if type(arg) is not pointers:
            return handle(_spread(arg.data, block), arg.dtype.scalar)
        if len(arg.shape) != len(block) or not _fits(arg.shape, block):
            return stock(self, arg, shape)
        return pointers(arg.parts, block, arg.dtype.scalar, arg.element, arg.base)

    return create_broadcast
