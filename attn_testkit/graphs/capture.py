"""Capture of a callable as servers do it, on real or emulated torch.cuda."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Captured(Generic[T]):
    """A graph, and the tensors that its callable returned, which are in the graph's memory."""

    graph: Any
    outputs: T

    def replay(self) -> None:
        """Run the recorded kernels again. They are queued, and their errors appear at the next synchronization."""
        self.graph.replay()


def warm_up(run_once: Callable[[], T], stream: torch.cuda.Stream, times: int) -> list[T]:
    """Run ``run_once`` on a side stream, as servers do before they capture. Returns what each run returned.

    Everything is done when this returns, so that an error of a kernel is raised here.
    """
    outputs = []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            torch.cuda.synchronize()
            outputs.append(run_once())
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return outputs


def record(run_once: Callable[[], T], stream: torch.cuda.Stream, pool: Any) -> Captured[T]:
    """Record ``run_once`` on the side stream of its warm-up.

    ``pool`` is shared by all graphs of a server, so one graph's dead outputs become another's scratch memory. Raises
    what ``run_once`` raises, and ``RuntimeError`` for what CUDA forbids in a capture.
    """
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph(...): it collects garbage and empties the allocator's cache on entry, which costs ten times
    # the capture itself.
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            outputs = run_once()
        except BaseException:
            # It raises once more, about what is already known.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return Captured(graph, outputs)


def settle() -> None:
    """Exempt live objects from the garbage collector.

    With torch and Triton loaded each collection costs 85 ms, and every capture begins with one.
    """
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # otherwise native modules complain about leaks when the interpreter ends
    gc.collect()
    gc.freeze()
