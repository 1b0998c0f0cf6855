"""Elements that numbers or masks choose: rows of an `index_put_`, slots of a gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from attn_testkit.emulation.private import disable_functions, disable_modes, dtype_of

__all__ = ["CHOSEN_FROM", "OF_CHOSEN_PLACES", "Places", "places_of"]

OF_CHOSEN_PLACES = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index_select",
     "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce",
     "index_reduce_", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
     "scatter_reduce_", "take", "take_along_dim", "put", "put_", "embedding", "_embedding_bag", "embedding_bag",
     "masked_select", "masked_scatter", "masked_scatter_", "searchsorted", "bucketize", "grid_sampler",
     "grid_sampler_2d", "grid_sampler_3d"}
)  # fmt: skip
CHOSEN_FROM = frozenset({"self", "weight", "input", "sorted_sequence", "boundaries", "out"})
"""Arguments of such operations in which numbers or masks choose the touched elements."""
_MOST_PLACES = 4096
_MOST_ELEMENTS = 1 << 20


class Places(NamedTuple):
    """Places of one size: the address of the first byte of each, in order."""

    size: int
    starts: tuple[int, ...]


def places_of(tensor: Tensor, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Places | None:
    """Places of `tensor` that a call touches; None if that is not known, or they are too many."""
    name = op._schema.name.split("::")[1].removesuffix("_").removeprefix("_")
    picks = _PICKS.get(name)
    if picks is None or tensor is not args[0]:
        return None
    with torch.inference_mode(), disable_modes(), disable_functions():
        try:
            axes, pick = picks(tensor, args, kwargs)
        except (IndexError, KeyError, RuntimeError, TypeError):  # the call itself will say what is wrong
            return None
        inner = _dense_elements(tensor, axes)
        if inner is None or tensor.size()[:axes].numel() > _MOST_ELEMENTS:
            return None
        try:
            found = torch._unique2(pick(_offsets(tensor, axes)))[0]
        except (IndexError, RuntimeError):
            return None
        if len(found) > _MOST_PLACES:
            return None
        size, first = dtype_of(tensor).itemsize, tensor.data_ptr()
        return Places(inner * size, tuple(first + size * offset for offset in found.tolist()))


def _offsets(tensor: Tensor, axes: int) -> Tensor:
    """Offsets of the elements of the first `axes` axes."""
    result = torch.zeros((), dtype=torch.int64)
    for size, step in zip(tensor.size()[:axes], tensor.stride()[:axes], strict=True):
        result = result.unsqueeze(-1) + torch.arange(size) * step
    return result


def _dense_elements(tensor: Tensor, axes: int) -> int | None:
    """Elements of the axes behind the first `axes`; None if they have gaps."""
    expected = 1
    for size, step in zip(reversed(tensor.size()[axes:]), reversed(tensor.stride()[axes:]), strict=True):
        if size != 1 and step != expected:
            return None
        expected *= size
    return expected


Pick = Callable[[Tensor], Tensor]
Picked = tuple[int, Pick]
"""Number of axes that are chosen from, and a function that takes the chosen ones from their offsets."""


def _by_indices(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Picked:
    indices = args[1]
    axes = sum(index.dim() if index is not None and index.dtype in _MASKS else 1 for index in indices)
    return axes, lambda offsets: offsets[tuple(slice(None) if index is None else index for index in indices)]


def _by_rows(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Picked:
    axis, index = args[1] % max(tensor.dim(), 1), args[2]
    return axis + 1, lambda offsets: offsets.index_select(axis, index.reshape(-1))


def _by_elements(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Picked:
    return tensor.dim(), lambda offsets: offsets.gather(args[1], args[2])


def _by_place(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Picked:
    return tensor.dim(), lambda offsets: offsets.reshape(-1)[args[1]]


def _by_weight_rows(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Picked:
    return 1, lambda offsets: offsets[args[1].reshape(-1)]


_MASKS = (torch.bool, torch.uint8)
_PICKS: dict[str, Callable[[Tensor, tuple[Any, ...], Mapping[str, Any]], Picked]] = {
    **dict.fromkeys(("index", "index_put", "index_put_impl", "unsafe_index", "unsafe_index_put"), _by_indices),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce"), _by_rows),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _by_elements),
    **dict.fromkeys(("take", "put"), _by_place),
    "embedding": _by_weight_rows,
}
