"""Cases of the kit for a server's own backends, as calls: each drives the server's class as the server would."""

from __future__ import annotations

from collections.abc import Callable

from attn_testkit.runner_modes.messages import RunCase

from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract.modes import Execution, ForwardMode
from attn_testkit.running.case_runs.worker_main import LocalWorker
from attn_testkit.running.planning.candidate import Candidate

_SPREAD = 3


def cases_of(backends: tuple[str, ...]) -> list[tuple[str, Callable[[], None]]]:
    """Of every mode of every backend the first smoke cases that do not ask for long requests."""
    found: list[tuple[str, Callable[[], None]]] = []
    for name in backends:
        worker = LocalWorker(Candidate(name), "cpu")
        declared = worker.describe().declared
        for mode in ForwardMode:
            if mode not in declared.eager and mode not in declared.graph:
                continue
            cases = sorted(generate(declared, mode, "smoke"), key=lambda case: (sum(case.prefixes), case.id))
            for case in cases[:: max(1, len(cases) // _SPREAD)][:_SPREAD]:
                execution = Execution.EAGER if mode in declared.eager else Execution.GRAPH
                found.append((f"{name} {case.id}", _drive(worker, RunCase(case.id, execution))))
    return found


def _drive(worker: LocalWorker, request: RunCase) -> Callable[[], None]:
    def call() -> None:
        driven = worker.drive(request)
        if driven.findings:
            raise RuntimeError(driven.findings[0].message)

    return call
