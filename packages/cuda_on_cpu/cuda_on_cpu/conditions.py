"""Conditions on one operation, as the dispatcher sees it, under which a rule applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuda_on_cpu.tags import is_device, is_pinned


@dataclass(frozen=True)
class Call:
    """One operation as the dispatcher sees it: its name, its overload ("default" if unnamed), its arguments by name.

    `call["self"]` is an argument's value, None if it was left out and has no default.
    """

    name: str
    overload: str
    values: dict[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self.values.get(argument)

    def on_device(self, argument: str) -> bool:
        """True if `argument` is a tensor on the device."""
        value = self.values.get(argument)
        return isinstance(value, Tensor) and is_device(value)

    def on_host(self, argument: str) -> bool:
        """True if `argument` is a tensor on the host."""
        value = self.values.get(argument)
        return isinstance(value, Tensor) and not is_device(value)


def not_the_same_memory(call: Call) -> bool:
    """True unless `equal(x, y)` has the same storage, offset, sizes and strides: then torch does not read the
    values."""
    a, b = call["self"], call["other"]
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()
    return not (same and a.size() == b.size() and a.stride() == b.stride())


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _indices(call: Call) -> list[Tensor]:
    return [index for index in call["indices"] if isinstance(index, Tensor)]


def _is_plain_masked_fill(call: Call) -> bool:
    """x[mask] = host scalar: CUDA turns it into masked_fill_, which needs no nonzero()."""
    value, indices = call["values"], _indices(call)
    if value is None or value.numel() != 1 or is_device(value):
        return False
    return len(indices) == 1 and _is_mask(indices[0])


def indexes_by_device_mask(call: Call) -> bool:
    """x[mask] needs nonzero(), whose result has a size that depends on data; x[mask] = number does not."""
    return any(_is_mask(i) and is_device(i) for i in _indices(call)) and not _is_plain_masked_fill(call)


def indexes_by_host_tensor(call: Call) -> bool:
    """Host index tensors are copied blockingly; so is a host mask that becomes masked_fill_. Other host masks turn
    into indices on the host, which travel through pinned memory."""
    if call["values"] is not None and _is_plain_masked_fill(call):
        return not is_device(_indices(call)[0])
    return any(not _is_mask(i) and not is_device(i) for i in _indices(call))


def assigns_host_scalar_by_index(call: Call) -> bool:
    """x[index] = number becomes a host tensor without dimensions, which index_put copies to the device."""
    value = call["values"]
    return value.dim() == 0 and not is_device(value) and not _is_plain_masked_fill(call)


def selects_host_scalar(call: Call) -> bool:
    """`torch.where(mask, x, torch.tensor(1))`: a branch is a host tensor without dimensions."""
    return any(call.on_host(name) and call[name].dim() == 0 for name in ("self", "other"))


def histogram_range_open(call: Call) -> bool:
    """True if histc takes the range from the data: min == max (the default is 0, 0)."""
    return bool((call["min"] or 0) == (call["max"] or 0))


def repeats_decide_the_size(call: Call) -> bool:
    """repeat_interleave with a tensor of repeats and no output_size must sum the repeats to get the size of its
    result."""
    return isinstance(call["repeats"], Tensor) and call["output_size"] is None


def isin_sorts(call: Call) -> bool:
    """True if there are so many test elements that torch sorts with unique() (the threshold in its
    TensorCompare.cpp)."""
    elements, tests = call["elements"], call["test_elements"]
    both = isinstance(elements, Tensor) and isinstance(tests, Tensor)
    return both and not call["assume_unique"] and bool(tests.numel() >= 10.0 * elements.numel() ** 0.145)


def any_device(*arguments: str) -> Callable[[Call], bool]:
    """The condition that at least one of `arguments` is a tensor on the device."""
    return lambda call: any(call.on_device(name) for name in arguments)


def host_to_device(pinned: bool) -> Callable[[Call], bool]:
    """A copy to the device from pinned memory (that CUDA can read directly), or from any other host memory."""
    return lambda call: (
        call.on_device("self")
        and call.on_host("src")
        and call["src"].numel() > 0
        and (is_pinned(call["src"]) and _read_in_place(call["self"], call["src"])) == pinned
        and not (pinned and call["non_blocking"])
    )


def device_to_host(pinned: bool) -> Callable[[Call], bool]:
    """A copy from the device to pinned memory (that CUDA can write directly), or to any other host memory."""
    return lambda call: (
        call.on_host("self")
        and call.on_device("src")
        and call["src"].numel() > 0
        and (is_pinned(call["self"]) and _written_in_place(call["self"], call["src"])) == pinned
        and not (pinned and call["non_blocking"])
    )


def _same_layout(a: Tensor, b: Tensor) -> bool:
    dense = torch.ops.aten.is_non_overlapping_and_dense
    return a.dtype == b.dtype and a.size() == b.size() and a.stride() == b.stride() and bool(dense(a))


def _read_in_place(target: Tensor, source: Tensor) -> bool:
    """True if memory is copied in place; otherwise torch makes a contiguous copy on the host first, in unpinned
    memory."""
    return (source.is_contiguous() and source.size() == target.size()) or _same_layout(target, source)


def _written_in_place(target: Tensor, source: Tensor) -> bool:
    return target.is_contiguous() or _same_layout(target, source)


def reduces_at_once(call: Call) -> bool:
    """segment_reduce checks its lengths on the host unless `unsafe` is set."""
    return not call["unsafe"] and any_device("lengths", "offsets")(call)


def multiplies_integers(call: Call) -> bool:
    """CUDA has matrix products of floating point and complex numbers only."""
    first = call["self"]
    return isinstance(first, Tensor) and not (first.is_floating_point() or first.is_complex())
