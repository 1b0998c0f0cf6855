"""Capturing a callable the way servers do, on torch.cuda, real or emulated."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Captured", "capture", "settle"]

T = TypeVar("T")


@dataclass
class Captured(Generic[T]):
    """A graph, and the tensors that its callable returned: they live in the graph's own memory."""

    graph: Any
    outputs: T

    def replay(self) -> None:
        """Run the recorded kernels again."""
        self.graph.replay()


def capture(run_once: Callable[[], T], pool: Any, warmups: int = 2) -> tuple[Captured[T], T]:
    """Warm ``run_once`` up on a side stream and record it once. Returns the graph and what the last warm-up returned.

    ``pool`` is shared by all graphs of a server, so that one graph's dead outputs are another's scratch memory. What
    ``run_once`` raises under capture is raised on, after the capture has been ended.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmups):
            torch.cuda.synchronize()
            warm = run_once()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph(...): it collects garbage and empties the allocator's cache on entry, which costs ten times
    # the capture itself.
    with torch.cuda.stream(side):
        graph.capture_begin(pool=pool)
        try:
            outputs = run_once()
        except BaseException:
            _abandon(graph)
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return Captured(graph, outputs), warm


def _abandon(graph: Any) -> None:
    """End a capture that went wrong. It raises once more, about what is already known."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()


def settle() -> None:
    """Set what is alive aside from the garbage collector.

    With torch and Triton loaded each collection costs 85 ms, and every capture begins with one.
    """
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # otherwise native modules complain about leaks when the interpreter ends
    gc.collect()
    gc.freeze()
