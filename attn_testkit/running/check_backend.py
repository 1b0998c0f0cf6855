"""The front end for Python: a script, a notebook, somebody's own test."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..results import Results
from .candidate import candidate_for
from .judge_process import judge_for
from .request import Options, Request, prepare

if TYPE_CHECKING:
    from ..contract import AttentionBackend

__all__ = ["check_backend"]


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
) -> Results:
    """Check a backend: ``print(check_backend(MyBackend))``. What comes back is a list of results.

    ``backend``: a spec, or the class itself. A class that no import gives (of a notebook, a local one) travels by value
    to the process that runs it. ``modes``, ``executions``, ``cases``: as on the command line; empty means all.
    ``timeout_s``: seconds for one case-run. ``in_process``: run the backend in this process, for a debugger; what it
    says is then no gate, because the backend could change what judges it.

    Raises ``UsageError`` for a request that makes no sense, for a backend that cannot be imported, and for a class that
    cannot be taken to another process as it is here.
    """
    options = Options(jobs=jobs, timeout_s=timeout_s, in_process=in_process)
    request = Request(
        backends=(candidate_for(backend, in_process=in_process),),
        modes=tuple(modes),
        executions=tuple(executions),
        tier=tier,
        device=device,
        seed=seed,
        cases=tuple(cases),
        command="check_backend",
    )
    with contextlib.closing(judge_for(options, device)) as judge:
        prepared = prepare(judge, request)
        results = Results([*prepared.preset, *judge.run(prepared.plan, prepared.items)])
    results.untried = prepared.plan.header.untried
    return results
