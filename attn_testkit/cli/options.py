"""Options that several commands share, with suggestions for misspelt values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import click

from ..registry import UsageError
from ..results.failure_text import program
from ..running.planning.request import Options, Request, asked, options_of
from ..running.planning.run_option import SWITCH, Kind, RunOption, seconds
from .backend_file import spec_of

F = TypeVar("F", bound=Callable[..., Any])

_OF_RUN = options_of("run")
_SELECTION = {each.name for each in fields(Request)} & {*_OF_RUN}


class Value(click.ParamType[Any]):
    """A value of a kind; the error for a wrong value is the same as in Python and in pytest."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.name = kind.metavar.lower()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a text, or show a valid one in the error."""
        return self.kind.parse(value) if isinstance(value, str) else value

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The values themselves if they are few and short."""
        return self.kind.metavar


def run_option(name: str, **more: Any) -> Callable[[F], F]:
    """An option of a run, by the name of its field. ``more``: arguments of click that differ in this command."""
    option = _OF_RUN[name]
    words: dict[str, Any] = {"help": option.help_on_command_lines, **_shape(option), **more}
    names = [f"--{option.flag}", *([f"-{option.short}"] if option.short else []), name]
    return click.option(*names, **words)


def _shape(option: RunOption) -> dict[str, Any]:
    if option.kind is SWITCH:
        return {"is_flag": True}
    if option.repeatable:
        return {"type": Value(option.kind), "multiple": True}
    shown = option.default is not None
    return {"type": Value(option.kind), "default": option.default, "show_default": shown}


def one_backend(command: F) -> F:
    """Add ``--backend`` of a command that accepts one; its parameter is ``backend``."""
    option = _OF_RUN["backends"]
    names = (f"--{option.flag}", f"-{option.short}", "backend")
    return click.option(*names, required=True, metavar=option.kind.metavar, help=option.help)(command)


def seconds_option(default: float, help: str) -> Callable[[F], F]:
    """``--seconds`` of a command that searches or compiles for that time."""
    return click.option("--seconds", type=Value(seconds("seconds")), default=default, show_default=True, help=help)


def selection_options(command: F) -> F:
    """Add the options that select case-runs, of ``run`` and of ``list --cases``."""
    return _with(command, [name for name in _OF_RUN if name in _SELECTION])


def settings_options(command: F) -> F:
    """Add the other options of a run."""
    return _with(command, [name for name in _OF_RUN if name not in _SELECTION])


def _with(command: F, names: Sequence[str]) -> F:
    for name in reversed(names):
        command = run_option(name)(command)
    return command


def refuse_together(asked: str, others: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` if the option ``asked`` is given with one of ``others``, name of a value -> option."""
    for name, option in others.items():
        if values[name]:
            raise UsageError(f"{asked} and {option} cannot be combined; leave one of them out")


def asked_for(values: dict[str, Any], **more: Any) -> tuple[Request, Options]:
    """The option records of a command's values; all other values are left out. ``more``: further fields of the
    request."""
    given = {name: values[name] for name in _OF_RUN if name in values}
    backends = tuple(map(spec_of, given.pop("backends")))
    return asked("run", backends, given, command=command_line(), **more)


def command_line() -> str:
    """The command line of this process, for records."""
    return shlex.join([*program(), *sys.argv[1:]])
