"""A fake of the judge, without torch: ``fake:ok,wrong,hang`` is a backend with one case for each word.

A word says how its case-run ends. Front ends load it, under this name, in the process that judges.
"""

from __future__ import annotations

import datetime
import fnmatch
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from attn_testkit.registry import BackendNotFound, UsageError
from attn_testkit.reports.record import Record
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.results.run_header import RunHeader
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.request import (
    Item,
    Options,
    Plan,
    Request,
    bare_result,
    kit_error,
    selection_of,
    unloadable,
)

MODES = ("decode", "target-verify")
EXECUTIONS = ("eager", "graph")


def known(cases: str, check: str = "matches-oracle", kind: str = "tolerated", **more: str) -> str:
    """An entry of a file of known failures that holds for a month from now."""
    fields = {"cases": cases, "kind": kind, "issue": ISSUE, **({"check": check} if kind == "tolerated" else {}), **more}
    until = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)
    return "[[known]]\n" + "".join(f"{key} = {value!r}\n" for key, value in fields.items()) + f"until = {until}\n"


def crash_record(path: Path, spec: str, cases: str, status: Status = Status.CRASHED) -> None:
    """Write a results file in which the cases of a backend ended so: what a quarantine has to show."""
    plan = plan_run(backends=[spec])
    items = [item for item in plan.items if fnmatch.fnmatchcase(item.case, cases)]
    record = Record(path, replace(plan.header, planned=len(items)))
    for item in items:
        record.add(result(item, status, margin=None, findings=(finding(),) if status is Status.FAILED else ()))
    record.finish(1)


ISSUE = "https://example.org/issues/12"


def plan_run(
    *,
    backends: Sequence[str],
    modes: Sequence[str] = (),
    executions: Sequence[str] = (),
    tier: str = "smoke",
    seed: int = 0,
    cases: Sequence[str] = (),
    command: str = "attn-testkit run",
    keep_unloadable: bool = False,
    cases_from: str = "",
    **_: object,
) -> Plan:
    items: list[Item] = []
    broken: list[CaseResult] = []
    whole: list[Item] = []
    for spec in backends:
        if not spec.startswith("fake:"):
            why = f"unknown backend {spec!r}; did you mean 'fake:ok'?"
            if not keep_unloadable:
                raise BackendNotFound(why)
            broken.append(unloadable(spec, why))
            continue
        words = [w for w in spec[5:].split(",") if w]
        words += ["full"] if tier == "full" else []
        whole += [
            Item(spec, mode, execution, f"{mode}-{word}-k{number}")
            for mode in MODES
            for execution in EXECUTIONS
            for number, word in enumerate(words)
        ]
    for item in whole:
        of_mode = item.mode in (modes or MODES) and item.execution in (executions or EXECUTIONS)
        if of_mode and (not cases or any(fnmatch.fnmatchcase(item.case, glob) for glob in cases)):
            items.append(item)
    if cases and not items:
        raise UsageError(f"no case matches {cases[0]!r}")
    asked = Request(tuple(backends), tuple(modes), tuple(executions), cases=tuple(cases), cases_from=cases_from)
    preset = (
        CaseResult(backends[0], "draft-extend", "graph", "", Status.UNSUPPORTED),
        CaseResult(backends[0], "draft-extend-v2", "graph", "", Status.NOT_RUN_HERE, reason="needs sm100"),
    )
    header = RunHeader(
        kit="0.1.0",
        started="2026-11-21T04:00:00+00:00",
        command=command,
        tier=tier,
        seed=seed,
        device="emulated",
        device_name="CPU (emulated CUDA)",
        versions={"python": "3.11", "torch": "2.13.0"},
        backends=dict.fromkeys(backends, "1.0"),
        planned=len(items) + len(broken),
        limits=("timing is not emulated",),
        selection=selection_of(asked, items, whole, len(broken)),
    )
    return Plan(header, tuple(items), (*preset, *broken))


