"""The torch API of a program: calls that make device memory, and calls that cross between host and device."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_on_cpu import private
from cuda_on_cpu.arguments import NO_TENSORS, map_tensors
from cuda_on_cpu.crossings import HANDLERS
from cuda_on_cpu.errors import EmulationError, spell
from cuda_on_cpu.generators import EmulatedGenerator
from cuda_on_cpu.private import TorchFunctionMode, modes_entered, pop_mode, push_mode, vmap_level
from cuda_on_cpu.quick_kernels import BY_FUNCTION as _quick
from cuda_on_cpu.reads_nothing import reads_nothing
from cuda_on_cpu.recorder import Watcher
from cuda_on_cpu.rules import CHECKED_ON_CPU_ONLY
from cuda_on_cpu.session import Session
from cuda_on_cpu.shortcuts import has_numbers_alone, launches_nothing, only_looks, operation_of
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.tags import DEVICE, storage_key, tag_device, wants_cuda
from cuda_on_cpu.transfers import adopt, mixed_devices

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda", 0)
_device = DEVICE.entries
_NO_KEYWORDS: dict[str, Any] = {}

# Host and device tensors may meet in these; what CUDA then does is decided below, operation by operation.
_MIXES = frozenset(
    {Tensor.__getitem__, Tensor.__setitem__, Tensor.copy_, Tensor.index_put_, Tensor.index_put, Tensor.set_,
     Tensor.resize_as_, Tensor.view_as, Tensor.expand_as, Tensor.reshape_as, Tensor.is_set_to, Tensor.is_same_size,
     torch.is_same_size, torch.tensor_split, Tensor.tensor_split, torch.broadcast_tensors, torch.result_type,
     torch._has_compatible_shallow_copy_type}
)  # fmt: skip

# Python functions of torch that neither name a device nor read a value: running them needs no watcher below.
_PLAIN = frozenset(
    {F.softmax, F.log_softmax, F.layer_norm, F.rms_norm, F.embedding, F.silu, F.relu, F.dropout, F.normalize,
     F.sigmoid, F.tanh, torch.einsum, torch.split, torch.norm, torch.chunk, torch.meshgrid, torch.broadcast_tensors,
     torch.atleast_1d, torch.atleast_2d, torch.tensordot, F.pad, Tensor.split, Tensor.unflatten, Tensor.__len__,
     Tensor.__iter__, Tensor.__hash__, Tensor.__rsub__, Tensor.__rdiv__, Tensor.__rpow__,
     Tensor.__floordiv__}
)  # fmt: skip

# Refused on CUDA outside captures too.
_LOOKED_INTO = frozenset({torch.histogram, Tensor.histogram, torch.histogramdd})

# These answer from what a tensor is, not from what it holds.
_ASKS = frozenset(
    {Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.element_size,
     Tensor.storage_offset, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.data_ptr,
     Tensor.untyped_storage, Tensor.is_inference, Tensor.__len__, Tensor.__hash__}
)  # fmt: skip

_PROPERTY = type(Tensor.shape.__get__)  # type: ignore[attr-defined]
_NATIVE = frozenset({type(Tensor.add), type(Tensor.__getitem__), type(torch.zeros)})
"""Types of functions written in C++."""
_HANDLED_IF_STRICT = frozenset({Tensor.__getitem__, Tensor.__setitem__, Tensor.tolist})

_ASK, _RUN, _THINK = range(1, 4)
"""Paths of an eager call: directly; by the place of its arguments, if all are in one place; the long path."""
_WAYS: dict[Any, int] = {
    **dict.fromkeys(_PLAIN, _RUN),
    **dict.fromkeys(_LOOKED_INTO, _THINK),
    **dict.fromkeys(HANDLERS.keys() - _HANDLED_IF_STRICT, _THINK),
    **dict.fromkeys(_ASKS, _ASK),
}
_PLACING = frozenset({"device", "pin_memory", "generator"})

_HOST, _HOST_SCALAR, _DEVICE = 1, 2, 4
_BOTH = _HOST | _DEVICE


def _places(values: Iterable[Any]) -> int:
    """Bits: some tensor is on the device; on the host with dimensions; on the host without."""
    found = 0
    for value in values:
        kind = type(value)
        if kind in NO_TENSORS:
            continue
        if kind is Tensor or isinstance(value, Tensor):
            try:
                key = value.untyped_storage()._cdata
            except (NotImplementedError, RuntimeError):  # a layout without its own storage, or a wrapper
                key = storage_key(value)
            found |= _DEVICE if key in _device else _HOST if value.dim() else _HOST_SCALAR
        elif isinstance(value, (list, tuple)):
            found |= _places(value)
    return found


def _changes_type(func: Any, args: tuple[Any, ...]) -> bool:
    return func is Tensor.to and len(args) == 2 and type(args[1]) is torch.dtype


def _tag_result(result: Any) -> Any:
    if isinstance(result, Tensor):
        tag_device(result)
    elif isinstance(result, (list, tuple)):
        for item in result:
            _tag_result(item)
    return result


def _shortcut(watcher: Watcher, func: Any, args: tuple[Any, ...]) -> Any:
    if args and only_looks(func, args):
        return func(*args)
    if func is Tensor.reshape and type(args[0]) is Tensor and has_numbers_alone(args):
        return watcher.reshape(func, args)
    taken = operation_of(func, args)
    return NotImplemented if taken is None else watcher.take(*taken)


class DeviceFunctions(TorchFunctionMode):
    """Mode that adds a device called cuda:0."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._watcher = Watcher(session)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        # Every call of torch passes here, so the code that most calls need is inlined.
        kind = type(func)
        if kind is _PROPERTY:
            return func(*args)
        way = _WAYS.get(func)
        if way is _ASK:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs, session = kwargs or _NO_KEYWORDS, self.session
        if session.before is not None and not launches_nothing(func, args):
            session.before = None
        strict = (
            session.capture is not None
            or session.order is not None
            or (session.sync_mode and not reads_nothing(func, args, kwargs))
        )
        if strict:
            return self._strictly(func, args, kwargs)
        if way is _RUN or (way is None and kind in _NATIVE) or _changes_type(func, args):
            on_device = on_host = 0
            for value in args:
                kind = type(value)
                if kind is Tensor:
                    try:
                        key = value.untyped_storage()._cdata
                    except (NotImplementedError, RuntimeError):  # a layout without its own storage, or a wrapper
                        key = storage_key(value)
                    if key in _device:
                        on_device += 1
                    else:
                        on_host += 1
                elif kind not in NO_TENSORS:
                    found = _places(value if kind is tuple else (value,))
                    on_device += found >= _DEVICE
                    on_host += found & ~_DEVICE
            if kwargs:
                if not _PLACING.isdisjoint(kwargs):
                    return self._otherwise(func, args, kwargs)
                found = _places(kwargs.values())
                on_device += found >= _DEVICE
                on_host += found & ~_DEVICE
            # Nothing refuses an eager copy, wherever it goes, unless host syncs are refused.
            if on_device and (not on_host or (func is Tensor.copy_ and not session.sync_mode)):
                outer, session.creating = session.creating, True
                try:
                    quick = None if kwargs else _quick.get(func)
                    result = None if quick is None or modes_entered() else quick(*args)
                    if result is None:
                        result = func(*args, **kwargs)
                finally:
                    session.creating = outer
                if on_host:
                    return result  # a copy's target stays where it was, on the host too
                return tag_device(result) if type(result) is Tensor else _tag_result(result)
            if on_host and not on_device:
                outer, session.creating = session.creating, False
                try:
                    return func(*args, **kwargs)
                finally:
                    session.creating = outer
        return self._otherwise(func, args, kwargs)

    def _otherwise(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an eager call that is not an ordinary one with only device memory or only host memory."""
        if self.session.sync_mode:
            return self._strictly(func, args, kwargs)
        return self._with_handler(func, args, kwargs)

    def _strictly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call while host syncs matter."""
        session = self.session
        outer, session.called = session.called, func
        try:
            result = NotImplemented if kwargs else self._directly(func, args)
            return self._with_handler(func, args, kwargs) if result is NotImplemented else result
        finally:
            session.called = outer

    def _directly(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Result of a call with a known path through the dispatcher; NotImplemented for any other, inside of vmap, and
        if the program has its own dispatch mode."""
        if vmap_level() is not None:
            return NotImplemented
        if self.session.capture is None:
            return NotImplemented if modes_entered() else _shortcut(self._watcher, func, args)
        if modes_entered() != 1:
            return NotImplemented
        mode = pop_mode()
        try:
            return _shortcut(mode, func, args) if isinstance(mode, Watcher) else NotImplemented
        finally:
            push_mode(mode)

    def _with_handler(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(self.session, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func` on the device or the host, depending on its arguments, or refuse a mixture."""
        session = self.session
        found = _places(args)
        on_device = found >= _DEVICE
        if not found and kwargs.get("device") is None and _by_default_on_device(func):
            kwargs = {**kwargs, "device": _CUDA}
        if kwargs:
            found |= _places(kwargs.values())
            on_device = found >= _DEVICE
            if "device" in kwargs or "pin_memory" in kwargs or "generator" in kwargs:
                named_device = kwargs.get("device") is not None
                on_device, kwargs, pinned = self._place(kwargs, on_device)
                if pinned or (named_device and not on_device and found):
                    with private.disable_modes():  # like a device tensor, but on the host: no device work
                        result = func(*args, **kwargs)
                    return session.pin(result) if pinned else result
                if named_device and on_device and 0 < found < _DEVICE:
                    args = map_tensors(args, self._twin_on_device)
                found &= _DEVICE
        if found & _BOTH == _BOTH and func not in _MIXES and not isinstance(func, FunctionType):
            raise mixed_devices(session, spell(func))
        outer, session.creating = session.creating, on_device
        try:
            result = self._call(func, args, kwargs, found)
        finally:
            session.creating = outer
        # Memory that is written in place stays where it was: a copy may have the host as its target.
        return _tag_result(result) if on_device and not (args and result is args[0]) else result

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and inspect every operation below it; a capture inspects them anyway."""
        if self.session.capture is not None:
            return func(*args, **kwargs)
        return self._watcher.watch(func, args, kwargs)

    def _twin_on_device(self, tensor: Tensor) -> Tensor:
        """Empty device tensor of the same shape, for torch.zeros_like(host_tensor, device="cuda")."""
        with private.disable_modes():
            twin = torch.empty_like(tensor)
        return adopt(self.session, twin)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: int) -> Any:
        session = self.session
        if session.capture is not None:
            if func in CHECKED_ON_CPU_ONLY:
                outer, session.lenient = session.lenient, True
                try:
                    return func(*args, **kwargs)
                finally:
                    session.lenient = outer
            return func(*args, **kwargs)
        mixed = found > _DEVICE
        if mixed or func in _LOOKED_INTO or (type(func) in _NAMES_DEVICES and func not in _PLAIN):
            return self._watcher.watch(func, args, kwargs)
        if session.order is not None or (session.sync_mode and not reads_nothing(func, args, kwargs)):
            return self._watcher.watch(func, args, kwargs)
        return func(*args, **kwargs)

    def _place(self, kwargs: dict[str, Any], on_device: bool) -> tuple[bool, dict[str, Any], bool]:
        """Resolve device=, pin_memory= and generator= of a call into the place of its result."""
        kwargs = dict(kwargs)
        if kwargs.get("device") is not None:
            on_device = wants_cuda(kwargs["device"])
            if on_device:
                kwargs["device"] = _CPU
        generator = kwargs.get("generator")
        if generator is not None and on_device != isinstance(generator, EmulatedGenerator):
            wanted, got = ("cuda", "cpu") if on_device else ("cpu", "cuda")
            raise EmulationError(
                self.session.operation or "a random operation",
                author_site(),
                f"torch would refuse with 'Expected a {wanted!r} device type for generator but found {got!r}'",
                f"torch.Generator(device={wanted!r})",
            )
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:
            kwargs["pin_memory"] = False
        return on_device, kwargs, pinned


_NAMES_DEVICES = frozenset({FunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket})


def _by_default_on_device(func: Any) -> bool:
    """True if `torch.set_default_device("cuda")` is on and `func` obeys it."""
    default = private.default_device()
    return default is not None and default.type == "cuda" and func in torch.utils._device._device_constructors()
