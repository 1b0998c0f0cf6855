"""Everything that is calibrated, as jobs that a worker can run by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import concurrency, copies, idioms, operations, reads, serving
from .facts import FACTS
from .loops import LOOPS
from .snippet import Snippet, judge, judge_sync

SNIPPETS: dict[str, Snippet] = {
    snippet.name: snippet
    for theme in (reads, copies, operations, serving, concurrency, idioms)
    for snippet in theme.SNIPPETS
}
_GRAD_MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Job(NamedTuple):
    """A program by name; `kind` is a section of a verdict file: loops, facts, no_grad, inference_mode or sync."""

    kind: str
    name: str


def all_jobs() -> list[Job]:
    """Every job, the long ones first."""
    return [
        *(Job("loops", name) for name in LOOPS),
        *(Job("facts", name) for name in FACTS),
        *(Job(mode, name) for mode in _GRAD_MODES for name in SNIPPETS),
        *(Job("sync", name) for name in SNIPPETS),
    ]


def action(job: Job) -> Callable[[], str]:
    """The function of a job."""
    if job.kind == "loops":
        return LOOPS[job.name]
    if job.kind == "facts":
        return FACTS[job.name]
    if job.kind == "sync":
        return functools.partial(judge_sync, SNIPPETS[job.name])
    return functools.partial(judge, SNIPPETS[job.name], _GRAD_MODES[job.kind])


def run(job: Job) -> str:
    """The verdict of one job; an error nobody expected is a verdict too."""
    try:
        return action(job)()
    except Exception as error:
        return f"crash: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
