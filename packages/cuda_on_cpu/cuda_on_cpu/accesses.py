"""Memory that an operation surely reads or writes, by its schema and the addresses of its tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from cuda_on_cpu.arguments import tensors_in
from cuda_on_cpu.chosen_places import CHOSEN_FROM, OF_CHOSEN_PLACES, Places, places_of
from cuda_on_cpu.private import dtype_of


class Span(Enum):
    """Extent to which a range of addresses is touched."""

    ALL = "every byte"
    ENDS = "the first and the last element, and some between"
    SOME = "at least one element, nobody knows which"


class Access(NamedTuple):
    """A range of addresses that is read or written, from `first` to before `end`."""

    first: int
    end: int
    span: Span
    writes: bool
    places: Places | None = None
    """Touched places of the range, if `span` is SOME and they are known."""


def surely_meet(a: Access, b: Access) -> bool:
    """True if both touch some byte for all contents of memory."""
    if a.end <= b.first or b.end <= a.first:
        return False
    if a.places is not None or b.places is not None:
        return _places_meet(a, b)
    if a.span is Span.ALL and b.span is Span.ALL:
        return True
    if a.span is Span.ALL:
        return _is_sure_of_one_in(b, a)
    if b.span is Span.ALL:
        return _is_sure_of_one_in(a, b)
    return a.span is b.span is Span.ENDS and (a.first == b.first or a.end == b.end)


def _places_meet(a: Access, b: Access) -> bool:
    if a.places is None:
        a, b = b, a
    assert a.places is not None
    if b.places is not None:
        return a.places.meet(b.places)
    if b.span is Span.ALL:
        return a.places.meet(Places(b.end - b.first, (b.first,)))
    size = a.places.size
    return any(surely_meet(Access(start, start + size, Span.ALL, a.writes), b) for start in a.places.starts.tolist())


def _is_sure_of_one_in(some: Access, whole: Access) -> bool:
    if whole.first <= some.first and some.end <= whole.end:
        return True
    ends = whole.first <= some.first < whole.end or whole.first < some.end <= whole.end
    return some.span is Span.ENDS and ends


def access_of(tensor: Tensor, writes: bool, partly: bool = False) -> Access | None:
    """The memory of a tensor's elements; `partly`: at least one of them. None if it has none."""
    if not tensor.numel():
        return None
    size, first = dtype_of(tensor).itemsize, tensor.data_ptr()
    dense = tensor.is_contiguous()
    elements = tensor.numel()
    if not dense:
        axes = sorted((step, n) for step, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1 and step)
        elements = 1 + sum(step * (n - 1) for step, n in axes)
        dense = _has_no_gaps(axes)
    span = Span.SOME if partly else Span.ALL if dense else Span.ENDS
    return Access(first, first + elements * size, span, writes)


def _has_no_gaps(axes: Sequence[tuple[int, int]]) -> bool:
    expected = 1
    for step, n in axes:
        if step != expected:
            return False
        expected *= n
    return True


_ASKS_FOR_SHAPE = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
     "new_empty_strided", "new_zeros", "new_ones", "new_full", "expand_as", "view_as", "reshape_as", "resize_",
     "resize_as_", "set_", "_resize_output_", "is_same_size", "is_set_to", "_has_compatible_shallow_copy_type",
     "result_type", "record_stream", "lift", "lift_fresh", "lift_fresh_copy", "sym_size", "sym_stride", "sym_numel",
     "sym_storage_offset", "size", "stride", "numel", "dim", "is_pinned", "_unsafe_view", "requires_grad_",
     "retain_grad", "_shape_as_tensor", "is_contiguous"}
)  # fmt: skip
"""Operations that read none of their arguments, or not always."""


class _Use(NamedTuple):
    position: int
    name: str
    writes: bool
    partly: bool


@functools.cache
def _uses_of(op: OpOverload) -> tuple[_Use, ...]:
    """Arguments that an operation surely touches; none for one that may only view memory differently."""
    schema = op._schema
    name = schema.name.split("::")[1]
    aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    only_looks = any(not alias.is_write for alias in aliases)
    if op.namespace not in ("aten", "prims") or name in _ASKS_FOR_SHAPE or only_looks:
        return ()
    chosen = name in OF_CHOSEN_PLACES
    return tuple(
        _Use(
            i,
            argument.name,
            argument.alias_info is not None and argument.alias_info.is_write,
            chosen and argument.name in CHOSEN_FROM,
        )
        for i, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    )


def accesses_of(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], chosen: bool | None = None
) -> Iterator[tuple[Tensor, Access]]:
    """Arguments of a call that it surely touches, with the accesses.

    `chosen`: True for only those whose places depend on values of tensors, False for all others.
    """
    uses = _uses_of(op)
    for use in uses:
        if chosen not in (None, use.partly):
            continue
        for tensor in _given(use, args, kwargs):
            access = access_of(tensor, use.writes, use.partly)
            if access is not None and use.partly:
                places = places_of(tensor, op, args, kwargs)
                nothing = not _touches_something(uses, args, kwargs) if places is None else not len(places.starts)
                access = None if nothing else access._replace(places=places)
            if access is not None:
                yield tensor, access


def has_chosen_places(op: OpOverload) -> bool:
    """True if index values or masks choose some of the elements that an operation touches."""
    return any(use.partly for use in _uses_of(op))


def _given(use: _Use, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    tensors_in((args[use.position] if use.position < len(args) else kwargs.get(use.name),), found)
    return found


def _touches_something(uses: Sequence[_Use], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if the call surely touches memory: False if a mask or an index may be empty."""
    others = [tensor for use in uses if not use.partly for tensor in _given(use, args, kwargs)]
    return all(tensor.numel() and dtype_of(tensor) not in (torch.bool, torch.uint8) for tensor in others)
