"""``--version``: the kit's version, and the devices that the emulation is compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import attn_testkit

_VERDICTS = Path(__file__).parents[1] / "calibrate"


@dataclass(frozen=True)
class Calibration:
    """One file of verdicts: a real GPU's answers to the questions that the emulation answers too."""

    device: str
    torch: str
    triton: str
    answers: int

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, triton {self.triton}: {self.answers} answers"


def calibrations(folder: Path = _VERDICTS) -> list[Calibration]:
    """Every calibration that comes with the kit, the newest torch first. Read without torch."""
    found = []
    for path in sorted(folder.glob("verdicts_*.json"), reverse=True):
        data = json.loads(path.read_text("utf-8"))
        answers = sum(len(section) for section in data["verdicts"].values())
        found.append(Calibration(data["device"], data["torch"], data["triton"], answers))
    return found


def version_text() -> str:
    """The text that ``attn-testkit --version`` prints."""
    lines = [f"attn-testkit, version {attn_testkit.__version__}"]
    lines += [f"emulated CUDA is compared with {each}" for each in calibrations()]
    return "\n".join(lines)
