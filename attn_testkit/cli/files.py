"""Writing the files that a command was asked for."""

from __future__ import annotations

from pathlib import Path

from ..reports.record import cannot_write

__all__ = ["write_text"]


def write_text(path: str, text: str) -> None:
    """Write a file. Raises ``UsageError`` with the reason in one line."""
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise cannot_write(Path(path), error) from error
