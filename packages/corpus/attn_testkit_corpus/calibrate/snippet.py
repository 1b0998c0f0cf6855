"""The class of a snippet, and its evaluation: capture it, change its inputs in place, replay, compare with eager."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .inputs import Inputs

Run = Callable[[Inputs], Tensor]
OK, STALE = "ok", "stale"


@dataclass(frozen=True)
class Snippet:
    """One idiom, written as an author would write it inside a captured step of a server.

    `warm_up`: an eager run comes first, on a side stream. `expected` is the result of the replay, for the few snippets
    whose eager run gives another one.
    """

    name: str
    run: Run
    warm_up: bool = True
    expected: tuple[float, ...] | None = None


def named(theme: dict[str, Run]) -> tuple[Snippet, ...]:
    """Snippets of a theme, from {name: function}."""
    return tuple(Snippet(name, run) for name, run in theme.items())


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


def _warm_up(snippet: Snippet) -> None:
    inputs = Inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    if snippet.warm_up:
        with torch.cuda.stream(side):
            snippet.run(inputs)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def judge(snippet: Snippet, grad_mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad) -> str:
    """`ok`, `stale`, or `<stage> error: <text>` with stage eager, capture or replay."""
    with grad_mode():
        try:
            _warm_up(snippet)
        except Exception as error:
            return f"eager error: {_first_line(error)}"
        inputs = Inputs()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                output = snippet.run(inputs)
        except Exception as error:
            return f"capture error: {_first_line(error)}"
        inputs.refresh()
        try:
            graph.replay()
            torch.cuda.synchronize()
            got = output.detach().clone().cpu()
        except Exception as error:
            return f"replay error: {_first_line(error)}"
        return _compare(got, snippet, inputs)


def _compare(got: Tensor, snippet: Snippet, inputs: Inputs) -> str:
    want = torch.tensor(snippet.expected) if snippet.expected is not None else snippet.run(inputs).cpu()
    if got.shape != want.shape:
        return STALE
    close = torch.allclose(got.double(), want.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
    return OK if close else STALE


def judge_sync(snippet: Snippet) -> str:
    """Result of an eager run under torch's sync debug mode: `syncs`, `silent` or `eager error: <text>`."""
    with torch.no_grad():
        try:
            _warm_up(snippet)
            inputs = Inputs()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                snippet.run(inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        except Exception as error:
            if "synchroniz" in str(error) or type(error).__name__ == "HostSyncError":
                return "syncs"
            return f"eager error: {_first_line(error)}"
    return "silent"
