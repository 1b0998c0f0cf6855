"""Running jobs in processes that are replaced after a failure: a CUDA error poisons its process for good."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from attn_testkit.emulation.calibrate.jobs import Job, run

TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.005
_HEALTHY = ("ok", "stale", "pass", "silent", "no error", "syncs")


def _process_is_spoilt(verdict: str) -> bool:
    if verdict in _HEALTHY:
        return False
    # torch refused before it asked CUDA for anything, and no capture was open
    return not verdict.startswith("eager error") or "CUDA" in verdict or "Accelerator" in verdict


def _serve(pipe: Connection) -> None:
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(run(job))


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    job: Job | None = None
    since: float = 0.0

    @classmethod
    def start(cls) -> _Worker:
        # fork: torch is imported already, and CUDA must not have been used in this process
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def give(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        self.pipe.send(job)

    def verdict(self) -> str | None:
        try:
            if self.pipe.poll(0):
                return str(self.pipe.recv())
        except (EOFError, OSError):
            return "died"
        return "timeout" if time.monotonic() - self.since > TIMEOUT_SECONDS else None

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


@dataclass
class _Crew:
    jobs: list[Job]
    verdicts: dict[Job, str] = field(default_factory=dict)

    def tend(self, worker: _Worker) -> _Worker:
        """Take a finished worker's verdict and give it something to do; returns the worker for its place."""
        if worker.job is not None:
            verdict = worker.verdict()
            if verdict is None:
                return worker
            self.verdicts[worker.job] = verdict
            worker.job = None
            if _process_is_spoilt(verdict):
                worker.stop()
                worker = _Worker.start()
        if self.jobs:
            worker.give(self.jobs.pop(0))
        return worker


def run_isolated(jobs: list[Job], workers: int) -> dict[Job, str]:
    """The verdicts of `jobs`, run by `workers` processes.

    A job whose process dies is "died", one that takes longer than TIMEOUT_SECONDS is "timeout"; neither is run again.
    """
    crew = _Crew(list(jobs))
    places = [_Worker.start() for _ in range(max(1, min(workers, len(jobs))))]
    try:
        while crew.jobs or any(worker.job is not None for worker in places):
            places = [crew.tend(worker) for worker in places]
            time.sleep(_POLL_SECONDS)
    finally:
        for worker in places:
            worker.stop()
    return crew.verdicts
