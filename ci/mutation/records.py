"""What is kept of a run: the journal of verdicts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from .judge import Verdict
from .operators import Mutant


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
