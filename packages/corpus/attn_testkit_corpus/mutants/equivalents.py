"""Mutants without a visible effect, which are listed in a file with reasons.

``ci/mutation`` loads this file by its path, so that it imports nothing of the kit.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .operators import Mutant


def read_equivalents(file: Path, mutants: Sequence[Mutant], skipped: Callable[[str], bool]) -> dict[str, str]:
    """Id of a mutant -> the reason why it is equivalent.

    An entry names ``path``, ``was`` and ``becomes`` (the lines, without indentation), ``reason``, and ``scope`` if the
    same lines occur in several functions. ``skipped`` is True for a path whose entries are ignored, because its module
    is not mutated this time.

    Raises ``ValueError`` for a file that cannot be read, and for an entry that lacks a field or matches no mutant,
    because its code is gone.
    """
    try:
        entries = tomllib.loads(file.read_text()).get("equivalent", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    found: dict[str, str] = {}
    for number, entry in enumerate(entries, start=1):
        if lacking := [key for key in ("path", "was", "becomes", "reason") if not str(entry.get(key, "")).strip()]:
            raise ValueError(f"{file}: entry {number} lacks {', '.join(lacking)}")
        if skipped(entry["path"]):
            continue
        same = [
            mutant.id
            for mutant in mutants
            if (mutant.path, mutant.was, mutant.becomes) == (entry["path"], entry["was"], entry["becomes"])
            and entry.get("scope", mutant.scope) == mutant.scope
        ]
        if not same:
            raise ValueError(
                f"{file}: entry {number} ({entry['path']}: {entry['becomes']}) matches no mutant; remove it"
            )
        found |= dict.fromkeys(same, entry["reason"])
    return found
