"""The result of one case-run: plain values that can be pickled and written as JSON, without tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .finding import MOST_CHARACTERS, Finding
from .names import KIT_ERROR, NO_ROOM, NOT_COMPILED, NOT_STARTED
from .texts import readable


class Status(StrEnum):
    """Ending of one case-run. Each status has its own meaning for the reader, so they are never merged."""

    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    """The process died, or the device's context was lost."""
    TIMED_OUT = "timed out"
    KNOWN_FAILURE = "known failure"
    """The case-run failed as an entry of the known-failures file describes."""
    UNEXPECTEDLY_PASSED = "unexpectedly passed"
    """The known-failures file expects a failure, and there was none: the entry is out of date."""
    QUARANTINED = "quarantined"
    """The known-failures file forbids launching the case-run. It counts as accounted for, not as passed."""
    UNSUPPORTED = "unsupported"
    """The backend does not declare it."""
    NOT_RUN_HERE = "not run here"
    """The backend declares the case-run, but this machine lacks the hardware or a package."""


BAD = frozenset({Status.FAILED, Status.CRASHED, Status.TIMED_OUT, Status.UNEXPECTEDLY_PASSED})
"""Statuses that make a run fail."""

RAN = frozenset({Status.PASSED, Status.KNOWN_FAILURE}) | BAD
"""Statuses of case-runs that really executed."""


RunKey = tuple[str, str, str]
"""Backend, execution and case: they name a case-run."""


@dataclass(frozen=True)
class CaseResult:
    """One case-run: a backend, a mode, an execution and a case."""

    backend: str
    """The spec that named it."""
    mode: str
    execution: str
    case: str
    """The case id, or ``""`` for the row of a whole mode (unsupported, not run here)."""
    status: Status
    findings: tuple[Finding, ...] = ()
    checks: tuple[str, ...] = ()
    """Ids of the checks that were evaluated, passed or failed, in reading order."""
    not_evaluated: tuple[str, ...] = ()
    """Ids of checks that apply but could not be evaluated, because the case-run ended earlier, or because they depend
    on wrong attention outputs."""
    margin: float | None = None
    """Largest error / limit over all outputs; a passing case is at most 1."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by phase: setup, eager, capture, replay, oracle, checks."""
    graph: str = ""
    """One of ``cuda`` and ``emulated``; empty in eager."""
    device: str = ""
    """One of ``cuda`` and ``emulated`` (a CPU that emulates a device)."""
    kernels: str = "real"
    """One of ``real``, ``stores`` and ``emulated``: see ``AttentionBackend.kernels``. Also ``not compiled``: regions
    that torch.compile would have compiled ran eagerly."""
    launches: int | None = None
    """Number of launches of kernels that do not belong to torch: Triton's, and operators of other packages. 0: only
    torch ran. None: not counted."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Device memory of the instance, in bytes: ``persistent``, kept by constructor and steps before captures;
    ``graphs``, kept by captures; ``peak``, the most that the first plan and forward (or the captures) allocated at a
    time; ``growth``, allocated by every repeat of a step. ``plan_allocations`` is the largest number of allocations in
    a plan for a replay. Empty: not counted."""
    reason: str = ""
    """The reason why the case-run did not run or crashed, or the issue of a known failure."""
    after: tuple[str, ...] = ()
    """Case-runs, as ``eager:CASE`` or ``graph:CASE``, that must run before it in the same process for this result."""
    hints: tuple[str, ...] = ()
    """Remarks that are not failures, such as graph support that works but is not declared."""
    like: str = ""
    """The earlier failure, as ``eager:CASE`` or ``graph:CASE``, with which this one is assumed to share its cause. If
    only the earlier one was diagnosed, a wrong number here has the earlier one's check."""
    diagnosed: bool = False
    """True if the cause of a failure was searched for."""
    failed_mode: str = ""
    """The mode of the step that failed first, if it differs from ``mode`` on an instance that runs several modes.
    Tables count the failure in that mode."""
    printed: str = ""
    """Output that the backend printed in this case-run, stdout and stderr; only the end of a long output."""
    repeated: str = ""
    """The end of a process of the kit, in words, that left an earlier attempt without a result; with ``IN_MPS`` before
    it, that of a process which shared its GPU. Empty for none."""
    node: str = ""
    """The machine of a cluster that ran the case-run; empty without a cluster."""
    gpu: str = ""
    """The GPU of that machine; empty without a cluster, or if the device is emulated."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", readable(self.reason, MOST_CHARACTERS["reason"]))
        object.__setattr__(self, "hints", tuple(map(readable, self.hints)))
        object.__setattr__(self, "printed", readable(self.printed))

    @property
    def key(self) -> RunKey:
        """Backend, execution and case."""
        return self.backend, self.execution, self.case

    @property
    def emulated(self) -> bool:
        """True if something in this case-run was emulated, so that it proves nothing about hardware."""
        return bool(emulated_parts(self))

    @property
    def place(self) -> tuple[str, str, str]:
        """Backend, mode and execution under which tables count the case-run."""
        return self.backend, self.failed_mode or self.mode, self.execution

    @property
    def is_case_run(self) -> bool:
        """True for a case that is declared, false for the row of a whole mode."""
        return bool(self.case) and self.status is not Status.UNSUPPORTED

    @property
    def left_out(self) -> bool:
        """True if the budget of the run left no time for it."""
        return self.status is Status.NOT_RUN_HERE and self.reason.startswith(NOT_STARTED)

    @property
    def had_no_room(self) -> bool:
        """True if the machine lacks the memory that the case-run needs, so there is no result."""
        return self.status is Status.NOT_RUN_HERE and self.reason.startswith(NO_ROOM)

    @property
    def of_the_kit(self) -> bool:
        """True if the kit itself failed, so the result proves nothing about the backend."""
        return self.reason.startswith(KIT_ERROR)


def failed_check(result: CaseResult) -> str:
    """The first check that failed, or the status: failures with the same value are assumed to have one cause."""
    return result.findings[0].check if result.findings else result.status.value


def emulated_parts(result: CaseResult) -> list[str]:
    """The emulated ones of device, graph and kernels; ``stores`` if torch stored new keys and values, and ``compiled
    regions`` if these ran eagerly.
    """
    parts = (("device", result.device), ("graph", result.graph), ("kernels", result.kernels))
    emulated = [name for name, how in parts if how == "emulated"]
    part = _EMULATED_PART.get(result.kernels)
    return [*emulated, part] if part else emulated


_EMULATED_PART = {"stores": "stores", NOT_COMPILED: "compiled regions"}
"""Value of ``CaseResult.kernels`` if only a part is emulated -> that part."""


UNDECLARED_GRAPH = "{backend}: {mode} captures and replays correctly under a graph, but is not declared"
"""Remark on a mode. It comes from one case of the mode, so ``remarks_of`` drops it if another case failed."""


def remarks_of(results: Iterable[CaseResult]) -> Counter[str]:
    """Count the ``hints`` of all results, except remarks that praise a mode in which a case-run failed."""
    results = list(results)
    failed = {
        UNDECLARED_GRAPH.format(backend=result.backend, mode=mode)
        for result in results
        if result.status in BAD or result.status is Status.KNOWN_FAILURE
        for mode in (result.mode, result.place[1])
    }
    return Counter(hint for result in results for hint in result.hints if hint not in failed)
