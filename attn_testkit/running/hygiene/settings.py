"""Settings that belong to a whole process: functions that read, restore and name each of them."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import os
import random
import signal
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as pop_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode

from .random_states import (
    numpy_random,
    python_random,
    reseeded,
    set_numpy_random,
    set_torch_random,
    torch_random,
)

_JIT_VARIABLES = {
    "TRITON_": "Inductor and Triton: where compiled kernels are stored",
    "TORCH": "Inductor: where its cache is stored; torch.utils.cpp_extension: for which devices it compiles",
    "_TORCHINDUCTOR_": "Inductor: addresses of functions that its C++ code calls",
    "FLASHINFER_": "FlashInfer: where compiled kernels are stored",
    "CUDA_": "builds of extensions: where CUDA is installed",
    "NVCC_": "builds of extensions: flags",
    "KINETO_": "torch's profiler, which tuners start",
    "TVM_": "TileLang and the FFI of FlashInfer",
}
"""Prefix of environment variables that kernel compilers set for themselves -> the compiler, and the purpose."""


def _arrow(was: Any, now: Any) -> str:
    return f"{was!r} -> {now!r}"


@dataclass(frozen=True)
class Setting:
    """One setting."""

    name: str
    read: Callable[[], Any]
    """Function that reads the value, which ``==`` compares."""
    write: Callable[[Any], object]
    """Function that restores the value."""
    say: Callable[[Any, Any], str] = _arrow
    """Function that describes a change from one value to another; empty text for a change that is allowed."""


def _environment() -> dict[bytes, bytes]:
    # As bytes, without decoding: it is read after every case-run.
    return dict(os.environ._data)  # type: ignore[attr-defined]


def _set_environment(before: Mapping[bytes, bytes]) -> None:
    for name in set(os.environb) - set(before):
        del os.environb[name]
    os.environb.update(before)


def _say_environment(was: Mapping[bytes, bytes], now: Mapping[bytes, bytes]) -> str:
    names = sorted(os.fsdecode(name) for name in {*was, *now} if was.get(name) != now.get(name))
    reported = [
        f"{name} {_decoded(was.get(os.fsencode(name)))!r} -> {_decoded(now.get(os.fsencode(name)))!r}"
        for name in names
        if not name.startswith(tuple(_JIT_VARIABLES))
    ]
    return ", ".join(reported[:_MOST])


_MOST = 3
"""Most changes that are named."""


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else os.fsdecode(value)


_NUMBERS = tuple(sorted(int(number) for number in signal.valid_signals()))


def _signals() -> tuple[Any, ...]:
    # Past the enums of ``signal``, which take a hundred microseconds for all of them.
    return tuple(map(_signal.getsignal, _NUMBERS))


def _set_signals(before: tuple[Any, ...]) -> None:
    for number, handler in zip(_NUMBERS, before, strict=True):
        if handler is not None and _signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _say_signals(was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    reported = [
        f"{signal.Signals(number).name} {_handler(before)!r} -> {_handler(after)!r}"
        for number, before, after in zip(_NUMBERS, was, now, strict=True)
        if before != after
    ]
    return ", ".join(reported[:_MOST])


def _handler(value: Any) -> Any:
    return signal.Handlers(value) if isinstance(value, int) else value


def _filters() -> list[Any]:
    return list(warnings.filters)


def _set_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index]


def _say_filters(was: list[Any], now: list[Any]) -> str:
    return f"{len(was)} filters -> {len(now)}, first is {now[0] if now else None!r}"


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_SDP = ("flash", "mem_efficient", "math", "cudnn")


def _attention_kernels() -> str:
    enabled = [kernel for kernel in _SDP if getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()]
    return ", ".join(enabled)


def _set_attention_kernels(before: str) -> None:
    for kernel in _SDP:
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel in before.split(", "))


def _modes() -> tuple[str, ...]:
    """Function and dispatch modes that are entered at the moment, by class."""
    stacks: tuple[object, ...] = (
        *_get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
        *_get_current_dispatch_mode_stack(),
    )
    return tuple(type(mode).__qualname__ for mode in stacks)


def _leave_modes(before: tuple[str, ...]) -> None:
    """Leave the modes that were entered since, the innermost first, function modes before dispatch modes."""
    while len(_modes()) > len(before):
        leave = pop_function_mode if _get_current_function_mode_stack() else pop_dispatch_mode  # type: ignore[no-untyped-call]
        leave()  # type: ignore[no-untyped-call]


def _default_device() -> str:
    try:
        return str(torch.get_default_device())
    except (RuntimeError, AssertionError):
        # torch asks the device for its index, and there is none.
        return "cuda or another that this machine lacks"


def _random(name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> Setting:
    return Setting(name, read, write, lambda was, now: reseeded(name, was, now))


SETTINGS: tuple[Setting, ...] = (
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("the default device", _default_device, lambda _: torch.set_default_device(None)),
    Setting("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting(
        "deterministic algorithms",
        _deterministic,
        lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1]),
    ),
    Setting("the float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting("kernels of scaled_dot_product_attention", _attention_kernels, _set_attention_kernels),
    Setting("the number of CPU threads of torch", torch.get_num_threads, torch.set_num_threads),
    _random("torch's random state", torch_random, set_torch_random),
    _random("numpy's random state", numpy_random, set_numpy_random),
    _random("Python's random state", python_random, random.setstate),
    Setting("environment variables", _environment, _set_environment, _say_environment),
    Setting("the current directory", os.getcwd, os.chdir),
    Setting("the filters of warnings", _filters, _set_filters, _say_filters),
    Setting("signal handlers", _signals, _set_signals, _say_signals),
    Setting("the garbage collector", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    Setting("function and dispatch modes that were entered", _modes, _leave_modes),
)
"""Settings in the order in which changes are named."""
