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

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuse a misspelt field, also in a record within this one."""
        for name in (name for name in given if name not in cls.__dataclass_fields__):
            spelled("capability", name, tuple(cls._names()))
        return super().__new__(cls)

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
            values[name] = inner.made_of(value) if isinstance(inner, Declared) else value
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
