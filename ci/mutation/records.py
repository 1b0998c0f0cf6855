"""What is kept of a run: the journal of verdicts, and the list of survivors that mean the same as what they mutate."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .config import ConfigError
from .judge import Verdict
from .operators import Mutant

__all__ = ["Journal", "read_equivalent"]


class Journal:
    """Verdicts, one a line, written as they come. Those of another state of the tree stay in the file and are not read.

    Args:
        file: made when it is not there.
        tree: the fingerprint of this state.
    """

    def __init__(self, file: Path, tree: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._tree = tree
        self.verdicts: dict[str, Verdict] = {}
        """Id of a mutant -> what became of it."""
        self.stages: dict[str, float] = {}
        """Stages that pass without a mutant -> seconds."""
        self._killers: dict[str, Counter[str]] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a run that was killed
            if row.get("tree") != tree:
                continue
            if "stage" in row:
                self.stages[row["stage"]] = row["seconds"]
            else:
                self._keep(row["mutant"], row["path"], Verdict(row["status"], row["by"], row["seconds"]))
        self._file = file.open("a")

    def passed(self, stage: str, seconds: float) -> None:
        """Note a stage that passes without a mutant."""
        self.stages[stage] = seconds
        self._write({"stage": stage, "seconds": round(seconds, 2)})

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        """Note a verdict."""
        self._keep(mutant.id, mutant.path, verdict)
        row = {"mutant": mutant.id, "path": mutant.path, "line": mutant.line, "status": verdict.status}
        self._write(row | {"by": verdict.by, "seconds": round(verdict.seconds, 2)})

    def killers(self, path: str) -> list[str]:
        """Tests that killed mutants of this file, the deadliest first."""
        return [name for name, _ in self._killers.get(path, Counter()).most_common()]

    def _keep(self, mutant: str, path: str, verdict: Verdict) -> None:
        self.verdicts[mutant] = verdict
        if verdict.status == "killed":
            self._killers.setdefault(path, Counter())[verdict.by] += 1

    def _write(self, row: dict[str, object]) -> None:
        self._file.write(json.dumps({"tree": self._tree, **row}) + "\n")
        self._file.flush()


def read_equivalent(
    file: Path, mutants: Sequence[Mutant], read: Sequence[str], known: Sequence[str] = ()
) -> dict[str, str]:
    """Id of a mutant that changes nothing -> the reason.

    An entry names ``path``, ``was`` and ``becomes`` (the lines, without indentation), ``reason``, and ``scope`` where
    the same lines stand in several functions.

    Args:
        file: TOML with a list ``equivalent``.
        mutants: those of the files in ``read``.
        read: the files that this run mutates.
        known: files that other runs mutate: their entries are not looked at.

    Raises:
        ConfigError: an entry lacks a field, or matches no mutant, so the code it spoke of is gone.
    """
    try:
        entries = tomllib.loads(file.read_text()).get("equivalent", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    found: dict[str, str] = {}
    for number, entry in enumerate(entries, start=1):
        if lacking := [key for key in ("path", "was", "becomes", "reason") if not str(entry.get(key, "")).strip()]:
            raise ConfigError(f"{file.name}: entry {number} lacks {', '.join(lacking)}")
        if entry["path"] in known and entry["path"] not in read:
            continue
        same = [
            mutant.id
            for mutant in mutants
            if (mutant.path, mutant.was, mutant.becomes) == (entry["path"], entry["was"], entry["becomes"])
            and entry.get("scope", mutant.scope) == mutant.scope
        ]
        if not same:
            raise ConfigError(f"{file.name}: entry {number} ({entry['path']}: {entry['becomes']}) matches no mutant")
        found |= dict.fromkeys(same, entry["reason"])
    return found
