"""Programs of a launch that take one path, run as one: what differs between them has one more axis, in front.

A call of the path is made once for all of them, on larger arrays, if it is known how; otherwise once for each. Programs
that are in the same launch but on another path, that use what another one writes, or that make any error, run one after
another instead (`triton_programs.py`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cuda_on_cpu.triton_memory import as_pointers, pointers_of
from cuda_on_cpu.triton_races import Races

Array = npt.NDArray[Any]
Run = Callable[..., Any]
AtOnce = Callable[..., Any]
"""A call for several programs: takes the ``Batch``, and arguments with its axis, or with an axis of length 1."""

_BY_ELEMENT = re.compile(
    "create_(f?(add|sub|mul|div|rem|neg|abs)|[us](div|rem)|idiv|precise_divf|shl|[al]shr|umulhi|iabs|fma|clampf|"
    "(min|max)(si|ui|imumf|numf)|[if]cmp.*|and|or|xor|select|[us]i_to_fp|fp_to_[us]i|fp_ext|fp_trunc|fp_to_fp|int_cast|"
    "bitcast|cos|sin|exp|exp2|log|log2|sqrt|precise_sqrt|rsqrt|erf|floor|ceil)"
)


class NotTogether(Exception):
    """Programs cannot run as one. ``row``: the first one whose path is not known; None if there is another reason."""

    def __init__(self, row: int | None = None) -> None:
        super().__init__()
        self.row = row


class Each(list[Any]):
    """Values of a batch that are not one array."""


class Batch:
    """Programs at one place of their paths."""

    def __init__(self, module: Any, races: Races, programs: Sequence[tuple[int, ...]], values: list[Any]) -> None:
        self._module, self._races = module, races
        self._handle, self._pointers = module.TensorHandle, pointers_of(module.TensorHandle)
        self.values = values
        self._programs = np.array(programs, np.int32)
        self.rows = np.arange(len(programs))
        self._lanes = races.lanes_together()
        self._lifted: dict[int, Any] = {}

    def part(self, at: Sequence[int], differ: Sequence[bool]) -> Batch:
        """Only the programs with these places in the batch. ``differ``: True for values that have its axis."""
        made = object.__new__(Batch)
        made.__dict__.update(self.__dict__)
        index = np.array(at)
        made.values = [
            self._taken(value, index) if has_axis and value is not None else value
            for value, has_axis in zip(self.values, differ, strict=True)
        ]
        made._programs, made.rows, made._lifted = self._programs[index], self.rows[index], {}
        made._lanes = None if self._lanes is None else self._lanes.copy()
        return made

    def enter(self) -> None:
        """The programs of this batch go on, after those of another one."""
        self._races.go_on_together(self.rows, self._lanes)

    def call(
        self, run: Run, takes: Sequence[int], at_once: AtOnce | None, differ: Sequence[bool], is_effect: bool
    ) -> Any:
        """Make a call of the path. Raises NotTogether for an effect that is not known to be possible at once."""
        values = self.values
        if at_once is not None:
            arguments = [values[slot] if differ[slot] else self._with_axis(slot) for slot in takes]
            if not any(type(value) is Each for value in arguments):
                return at_once(self, *arguments)
        if is_effect:
            raise NotTogether
        return self._joined(self.each(run, takes, differ))

    def each(self, run: Run, takes: Sequence[int], differ: Sequence[bool]) -> list[Any]:
        """The results of a call for the programs, one after another."""
        columns = [
            [self._of(self.values[slot], i) for i in range(len(self.rows))]
            if differ[slot]
            else [self.values[slot]] * len(self.rows)
            for slot in takes
        ]
        return [run(*arguments) for arguments in zip(*columns, strict=True)] if columns else [run() for _ in self.rows]

    def program_id(self, axis: int) -> Any:
        """The number of each program along an axis of the grid."""
        return self._handle(self._programs[:, axis : axis + 1], self._module.tl.int32)

    def pointers(self, ptr: Any) -> Any:
        """A block of pointers, or one pointer, as a block with the axis of the batch."""
        at = as_pointers(ptr, self._pointers)
        if at.shape[0] == len(self.rows):
            return at
        return self._pointers(at.parts, (len(self.rows), *at.shape[1:]), at.dtype, at.element, at.base)

    def spread(self, value: Any, ptr: Any) -> Any:
        """Return the stored value as a block of the shape of the pointers."""
        shape = self.pointers(ptr).shape
        if value.data.shape == shape:
            return value
        return self._changed(_padded(value, len(shape)), lambda data: np.broadcast_to(data, shape))

    def size(self, shape: Iterable[int]) -> tuple[int, ...]:
        """A shape with the axis of the batch."""
        return (len(self.rows), *map(int, shape))

    def _with_axis(self, slot: int) -> Any:
        value = self.values[slot]
        if not isinstance(value, self._handle):
            return value
        known = self._lifted.get(slot)
        if known is None:
            shape = (1, *value.shape) if type(value) is self._pointers else ()
            known = self._lifted[slot] = self._changed(value, lambda array: array[None], shape)
        return known

    def _changed(self, value: Any, change: Callable[[Array], Array], shape: tuple[int, ...] = ()) -> Any:
        """A tensor like another one; ``shape``: that of a block of pointers."""
        if type(value) is self._pointers:
            return self._pointers([change(part) for part in value.parts], shape, value.dtype, value.element, value.base)
        made = object.__new__(type(value))
        made.__dict__.update(value.__dict__)
        made.data = change(value.data)
        return made

    def _taken(self, value: Any, index: Array) -> Any:
        if isinstance(value, self._handle):
            if type(value) is self._pointers:
                shape = (len(index), *value.shape[1:])
                return self._changed(value, lambda part: part if len(part) == 1 else part[index], shape)
            taken = _rows(value.data, index)
            if _layout(taken) != _layout(value.data):
                return Each(self._of(value, i) for i in index.tolist())
            return self._changed(value, lambda _: taken)
        if type(value) is Each:
            return Each(value[i] for i in index.tolist())
        return _rebuilt(value, lambda item: self._taken(item, index))

    def _of(self, value: Any, i: int) -> Any:
        """The value of one program."""
        if type(value) is self._pointers:
            return self._changed(value, lambda part: part[i if len(part) > 1 else 0], value.shape[1:])
        if isinstance(value, self._handle):
            return self._changed(value, lambda array: array[i])
        return value[i] if type(value) is Each else _rebuilt(value, lambda item: self._of(item, i))

    def _joined(self, found: list[Any]) -> Any:
        first = found[0]
        if type(first) is self._handle and all(_alike(first, other) for other in found):
            return self._changed(first, lambda _: np.stack([one.data for one in found]))
        return Each(found)


def _rows(data: Array, index: Array) -> Array:
    """Rows of an array, which lie in memory as before."""
    if index[-1] - index[0] == len(index) - 1:
        return data[index[0] : index[-1] + 1]
    once = data[tuple(slice(1) if stride == 0 else slice(None) for stride in data.strides)]
    order = [0, *sorted(range(1, data.ndim), key=lambda axis: -abs(once.strides[axis]))]
    taken = once.transpose(order).take(index, 0).transpose(np.argsort(order))
    return np.broadcast_to(taken, (len(index), *data.shape[1:]))


def _layout(data: Array, front: int = 1) -> list[int]:
    """Bytes from one element to the next along each axis, without the axis of the batch."""
    axes = zip(data.shape[front:], data.strides[front:], strict=True)
    return [stride for size, stride in axes if size > 1]


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The result of a reduction: a tuple of tensors of the language."""
    return tuple(each._replace(handle=change(each.handle)) for each in value)


