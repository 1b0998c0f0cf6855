"""State of a process that a backend may not change: compared before and after each case-run, then restored.

A server runs many components in one process. A backend that leaves float64 as the default dtype, a reseeded generator
or a replaced function breaks the others, and in this process it could change the observations. The comparison runs
after every case-run, so it is one pass over plain lists if nothing changed.
"""

from __future__ import annotations

import itertools
import operator
import os
import sys
from collections.abc import Iterator, Mapping, ValuesView
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from ...distributions import is_of_kit
from .settings import SETTINGS

_JUDGED = (
    "attn_testkit.backends",
    "attn_testkit.examples",
    "attn_testkit_corpus.faults",
    "attn_testkit_servers.fakes",
)
"""Packages of the kit that hold backends and their kernels: their modules may keep state."""
_TORCH = ("torch", "torch.nn.functional", "torch.cuda", "torch.linalg")
_CLASSES = (torch.Tensor, torch.cuda.CUDAGraph, torch.cuda.Stream, torch.cuda.Event)


@dataclass(frozen=True)
class ProcessState:
    """Settings of a process at one moment."""

    values: Mapping[str, Any]
    """Name of a setting -> its value; compared with ``==``."""
    owners: Mapping[str, tuple[Any, dict[str, Any]]]
    """Name of a module or class of torch or the kit -> (itself, its attributes at that time); compared by identity."""
    tables: Mapping[str, tuple[dict[Any, Any], dict[Any, Any]]]
    """Dicts of the kit with their contents: ``DRIVERS[mode] = ...`` replaces no attribute."""
    views: tuple[ValuesView[Any], ...] = field(repr=False)
    """Live views of the values of every owner and table, in the order in which their names first appeared."""
    seen: list[Any] = field(repr=False)
    """Values when they were last compared one by one."""


_taken: list[tuple[dict[str, ModuleType], ProcessState]] = []
"""The last state that was taken, with the modules that were watched: a list, because this module is one of them."""


def _modules() -> dict[str, ModuleType]:
    """Modules whose attributes are watched: the public modules of torch, and all modules of the kit except backends."""
    of_torch = {name: sys.modules[name] for name in _TORCH if name in sys.modules}
    of_kit = {
        name: module
        for name, module in list(sys.modules.items())
        if is_of_kit(name) and not name.startswith(_JUDGED) and module is not None
    }
    return of_torch | of_kit


def _owners(modules: Mapping[str, ModuleType]) -> dict[str, Any]:
    """The modules and their classes; of torch only a few."""
    watched: dict[str, Any] = {name: module for name, module in modules.items() if not is_of_kit(name)}
    watched |= {f"torch.{'' if cls is torch.Tensor else 'cuda.'}{cls.__qualname__}": cls for cls in _CLASSES}
    for name, module in modules.items():
        if is_of_kit(name):
            watched[name] = module
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            watched |= {f"{name}.{cls.__qualname__}": cls for cls in classes if cls.__module__ == name}
    return watched


def take_state() -> ProcessState:
    """The state of this process now. Call it while no emulation is active, because that replaces functions of torch."""
    modules = _modules()
    # Of many workers in one process, as of `--in-process`, most find what the one before has found. Settings are read
    # again: pytest changes a variable of the environment for each test.
    if not _taken or _taken[0][0] != modules or not _nothing_replaced(_taken[0][1]):
        _taken[:] = [(modules, _all_of(modules))]
    _, kept = _taken[0]
    return replace(kept, values=_values(), seen=list(kept.seen))


def _values() -> dict[str, Any]:
    return {setting.name: setting.read() for setting in SETTINGS}


def _all_of(modules: Mapping[str, ModuleType]) -> ProcessState:
    owners = {name: (owner, dict(vars(owner))) for name, owner in _owners(modules).items()}
    tables = {
        f"{name}.{key}": (value, dict(value))
        for name, (_, attributes) in owners.items()
        if is_of_kit(name)
        for key, value in attributes.items()
        if type(value) is dict and key.lstrip("_").isupper()
    }
    views = (
        *(vars(owner).values() for owner, _ in owners.values()),
        *(table.values() for table, _ in tables.values()),
    )
    return ProcessState(_values(), owners, tables, views, list(itertools.chain.from_iterable(views)))


def unchanged(state: ProcessState) -> bool:
    """Return True only if everything is as it was, in a tenth of the time of ``changes``. False does not mean a
    finding. The method is called after every case-run.
    """
    return all(setting.read() == state.values[setting.name] for setting in SETTINGS) and _nothing_replaced(state)


def _nothing_replaced(state: ProcessState) -> bool:
    if sum(map(len, state.views)) != len(state.seen):
        return False
    return all(map(operator.is_, itertools.chain.from_iterable(state.views), state.seen))


