"""Running a backend in the test's own process: quick, and what most tests of judging and diagnosis need.

How a backend in its own process is judged is held by ``tests/running/test_worker_process.py`` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import attn_testkit
from attn_testkit import Results
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.candidate import candidate_for
from attn_testkit.running.planning.request import Item, Options, Plan, Request

__all__ = ["assert_passes_on_fakes", "check_backend", "plan_run", "run", "run_item", "texts_of_failure"]


def check_backend(backend: Any, **more: Any) -> Results:
    """As ``attn_testkit.check_backend``, without processes, and without a time limit of a diagnosis: what a test
    expects of a finding does not depend on the load of the machine.
    """
    return attn_testkit.check_backend(backend, in_process=True, **{"diagnose_seconds": None, **more})


def assert_passes_on_fakes(backend: str, execution: str, cases: Sequence[str]) -> None:
    """Every case passes, and its result says that the kernels are fakes."""
    rows = [row for row in check_backend(backend, device="cpu", executions=[execution], cases=cases) if row.case]
    assert {row.case: [f.headline for f in row.findings] for row in rows} == {case: [] for case in cases}
    assert {(row.status, row.kernels) for row in rows} == {(Status.PASSED, "emulated")}


def texts_of_failure(backend: Any, message: str, **more: Any) -> list[str]:
    """Check, headline, place and hint of each finding of the one case-run, which fails. Its cause is looked for only if
    no text has the ``message`` without: a diagnosis takes most of the time.
    """
    texts: list[str] = []
    for diagnose in ("none", "first"):
        (row,) = (row for row in check_backend(backend, diagnose=diagnose, **more) if row.case)
        assert row.status is Status.FAILED, row
        texts = [f"{f.check} | {f.headline} | {f.where} | {f.hint}" for f in row.findings]
        if any(message in text for text in texts):
            break
    return texts


def plan_run(*, backends: Sequence[Any], **more: Any) -> Plan:
    """A plan for backends that are named or given."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in more.items()}
    candidates = tuple(candidate_for(backend, in_process=True) for backend in backends)
    with closing(_runner()) as runner:
        return runner.plan(Request(candidates, **values))


def run(plan: Plan, items: Sequence[Item] | None = None) -> Iterator[CaseResult]:
    """What is known without running, then a result for each item."""
    yield from plan.preset
    with closing(_runner()) as runner:
        yield from runner.run(plan, plan.items if items is None else items)


def run_item(item: Item, plan: Plan) -> CaseResult:
    """One result."""
    with closing(_runner()) as runner:
        (result,) = runner.run(plan, [item])
    return result


def _runner() -> Runner:
    """To be closed: a worker in this process watches its imports."""
    return Runner(Options(in_process=True, diagnose="all"))
