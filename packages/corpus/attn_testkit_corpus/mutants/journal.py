"""Journal of a hunt, a line of JSON for each result: an interrupted hunt continues from it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attn_testkit.reports.record import cannot_write

from .reach import Lines

KILLED, TIMED_OUT, SURVIVED, UNREACHED = "killed", "timed out", "survived", "not reached"
CAPABILITIES, KIT, OPEN = "other capabilities", "the kit failed", "not settled"


@dataclass(frozen=True)
class Run:
    """A case-run of the unchanged backend."""

    name: str
    """``eager:CASE`` or ``graph:CASE``."""
    seconds: float
    lines: Lines


@dataclass(frozen=True)
class Verdict:
    """Result of a mutant."""

    status: str
    """``killed``, ``timed out``, ``survived``; ``not reached``: no case-run executes the changed code; ``other
    capabilities``: it declares different ones, so the same cases cannot test it; ``the kit failed``; ``not settled``:
    it survived some case-runs, but there are more."""
    by: str = ""
    """The check that was reported first, ``crashed`` or ``import``."""
    run: str = ""
    """The case-run that killed it."""
    runs: int = 0
    """Case-runs that were tried on it."""
    tried: str = ""
    """Digest of the case-runs that it survived; empty for other verdicts."""
    seconds: float = 0.0


class Journal:
    """Verdicts and case-runs. Lines about another state of the backend stay in the file and are not read.

    Raises ``UsageError`` if the file cannot be written.
    """

    def __init__(self, file: Path | None, state: str) -> None:
        self._state = state
        self.imported: Lines = {}
        self.runs: dict[str, Run] = {}
        self.verdicts: dict[str, Verdict] = {}
        self._file = None
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            for line in file.read_text().splitlines() if file.exists() else ():
                self._read(line)
            self._file = file.open("a")
        except OSError as error:
            raise cannot_write(file, error) from error

    def _read(self, line: str) -> None:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            return  # the last line of a run that was killed
        if not isinstance(row, dict) or row.get("state") != self._state:
            return
        if "imported" in row:
            self.imported = _lines(row["imported"])
        elif "lines" in row:
            self.runs[row["name"]] = Run(row["name"], row["seconds"], _lines(row["lines"]))
        else:
            known = {key: row[key] for key in Verdict.__dataclass_fields__}
            self.verdicts[row["mutant"]] = Verdict(**known)

    def import_ran(self, lines: Lines) -> None:
        """Note the lines that ran at the import."""
        self.imported = lines
        self._write({"imported": {module: sorted(found) for module, found in lines.items()}})

    def ran(self, run: Run) -> None:
        """Note a case-run of the unchanged backend."""
        self.runs[run.name] = run
        lines = {module: sorted(found) for module, found in run.lines.items()}
        self._write({"name": run.name, "seconds": round(run.seconds, 3), "lines": lines})

    def evaluated(self, mutant: str, verdict: Verdict, readable: dict[str, object]) -> None:
        """Note a verdict. ``readable``: facts about the mutant for people."""
        self.verdicts[mutant] = verdict
        self._write({"mutant": mutant, **readable, **asdict(verdict)})

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()

    def _write(self, row: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps({"state": self._state, **row}) + "\n")
            self._file.flush()


def _lines(plain: dict[str, Iterable[int]]) -> Lines:
    return {module: frozenset(found) for module, found in plain.items()}