def _alike(one: Any, other: Any) -> bool:
    a, b = one.data, other.data
    same = type(one) is type(other) and one.dtype == other.dtype and one.__dict__.keys() == other.__dict__.keys()
    return same and a.dtype == b.dtype and a.shape == b.shape and a.flags.c_contiguous and b.flags.c_contiguous


def _padded(value: Any, rank: int) -> Any:
    """A tensor whose block has fewer axes than others, as NumPy would spread it."""
    data = value.data
    if data.ndim == rank:
        return value
    made = object.__new__(type(value))
    made.__dict__.update(value.__dict__)
    made.data = data.reshape(data.shape[:1] + (1,) * (rank - data.ndim) + data.shape[1:])
    return made


def _aligned(handle: Any, values: Sequence[Any]) -> list[Any]:
    tensors = [value for value in values if isinstance(value, handle)]
    rank = max(value.data.ndim for value in tensors)
    return [_padded(value, rank) if isinstance(value, handle) else value for value in values]


def at_once(handle: Any, name: object, run: Run, made: Run | None, operands: Sequence[Any], answer: Any) -> Any:
    """A call of the path for several programs; None if it is not known how to make it. ``made``: its shorter way.
    ``operands``: as in the call."""
    of_name = _OF_NAME.get(str(name))
    if of_name is not None:
        return of_name(run, operands, answer)
    tensors = [one for one in operands if isinstance(one, handle)]
    if tensors and _BY_ELEMENT.fullmatch(str(name)) and all(type(one) is handle for one in tensors):
        compute = run if made is None else made
        return lambda batch, *values: compute(*_aligned(handle, values))
    return None


