"""Calls that move data between host and device, or that read device memory on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_on_cpu import private, rules
from cuda_on_cpu.compiled import in_compiled_region
from cuda_on_cpu.errors import spell
from cuda_on_cpu.host_arrays import PinnedArray, is_read
from cuda_on_cpu.memory import fill_storage
from cuda_on_cpu.session import Session
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.tags import is_device, is_pinned, tag_device, wants_cuda
from cuda_on_cpu.transfers import adopt, copy_across

Handler = Callable[[Session, Any, tuple[Any, ...], dict[str, Any]], Any]
_CPU = torch.device("cpu")
_CUDA = torch.device("cuda", 0)
_NUMBERS = frozenset({bool, int, float})


def _wants_cuda(device: Any) -> bool | None:
    return None if device is None else wants_cuda(device)


def _run_on_device(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outer, session.creating = session.creating, True
    try:
        if session.keeps_order is not None:
            return tag_device(session.function_mode.watch(func, args, kwargs))
        return tag_device(func(*args, **kwargs))
    finally:
        session.creating = outer


def _parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool | None, torch.dtype | None, bool, bool]:
    """(to the device?, dtype, non_blocking, copy) of any form of Tensor.to."""
    target, dtype = _wants_cuda(kwargs.get("device")), kwargs.get("dtype")
    flags = []
    for value in (*args[1:], *([kwargs["other"]] if "other" in kwargs else [])):
        if isinstance(value, Tensor):
            target, dtype = is_device(value), value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif value is not None:
            target = _wants_cuda(value)
    non_blocking = kwargs.get("non_blocking", flags[0] if flags else False)
    return target, dtype, bool(non_blocking), bool(kwargs.get("copy", flags[1] if len(flags) > 1 else False))


def _names_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    named = [value for value in (*args[1:2], kwargs.get("device")) if isinstance(value, (str, torch.device))]
    return any(torch.device(value).type == "meta" for value in named)


def _to(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    source = is_device(tensor)
    target, dtype, non_blocking, must_copy = _parse_to(args, kwargs)
    if target and not source and not tensor.is_meta:
        return copy_across(session, tensor, dtype, target, non_blocking)
    if tensor.is_meta or _names_meta(args, kwargs):
        return NotImplemented
    if target is None or target == source:
        if target is None and not source:
            return NotImplemented
        rest = {"copy": True} if must_copy else {}
        if "memory_format" in kwargs:
            rest["memory_format"] = kwargs["memory_format"]
        if dtype in (None, tensor.dtype) and not rest:
            return tensor
        if not source:
            return func(tensor, dtype or tensor.dtype, **rest)
        return _run_on_device(session, func, (tensor, dtype or tensor.dtype), rest)
    return copy_across(session, tensor, dtype, target, non_blocking)


def _cpu(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return copy_across(session, args[0], None, False, False) if is_device(args[0]) else NotImplemented


def _cuda(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    flags = [value for value in args[1:] if isinstance(value, bool)]
    non_blocking = kwargs.get("non_blocking", kwargs.get("async", flags[0] if flags else False))
    return _to(session, Tensor.to, (args[0], _CUDA), {"non_blocking": non_blocking})


def _type_as(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _to(session, Tensor.to, args, kwargs)


def _type(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        name = func(args[0])
        return name.replace("torch.", "torch.cuda.", 1) if is_device(args[0]) else name
    return _to(session, Tensor.to, (args[0], wanted), {}) if isinstance(wanted, torch.dtype) else NotImplemented


def _pin(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if is_device(tensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor if is_pinned(tensor) else session.pin(tensor.detach().clone())


def _is_pinned(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return is_pinned(args[0])


def _get_device(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return 0 if is_device(args[0]) else NotImplemented


def _numpy(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_device(args[0]):
        return _of_pinned(func, args, kwargs) if is_pinned(args[0]) else NotImplemented
    if kwargs.get("force"):
        return copy_across(session, args[0], None, False, False).numpy(force=True)
    raise TypeError(
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        f" [at {author_site()}]"
    )


def _of_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with private.disable_functions():
        found = func(*args, **kwargs)
    return found.view(PinnedArray) if func is Tensor.numpy else found  # NumPy makes ordinary arrays of others


def _tolist(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_device(args[0]):
        session.touch(args[0])
        session.host_waits()
        if args[0].dim() > 0:
            session.refuse(rules.TO_HOST, "Tensor.tolist()")
    else:
        session.host_reads(args[0])
    return NotImplemented


def _print(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_device(args[0]) and session.strict:
        session.touch(args[0])
        session.refuse(rules.HOST_READ, "print(tensor)")
    elif not is_device(args[0]):
        session.host_reads(args[0])
    return NotImplemented


def _holds_device(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_device(value)
    return isinstance(value, (list, tuple)) and any(map(_holds_device, value))


def _holds_nothing(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and not data


def _from_data(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    target = _wants_cuda(kwargs.get("device"))
    if isinstance(data, Tensor):
        if func is torch.tensor:
            return _to(
                session,
                Tensor.to,
                (data.detach(),),
                {**kwargs, "copy": True, "device": kwargs.get("device") or data.device},
            )
        return _to(
            session, Tensor.to, (data,), {"device": kwargs.get("device") or data.device, "dtype": kwargs.get("dtype")}
        )
    return _make(session, func, args, kwargs, data, target)


def _new_tensor(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = _wants_cuda(kwargs.get("device"))
    data = args[1] if len(args) > 1 else kwargs.get("data")
    if isinstance(data, Tensor) and is_device(data):
        return NotImplemented
    return _make(session, func, args, kwargs, data, is_device(args[0]) if target is None else target)


def _make(
    session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], data: Any, target: bool | None
) -> Any:
    if target is None:
        default = private.default_device()
        target = default is not None and default.type == "cuda"
    pinned = bool(kwargs.get("pin_memory"))
    plain = {**kwargs, "pin_memory": False} if pinned else dict(kwargs)
    plain["device"] = _CPU
    if target or func is torch.tensor:
        is_read(data, spell(func))
    if session.strict and _holds_device(data):
        session.refuse(rules.HOST_READ, "a tensor made from a list of device tensors")
    if target and session.strict and type(data) in _NUMBERS and in_compiled_region():
        # A compiler makes it a constant of its kernel, and copies nothing.
        rest = {name: value for name, value in plain.items() if name == "dtype"}
        return _run_on_device(session, torch.full, ((), data), rest)
    if target and not _holds_nothing(data):
        session.refuse(rules.TO_DEVICE)
    outer, session.creating = session.creating, False
    try:
        result = func(*args, **plain)
    finally:
        session.creating = outer
    if target:
        return adopt(session, result)
    return session.pin(result) if pinned else result


def _index(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[[0, 2]] turns the list into a tensor, and copies it to the device."""
    if session.strict and is_device(args[0]):
        index = args[1]
        for item in index if isinstance(index, tuple) else (index,):
            if isinstance(item, (list, tuple, range)) or (
                type(item).__module__ == "numpy" and getattr(item, "ndim", False)
            ):
                session.refuse(rules.TO_DEVICE, "an index made from Python data")
    return NotImplemented


