"""The glossary: one entry per word of texts and tables. Features explain words of case ids (``cases/explained.py``).

This module imports neither torch nor the rest of the kit: the command line prints entries before either is loaded.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files


@dataclass(frozen=True)
class Entry:
    """The meaning of one word."""

    word: str
    """The standard word, or the word of a case id with an example of its number."""
    text: str
    """The meaning, in two sentences at most."""
    also: tuple[str, ...] = ()
    """Other words of the same meaning, including the kit's word."""
    page: str = "reference/case-ids.md"
    """The page with more information, relative to ``docs/``."""
    numbers: bool = False
    """True if the numbers in the word are examples: the entry is also found with other numbers."""
    group: str = "Words of a case id"
    """Heading of the entry on the page."""


@lru_cache(maxsize=1)
def general_entries() -> tuple[Entry, ...]:
    """The entries of ``glossary.toml``, in its order."""
    found: list[Entry] = []
    for group in tomllib.loads(files(__package__).joinpath("glossary.toml").read_text("utf-8"))["group"]:
        for word, value in group["words"].items():
            values = {"text": value} if isinstance(value, str) else dict(value)
            also = tuple(values.pop("also", ()))
            found.append(Entry(word, also=also, **{"page": group["page"], "group": group["title"], **values}))
    return tuple(found)
