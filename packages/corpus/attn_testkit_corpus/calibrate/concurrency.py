"""Snippets: side streams, events, and Triton launches inside a capture."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import Inputs
from .snippet import Snippet, named


def _forked(e: Inputs, *, join: bool, fork: bool = True, use: bool = True) -> Tensor:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    if fork:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        y = e.x * 2
    if join:
        main.wait_stream(side)
    return y + 1 if use else e.x + 1


def _forked_by_event(e: Inputs, *, join: bool) -> Tensor:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    ready, done = torch.cuda.Event(), torch.cuda.Event()
    ready.record(main)
    side.wait_event(ready)
    with torch.cuda.stream(side):
        y = e.x * 2
        done.record()
    if join:
        main.wait_event(done)
    return y + 1


def _two_sides(e: Inputs, *, join_both: bool) -> Tensor:
    main, a, b = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    a.wait_stream(main)
    b.wait_stream(a)
    with torch.cuda.stream(a):
        y = e.x * 2
    with torch.cuda.stream(b):
        z = e.x * 3
    main.wait_stream(b)
    if join_both:
        main.wait_stream(a)
    return e.x + 1 if not join_both else y + z


def _joined_through_another(e: Inputs) -> Tensor:
    main, a, b = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    a.wait_stream(main)
    with torch.cuda.stream(a):
        y = e.x * 2
    b.wait_stream(a)
    with torch.cuda.stream(b):
        z = y + 1
    main.wait_stream(b)
    return z + 0


def _work_after_join(e: Inputs) -> Tensor:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = e.x * 2
    main.wait_stream(side)
    with torch.cuda.stream(side):
        y.add_(1)
    return e.x + 1


def _fork_without_work(e: Inputs) -> Tensor:
    torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
    return e.x + 1


def _wait_for_idle_stream(e: Inputs) -> Tensor:
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    return e.x + 1


def _wait_unrecorded_event(e: Inputs) -> Tensor:
    torch.cuda.current_stream().wait_event(torch.cuda.Event())
    return e.x + 1


def _timing_events(e: Inputs) -> Tensor:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    y = e.x + 1
    end.record()
    return y


def _stream_context_none(e: Inputs) -> Tensor:
    with torch.cuda.stream(None):
        return e.x + 1


def _default_stream_work(e: Inputs) -> Tensor:
    with torch.cuda.stream(torch.cuda.default_stream()):
        y = e.x * 2
    return e.x + 1 + 0 * float(y.numel())


SNIPPETS: tuple[Snippet, ...] = named(
    {
        "side stream: joined": lambda e: _forked(e, join=True),
        "side stream: unjoined": lambda e: _forked(e, join=False, use=False),
        "side stream: not forked, used": lambda e: _forked(e, join=False, fork=False),
        "side stream: not forked, joined": lambda e: _forked(e, join=True, fork=False),
        "side stream: not forked, unused": lambda e: _forked(e, join=False, fork=False, use=False),
        "side stream: event, joined": lambda e: _forked_by_event(e, join=True),
        "side stream: event, unjoined": lambda e: _forked_by_event(e, join=False),
        "side streams: both joined": lambda e: _two_sides(e, join_both=True),
        "side streams: one unjoined": lambda e: _two_sides(e, join_both=False),
        "side streams: joined through another": _joined_through_another,
        "side stream: work after join": _work_after_join,
        "side stream: fork without work": _fork_without_work,
        "stream: wait for an idle one": _wait_for_idle_stream,
        "event: wait unrecorded": _wait_unrecorded_event,
        "event: timing": _timing_events,
        "stream(None)": _stream_context_none,
        "default stream work": _default_stream_work,
    }
)


def _triton_snippets() -> tuple[Snippet, ...]:
    try:
        from . import kernels
    except ImportError:
        return ()
    return kernels.SNIPPETS


SNIPPETS = (*SNIPPETS, *_triton_snippets())
