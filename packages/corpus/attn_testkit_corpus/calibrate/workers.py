"""Running jobs in processes that are replaced after a failure: a CUDA error poisons its process for good."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from attn_testkit.results.case_result import Status
from attn_testkit.running.processes.child import Child, ChildLost
from attn_testkit.running.processes.forking import preload

from .jobs import Job, run

SERVE = __name__
"""Module whose ``serve`` a child runs."""
TIMEOUT_SECONDS = 60.0
_HEALTHY = ("ok", "stale", "pass", "silent", "no error", "syncs")


def run_isolated(jobs: list[Job], workers: int) -> dict[Job, str]:
    """The verdicts of `jobs`, run by `workers` processes.

    A job whose process dies is "died", one that takes longer than TIMEOUT_SECONDS is "timeout"; neither is run again.
    Raises ChildLost if a process cannot even begin.
    """
    preload(__name__)
    waiting = deque(jobs)
    verdicts: dict[Job, str] = {}
    count = max(1, min(workers, len(jobs)))
    with ThreadPoolExecutor(count) as threads:
        places = [threads.submit(_work_off, waiting, verdicts) for _ in range(count)]
        try:
            for place in places:
                place.result()
        finally:
            # Interrupted, or a place failed: the others stop after the job they have.
            waiting.clear()
    return verdicts


def _work_off(waiting: deque[Job], verdicts: dict[Job, str]) -> None:
    child: Child | None = None
    try:
        while job := _next(waiting):
            if child is None:
                child = Child(SERVE)
                child.wait_until_started()
            verdict = verdicts[job] = _verdict(child, job)
            if _process_is_spoilt(verdict):
                child.close()
                child = None
    finally:
        if child is not None:
            child.close()


def _next(waiting: deque[Job]) -> Job | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _verdict(child: Child, job: Job) -> str:
    try:
        return str(child.ask(job, TIMEOUT_SECONDS))
    except ChildLost as error:
        return "timeout" if error.status is Status.TIMED_OUT else "died"


def _process_is_spoilt(verdict: str) -> bool:
    if verdict in _HEALTHY:
        return False
    # torch refused before it asked CUDA for anything, and no capture was open
    return not verdict.startswith("eager error") or "CUDA" in verdict or "Accelerator" in verdict


def serve(connection: Connection) -> None:
    """The child's side: a verdict for each job that comes, until the pipe is closed."""
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(run(job))
