"""The front end for Python: scripts, notebooks and other test suites."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Unpack

from ..reports.outcome import NotConformant, Results
from .planning.candidate import candidate_for
from .planning.request import CheckArguments, Options, Request, asked, prepare, with_options
from .processes.judge_process import judge_for

if TYPE_CHECKING:
    from ..contract import AttentionBackend


@with_options("check_backend")
def check_backend(backend: str | type[AttentionBackend], **arguments: Unpack[CheckArguments]) -> Results:
    """Check a backend: ``print(check_backend(MyBackend))``. The result is true only if the backend conforms.

    ``backend``: a spec, or the class itself. A class that cannot be imported (one in a notebook, or a local class) is
    sent by value to the process that runs it. The other arguments are the options of the command line; empty means all.
    ``in_process``: do not gate on such a result, because the backend could change the code that evaluates it.

    Raises ``UsageError`` for a request that makes no sense, for a backend that cannot be imported, and for a class that
    cannot be sent to another process; ``JudgeError`` if the judge's process died.
    """
    candidate = candidate_for(backend, in_process=arguments.get("in_process", False))
    return run_request(*asked("check_backend", (candidate,), arguments, command="check_backend", counts_tier=True))


def run_request(request: Request, options: Options) -> Results:
    """Run what is requested to its end. Raises as ``check_backend`` does."""
    with contextlib.closing(judge_for(options, request.device)) as judge:
        prepared = prepare(judge, request)
        problems = tuple(prepared.problems())
        found = map(prepared.ledger.judge, judge.run(prepared.plan, prepared.items))
        return Results(prepared.plan.header, (*prepared.preset, *found), problems)


@with_options("check_backend")
def assert_conformant(backend: str | type[AttentionBackend], **arguments: Unpack[CheckArguments]) -> Results:
    """Check a backend as ``check_backend`` does, and raise ``NotConformant`` unless it conforms.

    The message is what the command line prints: the verdict and the failures. ``NotConformant`` is an
    ``AssertionError``, and its ``results`` are the ``Results``. Raises also what ``check_backend`` raises.
    """
    __tracebackhide__ = True
    results = check_backend(backend, **arguments)
    if not results:
        raise NotConformant(results)
    return results
