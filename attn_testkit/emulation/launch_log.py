"""Notes of the Triton launches of a program, with what a compiler must know to compile each of them for a device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attn_testkit.emulation.private import disable_functions

__all__ = ["LaunchLog", "LaunchNote", "Unsupported"]

_ALIGNMENT = 16


class Unsupported(ValueError):
    """An argument that cannot be handed to another process."""


@dataclass(frozen=True)
class LaunchNote:
    """A launch, as JSON can hold it."""

    kernel: str
    """Qualified name of the kernel's function."""
    module: str
    file: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    why_not: str = ""
    """The reason why it cannot be compiled elsewhere. Then it has no arguments."""

    def text(self) -> str:
        """The kernel and its arguments on one line: dtypes of tensors, and the values of constants."""
        given = [_spelled(each) for each in self.args]
        given += [f"{name}={_spelled(each)}" for name, each in self.kwargs.items()]
        return f"{self.kernel}({', '.join(given)})"


@dataclass
class LaunchLog:
    """The different launches of a program: those that a compiler would compile once."""

    launches: int = 0
    """Number of all launches, replays of graphs not counted."""
    notes: dict[str, LaunchNote] = field(default_factory=dict)

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
        self.notes.setdefault(json.dumps([where, note.args, note.kwargs, note.why_not], sort_keys=True), note)


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
