"""The front end for Python: a script, a notebook, somebody's own test."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..reports.outcome import NotConformant, Results
from .planning.candidate import candidate_for
from .planning.request import DIAGNOSE_SECONDS, Diagnose, Options, Request, prepare
from .processes.judge_process import judge_for

if TYPE_CHECKING:
    from ..contract import AttentionBackend


def check_backend(
    backend: str | type[AttentionBackend],
    *,
    tier: str = "smoke",
    device: str = "auto",
    modes: Sequence[str] = (),
    executions: Sequence[str] = (),
    seed: int = 0,
    cases: Sequence[str] = (),
    jobs: int = 1,
    timeout_s: float = 300.0,
    in_process: bool = False,
    known_failures: str | Path | None = None,
    diagnose: Diagnose = "first",
) -> Results:
    """Check a backend: ``print(check_backend(MyBackend))``. The result is true only if the backend conforms.

    ``backend``: a spec, or the class itself. A class that no import gives (of a notebook, a local one) travels by value
    to the process that runs it. ``modes``, ``executions``, ``cases``: as on the command line; empty means all.
    ``timeout_s``: seconds for one case-run. ``known_failures``: a TOML file of failures that are tolerated.
    ``diagnose``: look for the cause of the first failure of a kind, of ``all``, or of ``none``.
    ``in_process``: run the backend in this process, for a debugger. Do not gate on such a result: the backend could
    change the code that evaluates it.

    Raises ``UsageError`` for a request that makes no sense, for a backend that cannot be imported, and for a class that
    cannot be taken to another process as it is here; ``JudgeError`` if the judge's process died.
    """
    options = Options(
        jobs=jobs, timeout_s=timeout_s, in_process=in_process, diagnose=diagnose, diagnose_s=DIAGNOSE_SECONDS
    )
    request = Request(
        backends=(candidate_for(backend, in_process=in_process),),
        modes=tuple(modes),
        executions=tuple(executions),
        tier=tier,
        device=device,
        seed=seed,
        cases=tuple(cases),
        command="check_backend",
        counts_tier=True,
    )
    return run_request(request, options, known_failures)


def run_request(request: Request, options: Options, known_failures: str | Path | None = None) -> Results:
    """Run what is requested to its end. Raises as ``check_backend`` does."""
    with contextlib.closing(judge_for(options, request.device)) as judge:
        prepared = prepare(judge, request, known_failures)
        problems = tuple(prepared.problems())
        found = map(prepared.ledger.judge, judge.run(prepared.plan, prepared.items))
        return Results(prepared.plan.header, (*prepared.preset, *found), problems)


def assert_conformant(
    backend: str | type[AttentionBackend],
    *,
    tier: str = "smoke",
    device: str = "auto",
    modes: Sequence[str] = (),
    executions: Sequence[str] = (),
    seed: int = 0,
    cases: Sequence[str] = (),
    jobs: int = 1,
    timeout_s: float = 300.0,
    in_process: bool = False,
    known_failures: str | Path | None = None,
    diagnose: Diagnose = "first",
) -> Results:
    """Check a backend as ``check_backend`` does, and raise ``NotConformant`` unless it conforms.

    The message is what the command line prints: the verdict and the failures. ``NotConformant`` is an
    ``AssertionError``, and its ``results`` are the ``Results``. Raises besides what ``check_backend`` raises.
    """
    __tracebackhide__ = True
    results = check_backend(
        backend,
        tier=tier,
        device=device,
        modes=modes,
        executions=executions,
        seed=seed,
        cases=cases,
        jobs=jobs,
        timeout_s=timeout_s,
        in_process=in_process,
        known_failures=known_failures,
        diagnose=diagnose,
    )
    if not results:
        raise NotConformant(results)
    return results
