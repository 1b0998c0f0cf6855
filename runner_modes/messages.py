"""What crosses the line between the process that judges and the one that runs a backend: frozen, plain, picklable.

The worker is handed inputs and returns host copies. It never holds an expected value, and the judge never holds a
backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attn_testkit.cases.schedule import Schedule, Step
from attn_testkit.checks.lossless import Spoken
from attn_testkit.checks.observation import Among, Copies
from attn_testkit.contract import Capabilities, Execution
from attn_testkit.results import Finding

from .options import DriveOptions

__all__ = ["Described", "DriveCase", "Driven", "Rerun", "StepRecord"]


@dataclass(frozen=True)
class Described:
    """What a worker found when it imported its backend."""

    claims: Capabilities
    changed: tuple[str, ...] = ()
    """What importing it changed in the process."""
    broken_packages: tuple[tuple[str, str], ...] = ()
    """(requirement of the claims, why not) of packages that are installed and cannot be imported."""
    notes: tuple[str, ...] = ()
    """What the header of a run says of it: its own notes, and what importing a server changed in the process."""


@dataclass(frozen=True)
class DriveCase:
    """Drive a case, as a server would."""

    case: str
    """Case id."""
    execution: Execution


@dataclass(frozen=True)
class Rerun:
    """Drive something again with one thing changed, on a fresh instance: a question of the diagnosis."""

    schedule: Schedule
    step: Step | None = None
    """The step to run eagerly; None: capture and replay the whole schedule."""
    options: DriveOptions = field(default_factory=DriveOptions)
    unowned: float | None = None
    """What unowned slots of the KV pool hold; None: NaN."""
    fill: int = 0xFF
    """Byte of memory that nobody wrote."""


@dataclass(frozen=True)
class StepRecord:
    """What a step was in its drive, and host copies of what it left behind."""

    schedule: int
    """Place of its schedule in the drive: 0, and more where modes are mixed."""
    step: str
    """Name of the step in its schedule."""
    copies: Copies
    label: str
    among: Among = ""
    damaged: tuple[str, ...] = ()
    replay: bool = False
    padded: int = 0
    eager_run: int | None = None
    """Which record of the drive is the eager run of the same step."""


@dataclass(frozen=True)
class Driven:
    """How a drive went. The judge holds it against what was due: a step that is missing is a failure."""

    records: tuple[StepRecord, ...] = ()
    """In the order in which their messages should come."""
    findings: tuple[Finding, ...] = ()
    """What was raised, and what the constructor accepted though it is not declared."""
    stage: int = 0
    """How far it came: a ``checks.Stage``."""
    not_here: str = ""
    """Why the case cannot be run on this machine; empty when it can."""
    lost: str = ""
    """Why the device context is gone; empty when it is not."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    kernels: str = "real"
    fill: int = 1
    """``seq_lens`` of padded requests."""
    not_finite_in_warm_up: tuple[int, ...] = ()
    """Places of schedules with NaN or Inf in the logits of a warm-up."""
    uneven_warm_ups: tuple[str, ...] = ()
    """Where a warm-up gave other bits than the first of the same plan."""
    written_at_capture: tuple[int, ...] = ()
    """Slots outside page 0 that warm-ups and captures wrote."""
    allocated_in_capture: tuple[tuple[str, str], ...] = ()
    """(attribute path, bucket) of what the backend first held while a graph was captured."""
    replaced: tuple[str, ...] = ()
    """Attributes whose tensors a plan for a replay replaced."""
    changed: tuple[str, ...] = ()
    """What the backend changed in its process and did not put back."""
    notes: tuple[str, ...] = ()
    """What importing a part of a server changed in the process, at its first use."""
    spoken: Spoken | None = None
    """What a lossless loop said, where one was due."""
