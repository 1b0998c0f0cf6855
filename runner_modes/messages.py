"""Messages between the judge's process and the one that runs a backend: frozen, plain, picklable.

The worker gets inputs and returns host copies. It never holds an expected value, and the judge never holds a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attn_testkit.checks.lossless import GeneratedTokens
from attn_testkit.checks.observation import Copies, RanBefore
from attn_testkit.contract import Capabilities, Execution
from attn_testkit.results.finding import Finding
from attn_testkit.steps.schedule import Schedule, Step

from .options import RunOptions


@dataclass(frozen=True)
class Described:
    """Results of importing a backend in a worker."""

    declared: Capabilities
    changed: tuple[str, ...] = ()
    """Changes in the process that importing it caused."""
    broken_packages: tuple[tuple[str, str], ...] = ()
    """Requirement and reason of packages that are installed and cannot be imported."""
    notes: tuple[str, ...] = ()
    """Remarks for the header of a run: remarks of the backend, and changes in the process by importing a server."""
    source: Mapping[str, str] = field(default_factory=dict)
    """``file`` and ``sha256`` of the backend's module, and its Triton ``kernels``; empty without a file."""


@dataclass(frozen=True)
class RunCase:
    """Request to run a case, as a server would."""

    case: str
    """Id of the case."""
    execution: Execution


@dataclass(frozen=True)
class Rerun:
    """Request to run something again with one thing changed, on a fresh instance, for diagnosis."""

    schedule: Schedule
    step: Step | None = None
    """The step to run eagerly; None to capture and replay the whole schedule."""
    options: RunOptions = field(default_factory=RunOptions)
    unowned: float | None = None
    """Contents of unowned slots of the KV pool; None means NaN."""
    fill: int = 0xFF
    """Byte of uninitialized memory."""


@dataclass(frozen=True)
class StepRecord:
    """Place of a step in its run, and host copies of its results."""

    schedule: int
    """Index of its schedule in the run: 0, or more in a multi-mode instance."""
    step: str
    """Name of the step in its schedule."""
    copies: Copies
    label: str
    ran_before: RanBefore = ""
    damaged: tuple[str, ...] = ()
    replay: bool = False
    padded: int = 0
    eager_run: int | None = None
    """Index of the record of the eager run of the same step."""


@dataclass(frozen=True)
class RunRecord:
    """Results of a run. The judge compares them with the expected steps: a missing step is a failure."""

    records: tuple[StepRecord, ...] = ()
    """Records in the order in which their messages should come."""
    findings: tuple[Finding, ...] = ()
    """Exceptions, and undeclared contexts that the constructor accepted."""
    stage: int = 0
    """The stage that was reached, a ``checks.Stage``."""
    not_here: str = ""
    """The reason why the case cannot run on this machine; empty if it can."""
    lost: str = ""
    """The reason why the device context is lost; empty if it is not."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    kernels: str = "real"
    fill: int = 1
    """Value of ``seq_lens`` for padded requests."""
    not_finite_in_warm_up: tuple[int, ...] = ()
    """Indices of schedules with NaN or Inf in the logits of a warm-up."""
    uneven_warm_ups: tuple[str, ...] = ()
    """Places in which a warm-up gave different bits from the first of the same plan."""
    written_at_capture: tuple[int, ...] = ()
    """Slots outside page 0 that warm-ups and captures wrote."""
    allocated_in_capture: tuple[tuple[str, str], ...] = ()
    """Attribute path and bucket of memory that the backend first held while a graph was captured."""
    replaced: tuple[str, ...] = ()
    """Attributes whose tensors a plan for a replay replaced."""
    restored: tuple[str, ...] = ()
    """Attributes whose tensors a replay changed, and that were restored before the next one."""
    changed: tuple[str, ...] = ()
    """Changes in its process that the backend did not undo."""
    notes: tuple[str, ...] = ()
    """Changes in the process by importing a part of a server at its first use."""
    launches: int | None = None
    """Launches of kernels that are not torch's; None if they could not be counted."""
    grids: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Kernel and grid of each kind of emulated Triton launch. Empty unless diagnosis asked for the run."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Facts of device memory, as in ``CaseResult.memory``."""
    generated: GeneratedTokens | None = None
    """Tokens of a greedy-equivalence loop, if the case has one."""
