"""The words that readers meet: those of ``glossary.toml``, and the words of case ids, which features explain.

Features are imported only for a word that ``glossary.toml`` does not have: they import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..glossary import Entry, general_entries

_NUMBERS = re.compile(r"\d+(?:[.x]\d+)*")
"""A number, or a list of them as case ids write it: ``0.15x2.32`` is one."""


@lru_cache(maxsize=1)
def entries_of_ids() -> tuple[Entry, ...]:
    """Entries of the words of case ids, in their order; of a server variant its ``about``."""
    from .features.server.table import SERVER_VARIANTS
    from .features.table import FEATURES

    of_variants = (
        Entry(word, f"Server variant: {each.about}.", also=each.also, group="Server variants in a case id")
        for word, each in SERVER_VARIANTS.items()
    )
    return (*(entry for each in FEATURES for entry in each.explained), *of_variants)


def all_entries() -> tuple[Entry, ...]:
    """All entries: the general ones first."""
    return (*general_entries(), *entries_of_ids())


def entry_of(word: str) -> Entry | None:
    """The entry of a word, or None. Letter case, hyphens, underscores and spaces do not matter, nor the numbers in a
    word of a case id.
    """
    key = _key(word)
    return _by_key(general_entries()).get(key) or _of_ids(key)


def _of_ids(key: str) -> Entry | None:
    return _by_key(entries_of_ids()).get(key) or _with_numbers().get(_NUMBERS.sub("0", key))


@lru_cache(maxsize=1)
def _with_numbers() -> Mapping[str, Entry]:
    """Entries of words whose numbers are examples, by the word with 0 for each number."""
    return {_NUMBERS.sub("0", _key(entry.word)): entry for entry in entries_of_ids() if entry.numbers}


def _key(word: str) -> str:
    return re.sub(r"[\s_-]+", " ", word.strip().lower())


@lru_cache(maxsize=4)
def _by_key(entries: tuple[Entry, ...]) -> Mapping[str, Entry]:
    """Entries by each of their words. Raises ``ValueError`` for a word of two of them."""
    found: dict[str, Entry] = {}
    for key, entry in _words(entries):
        if found.setdefault(key, entry) is not entry:
            raise ValueError(
                f"the glossary has {key!r} twice, as {found[key].word!r} and as {entry.word!r}; keep one of them"
            )
    return found


def _words(entries: Iterable[Entry]) -> Iterable[tuple[str, Entry]]:
    return ((_key(word), entry) for entry in entries for word in (entry.word, *entry.also))
