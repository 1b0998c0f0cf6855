"""A text file of failures that fuzzing found, retried first the next time. A line has backend, execution, case,
check."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..registry import UsageError
from ..reports.record import cannot_write

FILE = "failures.tsv"


@dataclass(frozen=True)
class Entry:
    """One failure."""

    backend: str
    execution: str
    case: str
    check: str
    """The first check that failed, or the status of the case-run."""


class Database:
    """The file in a folder. Raises ``UsageError`` if it cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = self.file.read_text("utf-8") if self.file.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"cannot use {folder} for failures: {why or error}") from error
        self._entries = [self._entry(number, line) for number, line in enumerate(text.splitlines(), 1) if line]
        self._write()

    def of(self, backend: str) -> list[Entry]:
        """Failures of a backend, oldest first."""
        return [entry for entry in self._entries if entry.backend == backend]

    def replace(self, old: Entry | None, new: Entry | None) -> None:
        """Replace ``old`` by ``new``; None for ``old`` adds, None for ``new`` removes."""
        if old in self._entries:
            self._entries.remove(old)
        if new is not None and new not in self._entries:
            self._entries.append(new)
        self._write()

    def _entry(self, number: int, line: str) -> Entry:
        parts = line.split("\t")
        if len(parts) != 4:
            raise UsageError(f"{self.file}, line {number}: expected backend, execution, case and check, tabs between")
        return Entry(*parts)

    def _write(self) -> None:
        # At once or not at all: whatever ends the process.
        new = self.file.with_suffix(".new")
        try:
            new.write_text(
                "".join(f"{e.backend}\t{e.execution}\t{e.case}\t{e.check}\n" for e in self._entries), "utf-8"
            )
            os.replace(new, self.file)
        except OSError as error:
            raise cannot_write(self.file, error) from error
