"""Options that several commands share, with suggestions for misspelt values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ..registry import UsageError, unknown
from ..results.failure_text import program
from ..running.planning.request import EXECUTIONS, MODES, TIERS, Request, checked_device, checked_seconds
from .backend_file import spec_of

F = TypeVar("F", bound=Callable[..., Any])


class Spelled(click.ParamType[str]):
    """One of a few words; the error for a wrong one suggests the nearest right one."""

    name = "word"

    def __init__(self, what: str, words: Sequence[str]) -> None:
        self.what, self.words = what, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept the word, or name the one that was probably meant."""
        if value in self.words:
            return str(value)
        raise UsageError(unknown(self.what, value, self.words))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The words themselves if they are few and short."""
        text = "|".join(self.words)
        return text if len(text) < 30 else self.what.upper()


class Device(click.ParamType[str]):
    """A device: auto, cuda, cuda:N or cpu."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept the name of a device, or show how it is spelled."""
        return checked_device(str(value))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The forms that a device's name may have."""
        return "auto|cuda|cuda:N|cpu"


class Seconds(click.ParamType[float]):
    """A time limit in seconds, of a case-run or another thing."""

    name = "seconds"

    def __init__(self, what: str = "timeout") -> None:
        self.what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Accept a number of seconds, or show what one looks like."""
        try:
            return checked_seconds(float(value), self.what)
        except ValueError:
            raise UsageError(f"{self.what} is {value!r}; expected seconds, such as 300") from None


backend_option = click.option(
    "--backend", "-b", "backends", multiple=True, metavar="SPEC", help="Registered name or module:Class; repeatable."
)
device_option = click.option("--device", type=Device(), default="auto", show_default=True, help="cpu emulates CUDA.")
execution_option = click.option(
    "--execution", "executions", multiple=True, type=Spelled("execution", EXECUTIONS), help="Default: both."
)
case_option = click.option(
    "--case", "cases", multiple=True, metavar="GLOB", help="Only cases whose id matches, as 'decode-*'."
)


def selection_options(command: F) -> F:
    """Add the options that select case-runs, of ``run`` and of ``list --cases``."""
    options = [
        backend_option,
        click.option(
            "--mode", "modes", multiple=True, type=Spelled("mode", MODES), help="As 'extend'; `list` shows modes."
        ),
        execution_option,
        click.option(
            "--tier", type=Spelled("tier", TIERS), default="smoke", show_default=True, help="Number of cases."
        ),
        case_option,
        device_option,
        click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Random seed."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def request_from(values: dict[str, Any]) -> Request:
    """Take the shared options out of a command's values."""
    values["backends"] = tuple(map(spec_of, values["backends"]))
    names = ("backends", "modes", "executions", "tier", "device", "seed", "cases")
    return Request(**{name: values.pop(name) for name in names}, command=command_line())


def command_line() -> str:
    """The command line of this process, for records."""
    return shlex.join([*program(), *sys.argv[1:]])
