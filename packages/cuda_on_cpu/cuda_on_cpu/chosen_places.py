"""Elements that index values or masks choose: rows of an `index_put_`, slots of a gather."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from cuda_on_cpu.private import disable_functions, disable_modes, dtype_of

OF_CHOSEN_PLACES = frozenset(
    {"index", "index_put_", "_index_put_impl_", "_unsafe_index", "index_select", "index_add_", "index_copy_",
     "index_fill_", "index_reduce_", "gather", "scatter_", "scatter_add_", "scatter_reduce_", "take", "take_along_dim",
     "put_", "embedding", "_embedding_bag", "embedding_bag", "masked_select", "masked_scatter_", "searchsorted",
     "bucketize", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"}
)  # fmt: skip
"""Operations that touch chosen elements only. One that returns a changed copy (`index_fill`) reads all of its input."""
CHOSEN_FROM = frozenset({"self", "weight", "input", "sorted_sequence", "boundaries"})
"""Arguments of such operations in which index values or masks choose the touched elements. The operations fill all of
`out`."""
_MOST_PLACES = 1 << 16


class Places:
    """Places of one size in bytes: the address of the first byte of each, in order."""

    __slots__ = ("_hash", "size", "starts")

    def __init__(self, size: int, starts: Any) -> None:
        self.size = size
        self.starts = np.asarray(starts, dtype=np.int64)
        self._hash = hash((size, self.starts.tobytes()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Places)
            and (self._hash, self.size) == (other._hash, other.size)
            and np.array_equal(self.starts, other.starts)
        )

    def __hash__(self) -> int:
        return self._hash

    def meet(self, other: Places) -> bool:
        """True if a place of both has a byte in common."""
        few, many = (self, other) if len(self.starts) <= len(other.starts) else (other, self)
        # For each place of ``few``: how many of ``many`` begin before it ends, and how many end before it begins.
        begin = np.searchsorted(many.starts, few.starts + few.size)
        end = np.searchsorted(many.starts, few.starts - (many.size - 1))
        return bool((end < begin).any())


def places_of(tensor: Tensor, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Places | None:
    """Places of `tensor` that a call touches; None if that is not known, or they are too many."""
    name = op._schema.name.split("::")[1].removesuffix("_").removeprefix("_")
    picks = _PICKS.get(name)
    if picks is None or not args or tensor is not args[0]:
        return None
    with torch.inference_mode(), disable_modes(), disable_functions():
        try:
            axes, offsets = picks(tensor, args)
        except (AttributeError, IndexError, RuntimeError, TypeError):  # the call itself will say what is wrong
            return None
        offsets, inner = _with_inner_axes(tensor, axes, offsets)
        if offsets is None or offsets.numel() > _MOST_PLACES:
            return None
        size = dtype_of(tensor).itemsize
        return Places(inner * size, tensor.data_ptr() + size * np.unique(offsets.numpy()))


def _with_inner_axes(tensor: Tensor, axes: int, offsets: Tensor | None) -> tuple[Tensor | None, int]:
    """Offsets of the pieces without gaps, and elements of each, if all axes after the first `axes` are used."""
    inner = 1
    sizes, steps = list(tensor.size()[axes:]), list(tensor.stride()[axes:])
    while sizes and (sizes[-1] == 1 or steps[-1] == inner):
        inner *= sizes.pop()
        steps.pop()
    return _plus(offsets, zip(sizes, steps, strict=True)), inner


def _plus(offsets: Tensor | None, axes: Iterable[tuple[int, int]]) -> Tensor | None:
    """Offsets, combined with the offsets of every element of other axes, each given as (size, step); None if there are
    too many."""
    for size, step in axes:
        if offsets is None or offsets.numel() * size > _MOST_PLACES:
            return None
        offsets = (offsets.reshape(-1, 1) + torch.arange(size) * step).reshape(-1)
    return offsets


Picked = tuple[int, Tensor | None]
"""Number of axes in which elements are chosen, and their offsets; None if there are too many."""


def _from_end(index: Tensor, size: int) -> Tensor:
    """Indices as int64, of which negative ones count from the end. Raises IndexError for one that is outside."""
    index = index.long()
    if index.numel() and not bool(((index >= -size) & (index < size)).all()):
        raise IndexError
    return torch.where(index < 0, index + size, index)


def _by_indices(tensor: Tensor, args: tuple[Any, ...]) -> Picked:
    """`x[i, :, j]`: masks are the indices of their True elements, one for each of their axes."""
    per_axis: list[Tensor | None] = []
    for index in args[1]:
        per_axis += [index] if index is None or index.dtype not in _MASKS else list(index.nonzero(as_tuple=True))
    sizes, steps = tensor.size(), tensor.stride()
    chosen = torch.zeros((), dtype=torch.int64)
    for axis, index in enumerate(per_axis):
        if index is not None:
            chosen = chosen + _from_end(index, sizes[axis]) * steps[axis]
    whole = ((sizes[axis], steps[axis]) for axis, index in enumerate(per_axis) if index is None)
    return len(per_axis), _plus(chosen.reshape(-1), whole)


def _by_rows(tensor: Tensor, args: tuple[Any, ...]) -> Picked:
    axis = args[1] % max(tensor.dim(), 1)
    sizes, steps = tensor.size(), tensor.stride()
    chosen = _from_end(args[2].reshape(-1), sizes[axis]) * steps[axis]
    return axis + 1, _plus(chosen, zip(sizes[:axis], steps[:axis], strict=True))


def _by_elements(tensor: Tensor, args: tuple[Any, ...]) -> Picked:
    """`gather` and `scatter_`: the index has an element for each that is touched."""
    index = args[2]
    if index.numel() > _MOST_PLACES:
        return tensor.dim(), None
    axis, steps = args[1] % tensor.dim(), tensor.stride()
    chosen = _from_end(index, tensor.size(axis)) * steps[axis]
    for other in range(tensor.dim()):
        if other != axis:
            shape = [-1 if each == other else 1 for each in range(tensor.dim())]
            chosen = chosen + (torch.arange(index.size(other)) * steps[other]).view(shape)
    return tensor.dim(), chosen.reshape(-1)


def _by_place(tensor: Tensor, args: tuple[Any, ...]) -> Picked:
    """`take` and `put_`: numbers of elements, in the order of a contiguous tensor."""
    rest = _from_end(args[1].reshape(-1), tensor.numel())
    chosen = torch.zeros_like(rest)
    for size, step in zip(reversed(tensor.size()), reversed(tensor.stride()), strict=True):
        chosen = chosen + rest % size * step
        rest = rest // size
    return tensor.dim(), chosen


def _by_weight_rows(tensor: Tensor, args: tuple[Any, ...]) -> Picked:
    return 1, _from_end(args[1].reshape(-1), tensor.size(0)) * tensor.stride(0)


def _by_mask(tensor: Tensor, args: tuple[Any, ...]) -> Picked:
    """`masked_select` and `masked_scatter_`. Raises RuntimeError for a mask that is larger than the tensor."""
    return _by_indices(tensor, (tensor, [args[1].expand_as(tensor)]))


_MASKS = (torch.bool, torch.uint8)
_PICKS: dict[str, Callable[[Tensor, tuple[Any, ...]], Picked]] = {
    **dict.fromkeys(("index", "index_put_impl", "index_put", "unsafe_index"), _by_indices),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce"), _by_rows),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _by_elements),
    **dict.fromkeys(("take", "put"), _by_place),
    **dict.fromkeys(("masked_select", "masked_scatter"), _by_mask),
    "embedding": _by_weight_rows,
}