_GONE = object()


def changes(before: ProcessState, *, skip: tuple[str, ...] = (), of_kit: bool = True) -> list[str]:
    """Sentences about everything that is different now. ``skip``: settings that may differ. ``of_kit``: compare the
    kit's own modules, too.
    """
    found = []
    for setting in SETTINGS:
        was, now = before.values[setting.name], setting.read()
        said = setting.say(was, now) if setting.name not in skip and was != now else ""
        if said:
            found.append(f"{setting.name}: {said}")
    replaced = [
        f"{name}.{key} was {'removed' if current is _GONE else 'replaced'}"
        for name, key, current in _replaced(before)
        if of_kit or not is_of_kit(name)
    ]
    if not of_kit:
        return found + replaced
    replaced += [f"{name} was modified" for name, (table, was) in before.tables.items() if not _same(table, was)]
    if not replaced:
        # Variables that modules assign to are not to be looked at one by one again.
        before.seen[:] = itertools.chain.from_iterable(before.views)
    return found + replaced


@dataclass(frozen=True)
class Accepted:
    """Changes that do not count as a failure."""

    values: Mapping[str, Any]
    """Name of a setting -> its value."""
    attributes: tuple[tuple[str, str, Any], ...]
    """(module or class of torch, name of an attribute, its value)."""

    def into(self, state: ProcessState) -> ProcessState:
        """``state`` as if it had been taken with these changes, as far as they are still in force. A function that was
        replaced while CUDA was emulated is torch's own again after the emulation.
        """
        now = {setting.name: setting.read() for setting in SETTINGS if setting.name in self.values}
        held = {name: value for name, value in self.values.items() if now[name] == value}
        owners = dict(state.owners)
        for name, key, value in self.attributes:
            owner, attributes = owners.get(name, (None, {}))
            if owner is not None and vars(owner).get(key) is value:
                owners[name] = owner, {**attributes, key: value}
        return replace(state, values={**state.values, **held}, owners=owners)


def accepted(before: ProcessState, *, skip: tuple[str, ...] = ()) -> Accepted:
    """Differences of settings and of torch, never of the kit. ``skip``: settings that are left out."""
    values = {setting.name: setting.read() for setting in SETTINGS if setting.name not in skip}
    changed = {name: value for name, value in values.items() if value != before.values[name]}
    attributes = [each for each in _replaced(before) if not is_of_kit(each[0]) and each[2] is not _GONE]
    return Accepted(changed, tuple(attributes))


def _alike(now: Any, was: dict[str, Any]) -> bool:
    """True if every value is the same object; compared in C, since there are thousands."""
    return all(map(operator.is_, map(now.get, was, itertools.repeat(_GONE)), was.values()))


def _same(table: dict[Any, Any], was: dict[Any, Any]) -> bool:
    return len(table) == len(was) and _alike(table, was)


def _replaced(before: ProcessState) -> Iterator[tuple[str, str, Any]]:
    for name, (owner, was) in before.owners.items():
        if not _alike(dict(vars(owner)), was):
            now = vars(owner)
            for key, value in was.items():
                current = now.get(key, _GONE)
                if current is not value and _is_fixed(key, value) and not _wrapped_by_torch(value, current):
                    yield name, key, current


def _is_fixed(key: str, value: Any) -> bool:
    """True for functions, classes, modules and constants: the kit and torch assign only to other variables.

    ``torch.set_default_dtype`` replaces ``torch.Storage``.
    """
    return key != "Storage" and (callable(value) or isinstance(value, ModuleType) or key.lstrip("_").isupper())


def _wrapped_by_torch(value: Any, current: Any) -> bool:
    """Importing ``torch._dynamo``, which many calls of torch do on the way, wraps ``torch.manual_seed``."""
    code = getattr(current, "__code__", None)
    wraps = getattr(current, "__wrapped__", None) is value
    return code is not None and wraps and code.co_filename.startswith(_TORCH_FILES)


_TORCH_FILES = os.path.join(os.path.dirname(torch.__file__), "")


def restore(before: ProcessState, *, skip: tuple[str, ...] = ()) -> None:
    """Restore what can be restored, so that changes by one case-run do not reach the next.

    ``skip``: settings that may differ.
    """
    for setting in SETTINGS:
        was = before.values[setting.name]
        if setting.name not in skip and setting.read() != was:
            setting.write(was)
    for name, key, _ in list(_replaced(before)):
        owner, attributes = before.owners[name]
        setattr(owner, key, attributes[key])
    for table, content in before.tables.values():
        if not _same(table, content):
            table.clear()
            table.update(content)
