"""Titles of the stored verdicts, for ``attn-testkit --version``: read without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_VERDICTS = Path(__file__).parent


@dataclass(frozen=True)
class Calibration:
    """One file of verdicts: a real GPU's answers to the same programs that the emulation runs."""

    device: str
    torch: str
    triton: str
    answers: int

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, triton {self.triton}: {self.answers} answers"


def calibrations(folder: Path = _VERDICTS) -> list[Calibration]:
    """Every calibration that comes with the package, the newest torch first."""
    found = []
    for path in sorted(folder.glob("verdicts_*.json"), reverse=True):
        data = json.loads(path.read_text("utf-8"))
        answers = sum(len(section) for section in data["verdicts"].values())
        found.append(Calibration(data["device"], data["torch"], data["triton"], answers))
    return found


def version_lines() -> list[str]:
    """Lines of ``attn-testkit --version``."""
    return [f"emulated CUDA is compared with {each}" for each in calibrations()]