class Runner:
    """What ``attn_testkit.running.case_runs.loop.Runner`` is for real."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.begun: Callable[[Item], None] = lambda item: None

    def plan(self, request: Request) -> Plan:
        return plan_run(**{**vars(request), "backends": [candidate.spec for candidate in request.candidates]})

    def run(self, plan: Plan, items: Sequence[Item]) -> Iterator[CaseResult]:
        for item in items:
            self.begun(item)
            yield replace(run_item(item, self.options), repeated=item.lost)

    def capabilities_lines(self, specs: Sequence[str], device: str) -> list[tuple[str, str]]:
        return [(f"capabilities of {spec}", "") for spec in specs]

    def device_name(self, device: str) -> str:
        return "CPU (emulated CUDA)"

    def declared(self, candidate: Candidate, device: str) -> object:
        return f"capabilities of {candidate.spec}"

    def close(self) -> None:
        pass


def run_item(item: Item, options: Options | None = None) -> CaseResult:
    word = item.case[len(item.mode) + 1 :].rpartition("-")[0]
    return ENDINGS[word](item)


def result(item: Item, status: Status = Status.PASSED, **more: object) -> CaseResult:
    values: dict[str, object] = {"margin": 0.4, "checks": ("matches-oracle", "finite"), **more}
    return CaseResult(
        item.backend,
        item.mode,
        item.execution,
        item.case,
        status,
        seconds={"eager": 0.25, "checks": 0.25},
        device="emulated",
        graph="emulated" if item.execution == "graph" else "",
        **values,  # type: ignore[arg-type]
    )


def finding(check: str = "matches-oracle") -> Finding:
    return Finding(
        check,
        "request 3 differs from the oracle, 56x over the limit",
        where="out[request 3, head 5, dim 17] = 0.4121, want 0.1870",
        spread="request 3 wrong in 33 of 1024 values",
        hint="only requests with a partly filled last page are wrong",
        step="replay 4 of 6",
    )


def _wrong(item: Item) -> CaseResult:
    return result(item, Status.FAILED, findings=(finding(),), margin=56.0)


def _segfault(item: Item) -> CaseResult:
    return bare_result(
        item, Status.CRASHED, "the process was killed by SIGSEGV\n  about to read a freed page", "emulated"
    )


def _exit(item: Item) -> CaseResult:
    return bare_result(item, Status.CRASHED, "the process ended itself with exit code 7", "emulated")


def _hang(item: Item) -> CaseResult:
    time.sleep(600)
    raise AssertionError


def _gated(item: Item) -> CaseResult:
    """In eager it passes; in graphs when the file ATTN_GATE is there."""
    end = time.monotonic() + 120
    while item.execution == "graph" and not os.path.exists(os.environ["ATTN_GATE"]):
        assert time.monotonic() < end
        time.sleep(0.05)
    return result(item, hints=(f"pid {os.getpid()}",))


def _late(item: Item) -> CaseResult:
    return bare_result(item, Status.TIMED_OUT, "no result after 1 s\n  in _hang", "emulated")


def _lost(item: Item) -> CaseResult:
    return result(item, Status.CRASHED, reason="CUDA error: an illegal memory access was encountered", margin=None)


def _not_run(item: Item) -> CaseResult:
    return bare_result(
        item, Status.NOT_RUN_HERE, "not run: the device's context was lost in decode-lost-k1", "emulated"
    )


def _bug(item: Item) -> CaseResult:
    return kit_error(item, "ZeroDivisionError: a bug of the kit")


def _dies(item: Item) -> CaseResult:
    print("the judge is out of memory", file=sys.stderr, flush=True)
    os._exit(9)


def _pid(item: Item) -> CaseResult:
    return result(item, hints=(f"pid {os.getpid()}",))


def _gpu(item: Item) -> CaseResult:
    time.sleep(0.05)
    return result(item, hints=(f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES', '')}",))


def _noisy(item: Item) -> CaseResult:
    print("noise on stdout")
    return result(item)


ENDINGS = {
    "ok": result,
    "full": result,
    "wrong": _wrong,
    "segfault": _segfault,
    "exit": _exit,
    "hang": _hang,
    "late": _late,
    "lost": _lost,
    "notrun": _not_run,
    "bug": _bug,
    "dies": _dies,
    "pid": _pid,
    "gpu": _gpu,
    "noisy": _noisy,
    "gated": _gated,
    "inf": lambda item: result(item, Status.FAILED, findings=(finding("finite"),), margin=float("inf")),
}
