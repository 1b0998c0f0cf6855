"""The glossary: one entry per word of ids, texts and tables.

This module imports neither torch nor the rest of the kit: the command line prints entries before either is loaded.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

_NUMBERS = re.compile(r"\d+(?:[.x]\d+)*")
"""A number, or a list of them as case ids write it: ``0.15x2.32`` is one."""


@dataclass(frozen=True)
class Entry:
    """The meaning of one word."""

    word: str
    """The standard word, or the word of a case id with an example of its number."""
    text: str
    """The meaning, in two sentences at most."""
    group: str
    """Heading of the entry on the page."""
    also: tuple[str, ...] = ()
    """Other words of the same meaning, the kit's present one among them."""
    page: str = ""
    """The page that says more, relative to ``docs/``."""
    numbers: bool = False
    """True if the numbers in the word are examples: the entry is found with any others."""


@lru_cache(maxsize=1)
def all_entries() -> tuple[Entry, ...]:
    """The entries, in the order of ``glossary.toml``."""
    found: list[Entry] = []
    for group in tomllib.loads(files(__package__).joinpath("glossary.toml").read_text("utf-8"))["group"]:
        for word, value in group["words"].items():
            values = {"text": value} if isinstance(value, str) else dict(value)
            also = tuple(values.pop("also", ()))
            found.append(Entry(word, group=group["title"], also=also, **{"page": group["page"], **values}))
    return tuple(found)


def entry_of(word: str) -> Entry | None:
    """The entry of a word, or None. Letter case, hyphens, underscores and spaces do not matter, nor the numbers in a
    word of a case id.
    """
    exact, with_numbers = _by_key()
    key = _key(word)
    return exact.get(key) or with_numbers.get(_NUMBERS.sub("0", key))


def _key(word: str) -> str:
    return re.sub(r"[\s_-]+", " ", word.strip().lower())


@lru_cache(maxsize=1)
def _by_key() -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Entries by each of their words, and by the words that have any number."""
    exact: dict[str, Entry] = {}
    with_numbers: dict[str, Entry] = {}
    for entry in all_entries():
        keys = [(exact, _key(word)) for word in (entry.word, *entry.also)]
        keys += [(with_numbers, _NUMBERS.sub("0", _key(entry.word)))] if entry.numbers else []
        for found, key in keys:
            other = found.setdefault(key, entry)
            if other is not entry:
                raise ValueError(f"glossary.toml has {key!r} twice, as {other.word!r} and as {entry.word!r}; keep one")
    return exact, with_numbers