def _empty(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch.empty or a function of its family, then write the fill byte where CUDA leaves old contents."""
    result = session.function_mode.run(func, args, kwargs)
    if is_device(result) and session.capture is None:
        fill_storage(result.untyped_storage(), session.policy.fill)
    return result


def _tensor_split(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's CPU code reads the positions without a visible operation."""
    positions = args[1] if len(args) > 1 else kwargs.get("tensor_indices_or_sections")
    if isinstance(positions, Tensor) and is_device(positions):
        session.refuse(rules.SPLIT_BY_DEVICE, "tensor_split()")
    return NotImplemented


def _one_hot(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The CPU kernel checks the values on the host; the CUDA one does not, when the number of classes is given."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if not is_device(args[0]) or classes == -1:
        return NotImplemented
    result = _run_on_device(session, torch.zeros, ((*args[0].shape, classes),), {"dtype": torch.long})
    return result.scatter_(-1, args[0].unsqueeze(-1), 1)


def _deepcopy(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, memo = args[0], args[1] if len(args) > 1 else kwargs.get("memo", {})
    if not is_device(tensor):
        return NotImplemented
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    with torch.no_grad():
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        cloned = _run_on_device(session, torch.clone, (whole,), {})
        result = cloned.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if isinstance(tensor, torch.nn.Parameter):
        result = torch.nn.Parameter(result, tensor.requires_grad)
    else:
        result.requires_grad_(tensor.requires_grad)
        result.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
    memo[id(tensor)] = result
    return result


HANDLERS: dict[Any, Handler] = {
    Tensor.to: _to,
    Tensor.cpu: _cpu,
    Tensor.cuda: _cuda,
    Tensor.type: _type,
    Tensor.type_as: _type_as,
    Tensor.pin_memory: _pin,
    Tensor.is_pinned: _is_pinned,
    torch.get_device: _get_device,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.tolist: _tolist,
    Tensor.__repr__: _print,
    Tensor.__format__: _print,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    Tensor.new_tensor: _new_tensor,
    Tensor.__getitem__: _index,
    Tensor.__setitem__: _index,
    torch.empty: _empty,
    torch.empty_like: _empty,
    torch.empty_strided: _empty,
    torch.empty_permuted: _empty,
    Tensor.new_empty: _empty,
    Tensor.new_empty_strided: _empty,
    torch.tensor_split: _tensor_split,
    Tensor.tensor_split: _tensor_split,
    F.one_hot: _one_hot,
    Tensor.__deepcopy__: _deepcopy,
}
