"""Cases of the kit for a server's own backends, as calls: each drives the server's class as the server would."""

from __future__ import annotations

from collections.abc import Callable

from attn_testkit.runner_modes.messages import DriveCase

from attn_testkit.cases.catalogue import generate
from attn_testkit.contract.modes import Execution, ForwardMode
from attn_testkit.running.case_runs.worker_main import LocalWorker
from attn_testkit.running.planning.candidate import Candidate

_SPREAD = 3


def cases_of(backends: tuple[str, ...]) -> list[tuple[str, Callable[[], None]]]:
    """Of every mode of every backend the first smoke cases that do not ask for long requests."""
    found: list[tuple[str, Callable[[], None]]] = []
    for name in backends:
        worker = LocalWorker(Candidate(name), "cpu")
        claims = worker.describe().claims
        for mode in ForwardMode:
            if mode not in claims.eager and mode not in claims.graph:
                continue
            cases = sorted(generate(claims, mode, "smoke"), key=lambda case: (sum(case.prefixes), case.id))
            for case in cases[:: max(1, len(cases) // _SPREAD)][:_SPREAD]:
                execution = Execution.EAGER if mode in claims.eager else Execution.GRAPH
                found.append((f"{name} {case.id}", _drive(worker, DriveCase(case.id, execution))))
    return found


def _drive(worker: LocalWorker, request: DriveCase) -> Callable[[], None]:
    def call() -> None:
        driven = worker.drive(request)
        if driven.findings:
            raise RuntimeError(driven.findings[0].message)

    return call
