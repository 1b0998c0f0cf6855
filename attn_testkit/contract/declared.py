"""The base of the records in which a backend declares what it can do: spelling, checks of values, changed copies."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields
from typing import Any, ClassVar, Self

from .modes import ForwardMode

__all__ = ["Declared", "is_whole", "mode_named", "spelled"]


class Declared:
    """A frozen dataclass of declared values. A misspelt name raises ``ValueError`` with the right one."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _GUESSED: ClassVar[tuple[str, ...]] = ()
    """Fields whose defaults are guesses: a backend that supports more, but does not declare it, is tested with
    less."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuse a misspelt field, also in a record within this one."""
        for name in (name for name in given if name not in cls.__dataclass_fields__):
            raise ValueError(cls._misspelt(name))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, each in self.__dataclass_fields__.items():
            record = each.default_factory
            if isinstance(record, type) and issubclass(record, Declared):
                self._set(name, record().made_of(getattr(self, name)))
        # A default is one object, which a value that somebody writes is not, even if it equals the default.
        left = {name: each.default for name, each in self.__dataclass_fields__.items() if name in self._GUESSED}
        left = {name: default for name, default in left.items() if getattr(self, name) is default}
        self._check()
        for name, default in left.items():
            self._set(name, default)
        self._set("_unwritten", tuple(left))

    def _check(self) -> None:
        """Check the values, and set those that are given in another form than they have."""

    def unwritten(self) -> Iterator[str]:
        """Fields with a guessed default that the author left out, also in a record within this one. A value that is
        written and equals the default is not left out."""
        yield from vars(self)["_unwritten"]
        for name in self.__dataclass_fields__:
            if isinstance(inner := getattr(self, name), Declared):
                yield from (f"{name}.{each}" for each in inner.unwritten())

    @classmethod
    def _misspelt(cls, name: str) -> str:
        """Text for a field that does not exist: the nearest one, also of a record within this one."""
        paths = {path.rpartition(".")[2]: path for path in reversed([*cls._names()])}
        close = difflib.get_close_matches(name, paths, n=1, cutoff=0.4)
        hint = f"; did you mean {paths[close[0]]!r}?" if close else ""
        return f"unknown capability {name!r}{hint} (known: {', '.join(cls.__dataclass_fields__)})"

    @classmethod
    def _names(cls) -> Iterator[str]:
        for name, each in cls.__dataclass_fields__.items():
            yield name
            if isinstance(each.default_factory, type) and issubclass(each.default_factory, Declared):
                yield from (f"{name}.{inner}" for inner in each.default_factory._names())

    def with_changes(self, **changes: object) -> Self:
        """A copy with some values replaced; for subclasses that narrow or widen a parent's capabilities.

        A dict changes a record in part, ``server={"takes_out": True}``, and a set only the modes of ``windows``.
        """
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in changes.items():
            inner = values.get(name)
            # None takes a record out that may be left out; others refuse it.
            values[name] = inner.made_of(value) if isinstance(inner, Declared) and value is not None else value
        return type(self)(**values)

    def made_of(self, given: object) -> Self:
        """Return ``given`` if it is such a record; for a dict, a copy of this record with its changes."""
        if isinstance(given, Mapping):
            return self.with_changes(**given)
        if isinstance(given, type(self)):
            return given
        raise ValueError(f"expected {type(self).__name__}(...), or a dict of its fields, got {given!r}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _listed(self, name: str) -> list[Any]:
        values = getattr(self, name)
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(
                f"{type(self).__name__}.{name} must be a set or list of values, got {values!r}; write {{{values!r}}}"
            )
        return list(values)

    def _check_modes(self, *names: str) -> None:
        for name in names:
            self._set(name, frozenset(mode_named(name, value) for value in self._listed(name)))

    def _check_words(self, name: str, known: tuple[str, ...]) -> None:
        self._set(name, frozenset(spelled(name, value, known) for value in self._listed(name)))

    def _check_numbers(self, name: str, least: int) -> None:
        values = self._listed(name)
        if not all(is_whole(value) and value >= least for value in values):
            numbers = f"whole numbers from {least} on" if least > 1 else "positive whole numbers"
            raise ValueError(f"{type(self).__name__}.{name} must be {numbers}, got {sorted(map(str, values))}")
        self._set(name, frozenset(values))

    def _check_number(self, name: str, least: int) -> None:
        number = getattr(self, name)
        if not is_whole(number) or number < least:
            raise ValueError(f"{type(self).__name__}.{name} must be a whole number from {least} on, got {number!r}")

    def _check_flags(self) -> None:
        """Check that fields whose default is True or False are one of the two."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{type(self).__name__}.{f.name} must be True or False, got {value!r}")


def is_whole(value: object) -> bool:
    """Return True for a whole number. True and False do not count as numbers."""
    return isinstance(value, int) and not isinstance(value, bool)


def mode_named(name: str, value: object) -> ForwardMode:
    """Return the mode that ``value`` names, for the field ``name``."""
    return ForwardMode(spelled(name, getattr(value, "value", value), tuple(mode.value for mode in ForwardMode)))


def spelled(name: str, value: object, known: tuple[str, ...]) -> str:
    """``value``, which is one of ``known``; ``ValueError`` with the nearest one otherwise."""
    if value in known:
        return str(value)
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown {name} {value!r}{hint} (known: {', '.join(known)})")