def _program_id(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce:
    return lambda batch, axis: batch.program_id(axis)


def _addptr(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce:
    def addptr(batch: Batch, ptr: Any, offset: Any) -> Any:
        at = batch.pointers(ptr)
        return run(at, _padded(offset, len(at.shape)))

    return addptr


def _splat(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce | None:
    kind, shape = type(answer), tuple(answer.data.shape)

    def splat(batch: Batch, _: Any, arg: Any) -> Any:
        if hasattr(answer, "parts"):
            at = batch.pointers(arg)
            parts = [part.reshape(part.shape[:1] + (1,) * len(shape)) for part in at.parts]
            return kind(parts, batch.size(shape), answer.dtype, answer.element, at.base)
        spread = np.broadcast_to(_padded(arg, len(shape) + 1).data, batch.size(shape))
        return kind(spread.astype(answer.data.dtype), answer.dtype)

    return splat if operands[1].data.size == 1 else None


def _expand_dims(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce | None:
    return (lambda batch, arg, axis: run(arg, axis + 1)) if operands[1] >= 0 else None


def _of_shape(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce:
    return lambda batch, arg, shape, *rest: run(arg, batch.size(shape), *rest)


def _trans(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce:
    return lambda batch, arg, order: run(arg, (0, *[axis + 1 for axis in order]))


def _dot(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce:
    layouts = [_layout(part.data, 0) for part in operands[:2]]

    def dot(batch: Batch, *values: Any) -> Any:
        _same_layout(values[:2], layouts)
        return run(*values)

    return dot


def _same_layout(values: Iterable[Any], layouts: Iterable[list[int]]) -> None:
    """Raise NotTogether for blocks that lie otherwise in memory than when the call was noted down: sums over them might
    add up in another order."""
    if any(_layout(value.data) != layout for value, layout in zip(values, layouts, strict=True)):
        raise NotTogether


def _load(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce:
    return lambda batch, ptr, *rest: run(batch.pointers(ptr), *rest)


def _masked_load(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce:
    def masked_load(batch: Batch, ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
        at = batch.pointers(ptr)
        rank = len(at.shape)
        return run(at, _padded(mask, rank), other if other is None else _padded(other, rank), *rest)

    return masked_load


def _store(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce:
    return lambda batch, ptr, value, *rest: run(batch.pointers(ptr), batch.spread(value, ptr), *rest)


def _masked_store(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce:
    def masked_store(batch: Batch, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        at = batch.pointers(ptr)
        return run(at, batch.spread(value, at), _padded(mask, len(at.shape)), *rest)

    return masked_store


def _barrier(run: Run, operands: Sequence[Any], answer: Any) -> AtOnce | None:
    return None if operands else lambda batch: run()  # with an argument it is about the kernel before, or the next one


_OF_NAME: dict[str, Callable[[Run, Sequence[Any], Any], AtOnce | None]] = {
    "create_get_program_id": _program_id,
    "create_addptr": _addptr,
    "create_splat": _splat,
    "create_expand_dims": _expand_dims,
    "create_broadcast": _of_shape,
    "create_reshape": _of_shape,
    "create_trans": _trans,
    "create_dot": _dot,
    "create_load": _load,
    "create_masked_load": _masked_load,
    "create_barrier": _barrier,
    "create_store": _store,
    "create_masked_store": _masked_store,
}
EFFECTS = frozenset({"create_load", "create_masked_load", "create_store", "create_masked_store", "create_barrier"})
"""Calls that do more than to compute, and may be made for several programs at once."""


def reduction_at_once(run: Callable[..., Any], one: Any) -> AtOnce:
    """A reduction of one block (``one`` when it was noted down). ``run`` takes the block with the axis of the batch."""
    layout = _layout(one.data, 0)

    def reduction(batch: Batch, block: Any) -> Any:
        _same_layout((block,), (layout,))
        return run(block)

    return reduction


@functools.cache
def in_place(index: int) -> AtOnce:
    """A tensor of the result of a reduction."""
    return lambda batch, tensors: tensors[index].handle
