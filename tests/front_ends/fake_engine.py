"""A stand-in for the engine, without torch: ``fake:ok,wrong,segfault`` is a backend with one case for each word.

A word says how its case-run ends. Loaded in child processes too, under this name.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from attn_testkit.registry import BackendNotFound
from attn_testkit.registry import UsageError as RegistryUsageError
from attn_testkit.results import CaseResult, Finding, RunHeader, Status


class UsageError(Exception):
    pass


class Mode(Enum):
    DECODE = "decode"
    TARGET_VERIFY = "target-verify"


class Execution(Enum):
    EAGER = "eager"
    GRAPH = "graph"


@dataclass(frozen=True)
class Case:
    id: str


@dataclass(frozen=True)
class WorkItem:
    backend: str
    mode: Mode
    execution: Execution
    case: Case


@dataclass(frozen=True)
class RunPlan:
    header: RunHeader
    items: tuple[WorkItem, ...]
    given: tuple[CaseResult, ...]


def plan_run(
    *,
    backends: Sequence[str],
    modes: Sequence[str] = (),
    executions: Sequence[str] = (),
    tier: str = "smoke",
    device: str = "auto",
    seed: int = 0,
    cases: Sequence[str] = (),
) -> RunPlan:
    items: list[WorkItem] = []
    for spec in backends:
        if not spec.startswith("fake:"):
            raise BackendNotFound(f"unknown backend {spec!r}; did you mean 'fake:ok'?")
        words = [w for w in spec[5:].split(",") if w]
        words += ["full"] if tier == "full" else []
        for mode in Mode:
            for execution in Execution:
                for number, word in enumerate(words):
                    case = Case(f"{mode.value}-{word}-k{number}")
                    wanted = not cases or any(fnmatch.fnmatchcase(case.id, glob) for glob in cases)
                    if (
                        mode.value in (modes or [mode.value])
                        and wanted
                        and execution.value in (executions or "eagergraph")
                    ):
                        items.append(WorkItem(spec, mode, execution, case))
    if cases and not items:
        raise UsageError(f"no case matches {cases[0]!r}")
    given = (
        CaseResult(backends[0], "draft-extend", "graph", "", Status.UNSUPPORTED),
        CaseResult(backends[0], "draft-extend-v2", "graph", "", Status.NOT_RUN_HERE, reason="needs sm100"),
    )
    header = RunHeader(
        kit="0.1.0",
        started="2026-11-21T04:00:00+00:00",
        command="attn-testkit run",
        tier=tier,
        seed=seed,
        device="emulated",
        device_name="CPU (emulated CUDA)",
        versions={"python": "3.11", "torch": "2.13.0"},
        backends=dict.fromkeys(backends, "1.0"),
        planned=len(items),
        limits=("timing is not emulated",),
    )
    return RunPlan(header, tuple(items), given)


def run_item(item: WorkItem, plan: RunPlan) -> CaseResult:
    word = item.case.id[len(item.mode.value) + 1 :].rpartition("-")[0]
    return ENDINGS[word](item)


def result(item: WorkItem, status: Status = Status.PASSED, **more: object) -> CaseResult:
    values: dict[str, object] = {"margin": 0.4, "checks": ("matches-oracle", "finite"), **more}
    return CaseResult(
        item.backend,
        item.mode.value,
        item.execution.value,
        item.case.id,
        status,
        seconds={"eager": 0.25, "checks": 0.25},
        device="emulated",
        graph="emulated" if item.execution is Execution.GRAPH else "",
        **values,  # type: ignore[arg-type]
    )


def finding(check: str = "matches-oracle") -> Finding:
    return Finding(
        check,
        "request 3 differs from the oracle, 56x over the limit",
        where="out[request 3, head 5, dim 17] = 0.4121, want 0.1870",
        spread="request 3 wrong in 33 of 1024 values",
        hint="only requests with a partly filled last page differ",
        step="replay 4 of 6",
    )


def _wrong(item: WorkItem) -> CaseResult:
    return result(item, Status.FAILED, findings=(finding(),), margin=56.0)


def _segfault(item: WorkItem) -> CaseResult:
    print("about to read a freed page", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def _exit(item: WorkItem) -> CaseResult:
    os._exit(7)


def _hang(item: WorkItem) -> CaseResult:
    time.sleep(600)
    raise AssertionError


def _lost(item: WorkItem) -> CaseResult:
    return result(item, Status.CRASHED, reason="CUDA error: an illegal memory access was encountered", margin=None)


def _asserts(item: WorkItem) -> CaseResult:
    print("kernel.cu:12: Assertion `slot < size` failed.", file=sys.stderr, flush=True)
    return result(item, Status.CRASHED, reason="CUDA error: device-side assert triggered", margin=None)


def _latecrash(item: WorkItem) -> CaseResult:
    """Passes, and its process dies right after the result has gone out."""
    threading.Timer(0.05, os._exit, [9]).start()
    return result(item)


def _bug(item: WorkItem) -> CaseResult:
    raise ZeroDivisionError("a bug of the kit")


def _quit(item: WorkItem) -> CaseResult:
    sys.exit(0)


def _pid(item: WorkItem) -> CaseResult:
    return result(item, hints=(f"pid {os.getpid()}",))


def _gpu(item: WorkItem) -> CaseResult:
    time.sleep(0.05)
    return result(item, hints=(f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES', '')}",))


def _noisy(item: WorkItem) -> CaseResult:
    print("noise on stdout")
    return result(item)


ENDINGS = {
    "ok": result,
    "full": result,
    "wrong": _wrong,
    "segfault": _segfault,
    "exit": _exit,
    "hang": _hang,
    "lost": _lost,
    "asserts": _asserts,
    "latecrash": _latecrash,
    "bug": _bug,
    "quit": _quit,
    "pid": _pid,
    "gpu": _gpu,
    "noisy": _noisy,
    "inf": lambda item: result(item, Status.FAILED, findings=(finding("finite"),), margin=float("inf")),
}


def run(plan: RunPlan) -> Iterator[CaseResult]:
    for item in plan.items:
        yield run_item(item, plan)


assert RegistryUsageError is not UsageError
