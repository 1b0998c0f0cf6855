"""Labelled programs for the order of streams whose accesses the emulation does not compare: it shows the wrong ones by
their numbers, if work of side streams is late. Each is right with ``right=True``.

``python late_programs.py`` runs them on a device, which is kept busy where the order matters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from order_programs import Program, busy, filled, forked, here, rows, show

MANY = 1 << 17
NUMBERS = "other numbers"


def many_rows(right: bool) -> torch.Tensor:
    """More rows than are compared one by one."""
    pool, slots, side = filled(1, MANY, 2), torch.arange(0, MANY - 1, device="cuda"), forked()
    with torch.cuda.stream(side):
        busy()
        pool.index_fill_(0, slots, 5.0)
    if right:
        here().wait_stream(side)
    found = pool[slots].sum(1)
    here().wait_stream(side)
    return found


def bags(right: bool) -> torch.Tensor:
    weight, picked, starts, side = filled(1, 8, 4), rows(1, 4), rows(0), forked()
    with torch.cuda.stream(side):
        busy()
        weight.index_fill_(0, picked, 5.0)
    if right:
        here().wait_stream(side)
    found = torch.nn.functional.embedding_bag(picked, weight, starts, mode="sum")
    here().wait_stream(side)
    return found


def sorted_places(right: bool) -> torch.Tensor:
    starts, keys, side = rows(0, 4, 9, 20), rows(5, 12), forked()
    with torch.cuda.stream(side):
        busy()
        starts[1:3].add_(4)
    if right:
        here().wait_stream(side)
    found = torch.searchsorted(starts, keys)
    here().wait_stream(side)
    return found.float()


def strides(right: bool) -> torch.Tensor:
    """Every second and every third element: both have every sixth."""
    x, side = filled(1, 64), forked()
    with torch.cuda.stream(side):
        busy()
        x[2::2].fill_(5)
    if right:
        here().wait_stream(side)
    found = x[3::3] * 2
    here().wait_stream(side)
    return found


def replayed(right: bool) -> torch.Tensor:
    """A graph on another stream, which looks up more rows than are compared."""
    pool, slots, graph = filled(1, MANY, 2), torch.arange(0, MANY - 1, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        busy()
        pool.index_fill_(0, slots, 5.0)
    side = forked()
    with torch.cuda.stream(side):
        graph.replay()
    if right:
        here().wait_stream(side)
    found = pool[slots].sum(1)
    here().wait_stream(side)
    return found


def buffer_of_the_next_step(right: bool) -> torch.Tensor:
    """A plan in one buffer, which the next plan fills while a stream still copies by it."""
    pool, out, side = filled(1, MANY, 2), filled(0, MANY, 2), forked()
    slots = torch.arange(0, MANY, device="cuda")
    for step in range(2):
        pool.index_fill_(0, slots, step + 1.0)
        side.wait_stream(here())
        with torch.cuda.stream(side):
            busy()
            out.index_copy_(0, slots, pool) if step == 0 else out.index_add_(0, slots, pool)
        if right:
            here().wait_stream(side)
    here().wait_stream(side)
    return out[:4]


def event_of_the_first_half(right: bool) -> torch.Tensor:
    pool, slots, side = filled(1, MANY, 2), torch.arange(0, MANY - 1, device="cuda"), forked()
    early = side.record_event()
    with torch.cuda.stream(side):
        busy()
        pool.index_fill_(0, slots, 5.0)
    here().wait_event(side.record_event() if right else early)
    found = pool[slots].sum(1)
    here().wait_stream(side)
    return found


def asked_by_the_host(right: bool) -> torch.Tensor:
    pool, slots, side = filled(1, MANY, 2), torch.arange(0, MANY - 1, device="cuda"), forked()
    with torch.cuda.stream(side):
        busy()
        pool.index_fill_(0, slots, 5.0)
    if right:
        side.synchronize()
    found = pool[slots].sum(1)
    here().wait_stream(side)
    return found


def launched(right: bool) -> torch.Tensor:
    """A kernel, and a lookup of what no comparison follows: a bag."""
    import emulation_kernels

    weight, side = filled(1, 8, 2), torch.cuda.Stream()
    emulation_kernels.add[(1,)](filled(1, 16), 1.0, N=16)
    side.wait_stream(here())
    with torch.cuda.stream(side):
        busy()
        emulation_kernels.add[(1,)](weight, 1.0, N=16)
    if right:
        here().wait_stream(side)
    found = torch.nn.functional.embedding_bag(rows(1, 4), weight, rows(0), mode="sum")
    here().wait_stream(side)
    return found


def made_by_a_side_stream(right: bool) -> torch.Tensor:
    """A result that a stream writes into new memory is not late; a change that it makes afterwards is."""
    weight, side = filled(1, 8, 4), forked()
    with torch.cuda.stream(side):
        busy()
        other = weight * 2
        other.add_(1)
    if right:
        here().wait_stream(side)
    found = torch.nn.functional.embedding_bag(rows(1, 4), other, rows(0), mode="sum")
    here().wait_stream(side)
    return found


def _branch(
    write: Callable[[torch.Tensor, torch.Tensor], object], read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[[bool], torch.Tensor]:
    """A branch of a capture that writes what another reads before they are joined."""

    def program(right: bool) -> torch.Tensor:
        pool, slots, graph, side = (
            filled(1, MANY, 2),
            torch.arange(0, MANY - 1, device="cuda"),
            torch.cuda.CUDAGraph(),
            torch.cuda.Stream(),
        )
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            side.wait_stream(here())
            with torch.cuda.stream(side):
                busy()
                write(pool, slots)
            if right:
                here().wait_stream(side)
            found = read(pool, slots)
            here().wait_stream(side)
        graph.replay()
        return found

    return program


def buffers_of_two_branches(right: bool) -> torch.Tensor:
    """A branch that waits for another one's buffer, and one that does not; temporaries of both die on the way."""
    pool, graph = filled(1, MANY), torch.cuda.CUDAGraph()
    one, two, slots = torch.cuda.Stream(), torch.cuda.Stream(), torch.arange(0, MANY - 1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for stream in (one, two):
            stream.wait_stream(here())
        with torch.cuda.stream(one):
            busy()
            pool.index_copy_(0, slots, (pool * 3)[:-1])
        if right:
            two.wait_stream(one)
        with torch.cuda.stream(two):
            doubled = pool[slots] * 2
            found = doubled + 1
            del doubled
        other = filled(2) + 1
        del other
        for stream in (one, two):
            here().wait_stream(stream)
    graph.replay()
    return found[:4]


_RUNS: tuple[tuple[str, Callable[[bool], torch.Tensor]], ...] = (
    ("many rows", many_rows),
    ("bags", bags),
    ("sorted places", sorted_places),
    ("strides", strides),
    ("replay", replayed),
    ("buffer of the next step", buffer_of_the_next_step),
    ("event of the first half", event_of_the_first_half),
    ("host", asked_by_the_host),
    ("launch", launched),
    ("made by a side stream", made_by_a_side_stream),
    ("branch that fills many rows", _branch(lambda x, at: x.index_fill_(0, at, 5.0), lambda x, at: x[at].sum(1))),
    (
        "branch that changes strides",
        _branch(lambda x, at: x.view(-1)[2::2].fill_(5), lambda x, at: x.view(-1)[3::3] * 2),
    ),
    (
        "branch that reads many rows",
        _branch(lambda x, at: x.copy_(x[at.flip(0)].sum(0)), lambda x, at: x.index_fill_(0, at, 7.0)[:4]),
    ),
    ("buffers of two branches", buffers_of_two_branches),
)
PROGRAMS = tuple(Program(name, run, NUMBERS) for name, run in _RUNS)


if __name__ == "__main__":
    show(PROGRAMS)
