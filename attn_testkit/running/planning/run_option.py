"""Options of a run as front ends offer them: the metadata of the fields in ``request.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...registry import UsageError, did_you_mean, unknown

FrontEnd = Literal["run", "pytest", "check_backend", "conformance_cases"]
"""``assert_conformant`` offers what ``check_backend`` does, and the fixture ``attn_check`` what ``conformance_cases``
does."""

MOST_SECONDS = 86_400.0
"""Longest time limit: one day, for a case-run and for the budget of a run."""


@dataclass(frozen=True)
class Kind:
    """The values that an option accepts."""

    metavar: str
    """The value's place in a command line."""
    check: Callable[[Any], object] = lambda value: None
    """Raises ``UsageError`` for a value that makes no sense."""
    of_text: Callable[[str], Any] = str
    unit: str = ""
    words: tuple[str, ...] = ()
    """All values, if they are few words."""

    def parse(self, text: str) -> Any:
        """The value of a text. Raises ``UsageError``."""
        try:
            value = self.of_text(text)
        except ValueError:
            value = text
        self.check(value)
        return value


def one_of(what: str, words: Sequence[str], metavar: str = "") -> Kind:
    """One of a few words; the error for another one suggests the nearest."""

    def check(value: object) -> None:
        if value not in words:
            raise UsageError(unknown(what, str(value), words))

    return Kind(metavar or "|".join(words), check, words=tuple(words))


def seconds(what: str) -> Kind:
    """A duration in seconds."""
    return _duration(what, "seconds", MOST_SECONDS, "S")


def _duration(what: str, unit: str, most: float, metavar: str) -> Kind:
    def check(value: object) -> None:
        if not isinstance(value, int | float):
            raise UsageError(f"{what} is {value!r}; expected {unit}, such as 60")
        if not 0 < value <= most:
            raise UsageError(f"{what} is {value:g}; expected {unit} above 0, and at most {most:g}")

    return Kind(metavar, check, float, unit)


def whole(what: str, least: int = 0) -> Kind:
    """A whole number."""

    def check(value: object) -> None:
        if not isinstance(value, int) or value < least:
            raise UsageError(f"{what} is {value!r}; expected a whole number from {least} up")

    return Kind("N", check, int)


def _check_device(name: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        near = "; did you mean 'cuda'?" if name.startswith("gpu") else did_you_mean(name, ("auto", "cuda", "cpu"))
        raise UsageError(f"unknown device {name!r}{near} (auto, cuda, cuda:0, or cpu, which emulates CUDA)")


MINUTES = _duration("minutes", "minutes", 7 * 24 * 60.0, "M")
DEVICE = Kind("auto|cuda|cuda:N|cpu", _check_device)
FILE, GLOB, SPEC, SWITCH = Kind("FILE"), Kind("GLOB"), Kind("SPEC"), Kind("")

_THE_FIELDS = object()


@dataclass(frozen=True)
class RunOption:
    """An option of a run, such as ``--timeout S``, ``--attn-timeout=S`` and ``timeout_s=300.0``."""

    kind: Kind
    help: str
    flag: str = ""
    """Name on command lines without its dashes; empty: the name of the field without ``_s``, which means seconds."""
    short: str = ""
    """A short form on the command line of the kit, as ``-j``."""
    ini: bool = False
    """True if a project may set the option in pytest's ini file, too."""
    lacking: Mapping[FrontEnd, str] = field(default_factory=dict)
    """Front ends that do not offer the option, with the reasons."""
    default: Any = _THE_FIELDS
    """Default of front ends if it differs from the default of the field."""
    name: str = ""
    """Name of the field, and of the argument in Python. ``options_of`` fills it in."""

    def of_field(self, name: str, default: Any) -> RunOption:
        """The option, completed by its field."""
        default = default if self.default is _THE_FIELDS else self.default
        return replace(self, name=name, flag=self.flag or name.removesuffix("_s").replace("_", "-"), default=default)

    @property
    def help_with_unit(self) -> str:
        """The help for places that do not show a metavar."""
        return f"{self.help[:-1]}, in {self.kind.unit}." if self.kind.unit else self.help

    @property
    def help_on_command_lines(self) -> str:
        """The help for places that show a metavar."""
        return f"{self.help[:-1]}; repeatable." if self.repeatable else self.help

    @property
    def repeatable(self) -> bool:
        """True for an option that accepts several values."""
        return isinstance(self.default, tuple)


def offered(kind: Kind, help: str, **more: Any) -> dict[str, RunOption]:
    """Metadata of a field that is an option. ``help``: one sentence that ends with a full stop, in 45 characters."""
    return {"option": RunOption(kind, help, **more)}
