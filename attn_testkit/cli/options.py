"""Options that several commands share, and the answers to wrong spellings of their values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ..registry import UsageError, unknown
from ..results import program
from ..running.planning.request import EXECUTIONS, MODES, TIERS, Request, checked_device, checked_seconds

__all__ = ["case_option", "command_line", "device_option", "request_from", "selection_options"]

F = TypeVar("F", bound=Callable[..., Any])


class Spelled(click.ParamType[str]):
    """One of a few words; a wrong one is answered with the nearest right one."""

    name = "word"

    def __init__(self, what: str, words: Sequence[str]) -> None:
        self.what, self.words = what, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept the word or say which it should be."""
        if value in self.words:
            return str(value)
        raise UsageError(unknown(self.what, value, self.words))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The words themselves, where they are few and short."""
        text = "|".join(self.words)
        return text if len(text) < 30 else self.what.upper()


class Device(click.ParamType[str]):
    """auto, cuda, cuda:N or cpu."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept a device's name or say how it is spelled."""
        return checked_device(str(value))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The forms."""
        return "auto|cuda|cuda:N|cpu"


class Seconds(click.ParamType[float]):
    """How long a case-run, or another thing, may take."""

    name = "seconds"

    def __init__(self, what: str = "timeout") -> None:
        self.what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Accept a number of seconds or say what one is."""
        try:
            return checked_seconds(float(value), self.what)
        except ValueError:
            raise UsageError(f"{self.what} is {value!r}; expected seconds, such as 300") from None


backend_option = click.option(
    "--backend", "-b", "backends", multiple=True, metavar="SPEC", help="Registered name or module:Class; repeatable."
)
device_option = click.option(
    "--device", type=Device(), default="auto", show_default=True, help="cpu emulates CUDA, graphs included."
)
execution_option = click.option(
    "--execution", "executions", multiple=True, type=Spelled("execution", EXECUTIONS), help="Default: both."
)
case_option = click.option(
    "--case", "cases", multiple=True, metavar="GLOB", help="Only cases whose id matches; repeatable."
)


def selection_options(command: F) -> F:
    """Which case-runs: the options of ``run`` and of ``list --cases``."""
    options = [
        backend_option,
        click.option(
            "--mode", "modes", multiple=True, type=Spelled("mode", MODES), help=f"{', '.join(MODES)}; default: all."
        ),
        execution_option,
        click.option("--tier", type=Spelled("tier", TIERS), default="smoke", show_default=True, help="How many cases."),
        case_option,
        device_option,
        click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Other random data."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def request_from(values: dict[str, Any]) -> Request:
    """Take the shared options out of a command's values."""
    names = ("backends", "modes", "executions", "tier", "device", "seed", "cases")
    return Request(**{name: values.pop(name) for name in names}, command=command_line())


def command_line() -> str:
    """How this process was asked, for records."""
    return shlex.join([*program(), *sys.argv[1:]])
