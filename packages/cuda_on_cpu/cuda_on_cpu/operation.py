"""One operation as the dispatcher shows it: its arguments, their places, and the new memory of its result."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from cuda_on_cpu.arguments import NO_TENSORS, map_tensors, tensors_in
from cuda_on_cpu.schema import facts_of, written_by
from cuda_on_cpu.tags import DEVICE, storage_key

_device = DEVICE.entries


class Operation:
    """One call on its way through the dispatcher.

    `tensors` are all its tensor arguments, `keys` the identities of their memory; `on_device`: all of them are device
    memory.
    """

    __slots__ = ("args", "facts", "func", "keys", "kwargs", "on_device", "tensors")

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.facts, self.args, self.kwargs = func, facts_of(func), args, kwargs
        tensors: list[Tensor] = []
        tensors_in(args, tensors)
        if kwargs:
            tensors_in(kwargs.values(), tensors)
        keys = []
        on_device = True
        for tensor in tensors:
            try:
                key = tensor.untyped_storage()._cdata
            except (NotImplementedError, RuntimeError):  # a layout without its own storage, or a wrapper
                key = storage_key(tensor)
            keys.append(key)
            on_device = on_device and key in _device
        self.tensors, self.keys, self.on_device = tensors, keys, on_device

    def touches_device(self) -> bool:
        """True if some tensor is on the device."""
        return bool(self.keys) and (self.on_device or any(key in _device for key in self.keys))

    def is_floating(self) -> bool:
        """True if all tensors hold floating-point numbers."""
        return all(tensor.dtype.is_floating_point for tensor in self.tensors)

    def run(self) -> Any:
        """Run the operation and return its result."""
        return self.facts.run(*self.args, **self.kwargs)

    def written(self) -> list[Tensor]:
        """Tensors that the operation writes."""
        return written_by(self.facts, self.args, self.kwargs) if self.facts.written else []

    def fresh(self, result: Any) -> list[tuple[int, Tensor]]:
        """(position, tensor) of the results that are not in the arguments' memory."""
        if type(result) is Tensor:
            return [] if storage_key(result) in self.keys else [(0, result)]
        outputs: list[Tensor] = []
        tensors_in((result,), outputs)
        return [(i, output) for i, output in enumerate(outputs) if storage_key(output) not in self.keys]


def is_memory_of(tensor: Tensor, result: Any) -> bool:
    """True if all of `result` is in the memory of `tensor`."""
    key = storage_key(tensor)
    if isinstance(result, Tensor):
        return key != 0 and storage_key(result) == key
    return key != 0 and all(storage_key(each) == key for each in result)


def with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with other tensors, in the order in which `Operation` found them."""
    rest = iter(tensors)

    def following(_: Tensor) -> Tensor:
        return next(rest)

    new_args = [
        next(rest) if type(value) is Tensor else value if type(value) in NO_TENSORS else map_tensors(value, following)
        for value in args
    ]
    return tuple(new_args), {name: map_tensors(value, following) for name, value in kwargs.items()} if kwargs else {}
