"""Bugs that attention backends of public servers really had, and what finds each: the reader of ``known_bugs.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

_HOST = "https://github.com/"
_THREAD = re.compile(r"(?P<project>.+) (?:#(?P<number>\d+)|(?P<commit>[0-9a-f]{8,40}))")


@dataclass(frozen=True)
class KnownBug:
    """One bug of the journal, and its verdict."""

    name: str
    bug_class: str
    """Key of ``CLASSES``."""
    threads: tuple[str, ...]
    """``project #number``, ``project commit``, or words for a bug without an address."""
    wrong: str = ""
    """The mistake of the code; empty if the first fault's docstring says it."""
    faults: tuple[str, ...] = ()
    """Slugs of broken backends that re-introduce it, the closest first."""
    outside: str = ""
    """Key of ``KnownBugs.outside``, for a bug that the kit cannot test."""
    why: str = ""
    """Explanation of ``outside`` for this bug."""


@dataclass(frozen=True)
class KnownBugs:
    """The journal."""

    bugs: tuple[KnownBug, ...]
    """Bugs by class, in the order of the file."""
    projects: Mapping[str, str]
    """Name in threads -> owner and repository."""
    outside: Mapping[str, str]
    """Reason why the kit cannot test a bug -> its text."""


def thread_address(thread: str, projects: Mapping[str, str]) -> str:
    """Address of a thread or a commit; empty for words.

    A number is that of an issue or of a pull request: the host redirects between them. Raises ``KeyError`` for
    a project that ``projects`` does not have.
    """
    found = _THREAD.fullmatch(thread)
    if found is None:
        return ""
    kind = f"issues/{found['number']}" if found["number"] else f"commit/{found['commit']}"
    return f"{_HOST}{projects[found['project']]}/{kind}"


@lru_cache(maxsize=1)
def all_known_bugs() -> KnownBugs:
    """The journal in the file."""
    data = tomllib.loads(files(__package__).joinpath("known_bugs.toml").read_text("utf-8"))
    projects, outside = data.pop("projects"), data.pop("outside")
    bugs = [_bug(letter, name, row) for letter in sorted(data) for name, row in data[letter].items()]
    return KnownBugs(tuple(bugs), projects, outside)


def _bug(letter: str, name: str, row: Mapping[str, Any]) -> KnownBug:
    lists = {key: tuple(row[key]) for key in ("threads", "faults") if key in row}
    return KnownBug(name, letter, **{**row, **lists})
