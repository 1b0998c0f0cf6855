"""What a backend may not change about its process: compared before and after it was driven, then put back.

A server runs many components in one process. One that leaves float64 as the default dtype, a reseeded generator or a
replaced function behind breaks the others, and here it could bend what the kit observes.
"""

from __future__ import annotations

import itertools
import operator
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["ProcessState", "changes", "restore", "take_state"]

_KIT = "attn_testkit"
_JUDGED = ("attn_testkit.backends", "attn_testkit.examples", "attn_testkit.faults")
"""Packages of the kit that hold backends: their modules may keep state."""
_TORCH = ("torch", "torch.nn.functional", "torch.cuda", "torch.linalg")
_JIT_VARIABLES = ("TRITON_", "TORCH", "FLASHINFER_", "CUDA_", "NVCC_", "KINETO_", "TVM_")
"""Beginnings of environment variables that compilers of kernels set for themselves."""


@dataclass(frozen=True)
class ProcessState:
    """Settings of a process at one moment."""

    values: Mapping[str, Any]
    """Name of a setting -> its value; compared with ``==``."""
    owners: Mapping[str, tuple[Any, dict[str, Any]]]
    """Name of a module or class -> (itself, its attributes then), of torch and of the kit; compared by identity."""
    tables: Mapping[str, tuple[dict[Any, Any], dict[Any, Any]]]
    """The same for dicts of the kit: ``DRIVERS[mode] = ...`` replaces no attribute."""


_Setting = tuple[str, Callable[[], Any], Callable[[Any], Any]]


def _set_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def _set_signals(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _signals() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in sorted(signal.valid_signals())}


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = state
    return (name, keys.tobytes(), *rest)


def _set_numpy_state(before: tuple[Any, ...]) -> None:
    name, keys, *rest = before
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_rng(before: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(before), dtype=torch.uint8))


_SETTINGS: tuple[_Setting, ...] = (
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the default device", lambda: str(torch.get_default_device()), lambda _: torch.set_default_device(None)),
    ("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("deterministic algorithms", _deterministic, lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1])),
    ("the float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("the number of CPU threads of torch", torch.get_num_threads, torch.set_num_threads),
    ("torch's random state", lambda: bytes(torch.get_rng_state().numpy()), _set_rng),
    ("numpy's random state", _numpy_state, _set_numpy_state),
    ("Python's random state", random.getstate, random.setstate),
    ("environment variables", lambda: dict(os.environ), _set_environment),
    ("the current directory", os.getcwd, os.chdir),
    ("the filters of warnings", lambda: list(warnings.filters), lambda v: warnings.filters.__setitem__(slice(None), v)),  # type: ignore[index]
    ("signal handlers", _signals, _set_signals),
)
"""What it is called, how it is read, how it is put back."""


def _modes_left() -> tuple[str, ...]:
    """Function and dispatch modes that are entered at the moment, by class."""
    stacks: tuple[object, ...] = (
        *_get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
        *_get_current_dispatch_mode_stack(),
    )
    return tuple(type(mode).__qualname__ for mode in stacks)


def _owners() -> dict[str, Any]:
    """Modules and classes whose attributes are watched: of torch the public ones, of the kit all but backends."""
    watched: dict[str, Any] = {name: sys.modules[name] for name in _TORCH if name in sys.modules}
    watched["torch.Tensor"] = torch.Tensor
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _KIT and not name.startswith(_JUDGED) and module is not None:
            watched[name] = module
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            watched |= {f"{name}.{cls.__qualname__}": cls for cls in classes if cls.__module__ == name}
    return watched


def take_state() -> ProcessState:
    """The state of this process now. To be taken where no emulation is active, which replaces functions of torch."""
    owners = {name: (owner, dict(vars(owner))) for name, owner in _owners().items()}
    tables = {
        f"{name}.{key}": (value, dict(value))
        for name, (_, attributes) in owners.items()
        if name.startswith(_KIT)
        for key, value in attributes.items()
        if type(value) is dict and key.lstrip("_").isupper()
    }
    values = {name: read() for name, read, _ in _SETTINGS}
    return ProcessState({**values, _MODES: _modes_left()}, owners, tables)


_MODES = "function and dispatch modes that were entered"
_GONE = object()


def changes(before: ProcessState, *, skip: tuple[str, ...] = ()) -> list[str]:
    """What is otherwise now, one sentence each. ``skip``: settings that may differ."""
    now = {**{name: read() for name, read, _ in _SETTINGS}, _MODES: _modes_left()}
    found = [
        _sentence(name, was, now[name])
        for name, was in before.values.items()
        if name not in skip and _differs(name, was, now[name])
    ]
    found += [
        f"{name}.{key} was {'removed' if current is _GONE else 'replaced'}" for name, key, current in _replaced(before)
    ]
    return found + [f"{name} was modified" for name, (table, was) in before.tables.items() if not _same(table, was)]


def _alike(now: Any, was: dict[str, Any]) -> bool:
    """Whether every value is the same object, asked at the speed of C: there are thousands."""
    return all(map(operator.is_, map(now.get, was, itertools.repeat(_GONE)), was.values()))


def _same(table: dict[Any, Any], was: dict[Any, Any]) -> bool:
    return len(table) == len(was) and _alike(table, was)


def _replaced(before: ProcessState) -> Iterator[tuple[str, str, Any]]:
    for name, (owner, was) in before.owners.items():
        if not _alike(dict(vars(owner)), was):
            now = vars(owner)
            for key, value in was.items():
                current = now.get(key, _GONE)
                if current is not value and _is_fixed(key, value):
                    yield name, key, current


_BOOKKEEPING = frozenset(
    {"Storage", "__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__annotations__"}
)
"""Attributes that Python and ``torch.set_default_dtype`` make anew."""


def _is_fixed(key: str, value: Any) -> bool:
    """Functions, classes, modules and constants. The kit and torch assign to variables of their own."""
    return key not in _BOOKKEEPING and (callable(value) or isinstance(value, ModuleType) or key.lstrip("_").isupper())


def _differs(name: str, was: Any, now: Any) -> bool:
    if name == "environment variables":
        return bool(_variables(was, now))
    return bool(was != now)


def _variables(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
    return [name for name in names if not name.startswith(_JIT_VARIABLES)]


def _sentence(name: str, was: Any, now: Any) -> str:
    if name == "environment variables":
        told = [f"{key} {was.get(key)!r} -> {now.get(key)!r}" for key in _variables(was, now)]
    elif name == "signal handlers":
        told = [f"{signal.Signals(n).name} {was[n]!r} -> {now[n]!r}" for n in was if was[n] != now[n]]
    elif name == "the filters of warnings":
        told = [f"{len(was)} filters -> {len(now)}, first is {now[0] if now else None!r}"]
    elif name.endswith("random state"):
        return f"{name} was advanced or reseeded"
    else:
        told = [f"{was!r} -> {now!r}"]
    return f"{name}: {', '.join(told[:3])}"


def restore(before: ProcessState, *, skip: tuple[str, ...] = ()) -> None:
    """Put back what can be put back, so that what one case-run left behind is not found in the next.

    ``skip``: settings that may differ.
    """
    for name, read, write in _SETTINGS:
        if name not in skip and read() != before.values[name]:
            write(before.values[name])
    for name, key, _ in list(_replaced(before)):
        owner, was = before.owners[name]
        setattr(owner, key, was[key])
    for table, content in before.tables.values():
        if not _same(table, content):
            table.clear()
            table.update(content)
