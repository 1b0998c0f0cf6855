"""A worker's side of the pipe: what it says, in which order, and when it would say where it hangs."""

from __future__ import annotations

import os
from types import SimpleNamespace as Of
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.messages import RunCase

from attn_testkit.contract import Execution
from attn_testkit.registry import UsageError
from attn_testkit.running.case_runs import worker_main
from attn_testkit.running.case_runs.worker_main import serve
from attn_testkit.running.hygiene.other_sources import OtherSources
from attn_testkit.running.processes.gpus import Gpu


class Named(str):
    """A backend by its name, in the place of a ``Candidate``."""

    sources = OtherSources()


class Ended(BaseException):
    """In the place of the end of the process."""


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens, in order; a request of ``raises`` fails in the harness."""
    taken: list[Any] = []

    class Local:
        described = "described"

        def __init__(self, candidate: Any, device: str) -> None:
            taken.append(("imports", candidate, device, os.environ.get("CUDA_VISIBLE_DEVICES")))
            if candidate == "missing":
                raise UsageError("no such backend")

        def drive(self, request: Any) -> Any:
            taken.append(("drives", request))
            if request == "raises":
                raise ZeroDivisionError("a bug of the kit")
            return f"answer to {request}"

    def ended(code: int) -> None:
        taken.append(("ends", code))
        raise Ended

    watch = Of(
        dump_traceback_later=lambda seconds, exit: taken.append(("will say where in", seconds, exit)),
        cancel_dump_traceback_later=lambda: taken.append("in time"),
    )
    monkeypatch.setattr(worker_main, "LocalWorker", Local)
    monkeypatch.setattr(worker_main, "faulthandler", watch)
    # It would seal the oracle of the tests' own process.
    monkeypatch.setattr(worker_main, "seal_oracle", lambda: taken.append("seals the oracle"))
    monkeypatch.setattr(worker_main.os, "_exit", ended)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: taken.append(("threads", count)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    return taken


def pipe(notes: list[Any], *requests: Any) -> Any:
    waiting = list(enumerate(requests))

    def recv() -> Any:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return Of(recv=recv, send=lambda message: notes.append(("says", message)))


def test_it_describes_itself_answers_and_ends_with_the_pipe_and_never_hangs_unheard(notes: list[Any]) -> None:
    with pytest.raises(Ended):
        serve(pipe(notes, "x", "y"), Named("m:A"), "cuda", Gpu("3").variables, 300.0, 60.0)  # type: ignore[arg-type]
    importing, patience = ("will say where in", 59.5, False), ("will say where in", 299.5, False)
    assert notes == [
        ("threads", 1),
        "seals the oracle",
        *(importing, ("imports", "m:A", "cuda", "3"), "in time", ("says", "described")),
        *(patience, ("drives", "x"), ("says", (0, "answer to x")), "in time"),
        *(patience, ("drives", "y"), ("says", (1, "answer to y")), "in time"),
        ("ends", 0),
    ]


@pytest.mark.parametrize(("timeout_s", "patience"), [(300.0, 299.5), (2.0, 1.5), (1.0, 0.7), (0.5, 0.35)])
def test_it_says_where_it_hangs_shortly_before_the_judge_gives_up(
    notes: list[Any], timeout_s: float, patience: float
) -> None:
    with pytest.raises(Ended):
        serve(pipe(notes), Named("m:A"), "cpu", {}, 300.0, timeout_s)  # type: ignore[arg-type]
    assert ("will say where in", pytest.approx(patience), False) in notes
    assert ("imports", "m:A", "cpu", "all") in notes, "without a GPU of its own it sees what everybody sees"


def test_a_backend_that_cannot_be_imported_is_the_answer_and_the_end(notes: list[Any]) -> None:
    serve(pipe(notes, "x"), Named("missing"), "cpu", {}, 300.0, 60.0)  # type: ignore[arg-type]
    assert notes[-1] == ("says", "no such backend")
    assert ("drives", "x") not in notes


def test_what_the_harness_raises_is_an_answer_and_the_next_request_is_served(notes: list[Any]) -> None:
    with pytest.raises(Ended):
        serve(pipe(notes, "raises", "x"), Named("m:A"), "cpu", {}, 300.0, 60.0)  # type: ignore[arg-type]
    (_, first), (_, second) = [note[1] for note in notes if note[0] == "says"][1:]
    assert first.startswith("ZeroDivisionError: a bug of the kit\nTraceback (most recent call last):")
    assert second == "answer to x"


def test_schedules_are_kept_until_another_case_is_driven(notes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_main, "forget_schedules", lambda: notes.append("forgets"))
    eager, graph = (RunCase("a", execution) for execution in (Execution.EAGER, Execution.GRAPH))
    other = RunCase("b", Execution.EAGER)
    with pytest.raises(Ended):
        serve(pipe(notes, eager, graph, other), Named("m:A"), "cpu", {}, 300.0, 60.0)  # type: ignore[arg-type]
    done = [note for note in notes if note == "forgets" or note[0] == "drives"]
    assert done == ["forgets", ("drives", eager), ("drives", graph), "forgets", ("drives", other)]
