"""Notes of the Triton launches of a program, with the information that a compiler needs to compile each of them for a
device."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from cuda_on_cpu import session
from cuda_on_cpu.private import disable_functions

_ALIGNMENT = 16


class Unsupported(ValueError):
    """An argument that cannot be sent to another process."""


@dataclass(frozen=True)
class LaunchNote:
    """A launch, in a form for JSON."""

    kernel: str
    """Qualified name of the kernel's function."""
    module: str
    file: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    why_not: str = ""
    """The reason why it cannot be compiled elsewhere. Then it has no arguments."""

    def text(self) -> str:
        """The kernel on one line, with the dtypes of its tensors and its constants."""
        dtypes = dict.fromkeys(_spelled(each) for each in self.args if isinstance(each, dict) and "tensor" in each)
        plain = [each for each in self.args if not isinstance(each, dict)]
        constants = [repr(each) for each in plain if each is not None]
        constants += [f"{name}={_spelled(each)}" for name, each in self.kwargs.items()]
        return f"{self.kernel}({', '.join(dtypes)}; {', '.join(constants)})"


@dataclass
class LaunchLog:
    """The different launches of a program: those that a compiler would compile once."""

    launches: int = 0
    """Number of all launches, replays of graphs not counted."""
    notes: dict[str, LaunchNote] = field(default_factory=dict)
    folder: Path | None = None
    """Folder in which each process writes its notes at once; None: they are not written."""

    def __call__(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a launch of the interpreter."""
        self.launches += 1
        function = getattr(executor.fn, "fn", executor.fn)
        where = function.__qualname__, function.__module__, function.__code__.co_filename
        try:
            with disable_functions():
                named = [*zip(executor.arg_names, args, strict=False), *kwargs.items()]
                notes = [
                    _note_of(value, fixed=name not in executor.arg_names or name in executor.constexprs)
                    for name, value in named
                ]
                rest = dict(zip(kwargs, notes[len(args) :], strict=True))
                note = LaunchNote(*where, tuple(notes[: len(args)]), rest)
        except Unsupported as reason:
            note = LaunchNote(*where, (), {}, str(reason))
        key = json.dumps(asdict(note), sort_keys=True)
        if key not in self.notes:
            self.notes[key] = note
            if self.folder is not None:
                with (self.folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(key + "\n")


@contextmanager
def note_grids(most: tuple[int, int] | None = None) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Yield a list that gets the kernel and the grid of each launch inside the block.

    ``most``: an axis, and the most programs of a launch along it. Requires an active emulation.
    """
    current, notes = session.require(), list[tuple[str, tuple[int, ...]]]()
    before = current.launched

    def launched(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if before is not None:
            before(executor, args, kwargs)
        grid = executor.grid

        def cut(arguments: dict[str, Any]) -> tuple[int, ...]:
            sizes = tuple(int(size) for size in (grid(arguments) if callable(grid) else grid))
            notes.append((executor.fn.__name__, sizes))
            if most is None:
                return sizes
            return tuple(min(size, most[1]) if axis == most[0] else size for axis, size in enumerate(sizes))

        executor.grid = cut

    current.launched = launched
    try:
        yield notes
    finally:
        current.launched = before


@functools.cache
def _log_of(folder: str) -> LaunchLog:
    return LaunchLog(folder=Path(folder))


@contextmanager
def note_launches(folder: str) -> Iterator[None]:
    """Note compiled kernels instead of launching them, each kind in a line of a file in ``folder``."""
    kernel: Any = importlib.import_module("triton.runtime.jit").JITFunction
    log, stock = _log_of(folder), kernel.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        constants = {each.name for each in self.params if each.is_constexpr}
        log(SimpleNamespace(fn=self.fn, arg_names=self.arg_names, constexprs=constants), args, kwargs)

    kernel.run = run
    try:
        yield
    finally:
        kernel.run = stock


def read_notes(folder: Path) -> list[LaunchNote]:
    """The different notes that processes wrote to ``folder``."""
    lines = {line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text(encoding="utf-8").splitlines()}
    return [LaunchNote(**{**json.loads(line), "args": tuple(json.loads(line)["args"])}) for line in sorted(lines)]


def _note_of(value: Any, fixed: bool = True) -> Any:
    """Dtype and alignment of a tensor, or the value. ``fixed``: a constant of the kernel or of the compiler."""
    if isinstance(value, Tensor):
        rest = value.data_ptr() % _ALIGNMENT
        return {"tensor": str(value.dtype).removeprefix("torch."), "rest": rest}
    if type(value) is int and not fixed and value != 1:
        # Triton compiles one kernel for all integers of a width, and another one for multiples of 16.
        wide = 0 if -(1 << 31) <= value < 1 << 31 else 1 << 40
        return {"int": wide + (_ALIGNMENT if value % _ALIGNMENT == 0 else _ALIGNMENT + 1)}
    if type(value) is float and not fixed:
        return {"float": 0.5}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__name__ == "constexpr":
        return {"constexpr": _note_of(value.value)}
    if type(value).__module__.startswith("triton") and type(value).__name__ == "dtype":
        return {"type": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_note_of(each) for each in value]}
    function = getattr(value, "fn", None)
    if function is not None and hasattr(function, "__qualname__"):
        return {"function": [function.__qualname__, function.__module__, function.__code__.co_filename]}
    raise Unsupported(f"an argument is of type {type(value).__name__}")


def _spelled(note: Any) -> str:
    if not isinstance(note, dict):
        return repr(note)
    if "tensor" in note:
        return str(note["tensor"])
    if "int" in note or "float" in note:
        return "int" if "int" in note else "float"
    if "tuple" in note:
        return f"({', '.join(map(_spelled, note['tuple']))})"
    if "function" in note:
        return str(note["function"][0])
    return _spelled(note["constexpr"]) if "constexpr" in note else str(note["type"])
