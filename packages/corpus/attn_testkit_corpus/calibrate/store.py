"""Verdict files: the answers of a real GPU, with its name and its version of torch, and their comparison with the
emulation."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .jobs import Job

HERE = Path(__file__).parent
FINE = frozenset({"ok", "pass", "silent", "no error"})


@dataclass(frozen=True)
class Verdicts:
    """Answers of one machine: the versions it ran and its verdict on every job."""

    torch: str
    device: str
    triton: str
    answers: Mapping[Job, str]

    @property
    def title(self) -> str:
        """Versions and device in one line."""
        return f"torch {self.torch}, {self.device}, triton {self.triton}"


def load(path: Path) -> Verdicts:
    """Read a verdict file. Raises KeyError for other JSON."""
    data = json.loads(path.read_text(encoding="utf-8"))
    answers = {Job(kind, name): text for kind, section in data["verdicts"].items() for name, text in section.items()}
    return Verdicts(data["torch"], data["device"], data["triton"], answers)


def stored() -> list[Path]:
    """The verdict files that ship with the package, the newest torch first."""
    return sorted(HERE.glob("verdicts_*.json"), reverse=True)


def save(path: Path, answers: Mapping[Job, str]) -> None:
    """Write a verdict file for the device of this process."""
    sections: dict[str, dict[str, str]] = defaultdict(dict)
    for job in sorted(answers):
        sections[job.kind][job.name] = answers[job]
    document: dict[str, Any] = {**_environment(), "verdicts": sections}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


def _environment() -> dict[str, str]:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "emulated"
    try:
        import triton

        version = str(triton.__version__)
    except ImportError:
        version = "none"
    return {"torch": torch.__version__, "device": device, "triton": version}


@dataclass(frozen=True)
class Difference:
    """One job on which the emulation and the GPU disagree."""

    job: Job
    gpu: str
    here: str

    def __str__(self) -> str:
        return f"{self.job.kind:15s} {self.job.name:36s} GPU: {self.gpu[:90]:90s} | here: {self.here[:110]}"


@dataclass
class Comparison:
    """`missed`: the GPU fails but the emulation does not. `false_alarms`: the emulation fails but the GPU does not.
    `other`: both fail, differently."""

    compared: int = 0
    gpu_fails: int = 0
    missed: list[Difference] = field(default_factory=list)
    false_alarms: list[Difference] = field(default_factory=list)
    other: list[Difference] = field(default_factory=list)
    unmeasured: list[Job] = field(default_factory=list)


def stage(verdict: str) -> str:
    """A verdict without its text: `ok`, `stale`, `capture error`, ..."""
    return verdict.split(":", 1)[0]


def compare(gpu: Verdicts, here: Mapping[Job, str], kinds: tuple[str, ...]) -> Comparison:
    """Differences between `here` and `gpu` on the jobs whose section is in `kinds`."""
    result = Comparison()
    for job, answer in here.items():
        if job.kind not in kinds:
            continue
        truth = gpu.answers.get(job)
        if truth is None:
            result.unmeasured.append(job)
            continue
        result.compared += 1
        result.gpu_fails += truth not in FINE
        difference = Difference(job, truth, answer)
        if (truth in FINE) == (answer in FINE):
            if stage(truth) != stage(answer):
                result.other.append(difference)
        elif answer in FINE:
            result.missed.append(difference)
        else:
            result.false_alarms.append(difference)
    return result
