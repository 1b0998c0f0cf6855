"""Judging in processes of its own, where many workers run: Python judges one thing at a time in each.

The process asks for what is to be driven, and the thread that owns the worker has it driven. It is forked from where
workers are forked from, and meets no candidate.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from ...results import CaseResult
from ...runner_modes.messages import Described, DriveCase, Driven, Rerun
from ..planning.request import Item, Plan
from ..processes.child import Child, ChildLost
from ..processes.host_memory import Trimmer
from ..processes.worker_process import WorkerLost
from .judge import Drive, judge_item

__all__ = ["MODULE", "JudgingProcess", "serve"]

MODULE = "attn_testkit.running.case_runs.judging_process"
_PATIENCE = 3600.0
"""Seconds for one step of judging, far above what any takes."""


class JudgingProcess:
    """Judges one case-run at a time. Used by one thread."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def judge(self, drive: Drive, described: Described, plan: Plan, item: Item) -> CaseResult:
        """As ``judge.judge_item``. Raises what ``drive`` raises, and ``RuntimeError`` where judging itself fails."""
        try:
            if self._child is None or self._child.ended:
                self._child = Child(MODULE, reader=pickle.loads)
                self._child.wait_until_started()
            # Of the plan what one case-run needs: nothing of a candidate's travels along.
            bare = replace(plan, items=(), preset=(), candidates=())
            kind, *answer = self._child.ask((described, bare, item), _PATIENCE)
            while kind == "drive":
                kind, *answer = self._child.ask(_driven(drive, answer[0]), _PATIENCE)
        except ChildLost as error:
            raise RuntimeError(f"judging: {error.reason}") from error
        except BaseException:
            # It waits for an answer that will not come.
            self.close()
            raise
        if kind == "lost":
            raise WorkerLost(*answer)
        if kind == "error":
            raise RuntimeError(answer[0])
        result: CaseResult = answer[0]
        return result

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()


def _driven(drive: Drive, request: DriveCase | Rerun) -> tuple[str, object]:
    try:
        return "driven", drive(request)
    except WorkerLost as error:
        return "lost", (error.status, error.reason)


def serve(connection: Connection) -> None:
    """Judge what comes until the pipe is closed."""
    torch.set_num_threads(1)
    trimmer = Trimmer()

    def drive(request: DriveCase | Rerun) -> Driven:
        connection.send(("drive", request))
        kind, answer = connection.recv()
        if kind == "lost":
            raise WorkerLost(*answer)
        driven: Driven = answer
        return driven

    while True:
        try:
            described, plan, item = connection.recv()
        except (EOFError, ConnectionError):
            return
        connection.send(_answer(drive, described, plan, item))
        trimmer.after_case()


def _answer(drive: Drive, described: Described, plan: Plan, item: Item) -> tuple[object, ...]:
    try:
        return "result", judge_item(drive, described, plan, item)
    except WorkerLost as error:
        return "lost", error.status, error.reason
    except (EOFError, ConnectionError):
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        return "error", f"{type(error).__name__}: {error}\n{trace}"
