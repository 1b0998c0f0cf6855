"""Labelled programs for order: each is right with ``right=True``, and two of its streams, or the host, race without.

``python order_programs.py`` runs them on a device, which is kept busy where the order matters. A right program leaves
the same numbers there as in the emulation. ``says`` is what the emulation must say of the wrong one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cuda_on_cpu import EmulationError, emulated_cuda, is_active

N = 1 << 16


def busy() -> None:
    """Keep the current stream of a device busy for some milliseconds."""
    if not is_active():
        torch.cuda._sleep(20_000_000)


def here() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def forked() -> torch.cuda.Stream:
    """A stream that comes after the current one."""
    side = torch.cuda.Stream()
    side.wait_stream(here())
    return side


def filled(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (N,), float(value), device="cuda")


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda")


def joined_late(right: bool) -> torch.Tensor:
    x, graph, side = filled(1), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(here())
        with torch.cuda.stream(side):
            busy()
            x.fill_(3)
        if right:
            here().wait_stream(side)
        y = x + 1
        here().wait_stream(side)
    graph.replay()
    return y


def read_while_written(right: bool) -> torch.Tensor:
    x, graph, side = filled(1), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(here())
        with torch.cuda.stream(side):
            busy()
            y = x * 2
        if right:
            here().wait_stream(side)
        x.fill_(5)
        here().wait_stream(side)
    graph.replay()
    return y


def two_branches(right: bool) -> torch.Tensor:
    x, graph, one, two = filled(1), torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        for stream in (one, two):
            stream.wait_stream(here())
        with torch.cuda.stream(one):
            busy()
            x[: N // 2].fill_(3)
        with torch.cuda.stream(two):
            x[N // 2 if right else N // 4 :].fill_(4)
        for stream in (one, two):
            here().wait_stream(stream)
    graph.replay()
    return x


def event_before_the_write(right: bool) -> torch.Tensor:
    x, graph, side = filled(1), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        early = here().record_event()
        busy()
        x.fill_(3)
        side.wait_event(here().record_event() if right else early)
        with torch.cuda.stream(side):
            y = x + 1
        here().wait_stream(side)
    graph.replay()
    return y


def kernel_of_a_branch(right: bool) -> torch.Tensor:
    import emulation_kernels

    x, graph, side = filled(1, 8), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    emulation_kernels.add[(1,)](filled(1, 8), 1.0, N=8)
    with torch.cuda.graph(graph):
        side.wait_stream(here())
        with torch.cuda.stream(side):
            busy()
            emulation_kernels.add[(1,)](x, 1.0, N=8)
        if right:
            here().wait_stream(side)
        y = x * 10
        here().wait_stream(side)
    graph.replay()
    return y


def one_pool(right: bool) -> torch.Tensor:
    x, graphs, results = filled(1), [], []
    for factor in (2, 3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
            part = x * factor
            if factor == 2:
                busy()
            results.append(part + 1)
            del part
        graphs.append(graph)
    one, two = forked(), forked()
    with torch.cuda.stream(one):
        graphs[0].replay()
    if right:
        two.wait_stream(one)
    with torch.cuda.stream(two):
        graphs[1].replay()
    here().wait_stream(one)
    here().wait_stream(two)
    return results[0] + results[1]


def pools_of_their_own(right: bool) -> torch.Tensor:
    x, graphs, results = filled(1), [], []
    for factor in (2, 3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs and not right else None):
            part = x * factor
            if factor == 2:
                busy()
            results.append(part + 1)
            del part
        graphs.append(graph)
    for graph, stream in zip(graphs, (forked(), forked()), strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
        graph.stream = stream
    for graph in graphs:
        here().wait_stream(graph.stream)
    return results[0] + results[1]


def one_graph_on_two_streams(right: bool) -> torch.Tensor:
    """CUDA orders the launches of one graph."""
    x, graph = filled(0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        busy()
        x.add_(1)
    one, two = forked(), forked()
    for stream in (one, two):
        with torch.cuda.stream(stream):
            graph.replay()
    here().wait_stream(two if right else one)
    return x + 1


def _launched_twice(
    right: bool,
    before: Callable[[torch.Tensor, int], object],
    after: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """One graph on two streams. CUDA orders its launches, and neither what comes before one nor what comes after."""
    x, y, graph, found = filled(1), filled(0), torch.cuda.CUDAGraph(), list[torch.Tensor]()
    with torch.cuda.graph(graph):
        busy()
        y.copy_(x * 2)
    one, two = forked(), forked()
    for turn, stream in enumerate((one, two)):
        with torch.cuda.stream(stream):
            if right and turn:
                stream.wait_stream(one)
            before(x, turn)
            graph.replay()
            found.append(after(y, turn))
    here().wait_stream(one)
    here().wait_stream(two)
    torch.cuda.synchronize()
    return torch.cat([each.cpu() for each in found])


def inputs_of_one_graph(right: bool) -> torch.Tensor:
    return _launched_twice(right, lambda x, turn: x.fill_(turn), lambda y, turn: y[:1])


def inputs_from_the_host(right: bool) -> torch.Tensor:
    hosts = [torch.full((N,), float(turn)).pin_memory() for turn in range(2)]
    return _launched_twice(right, lambda x, turn: x.copy_(hosts[turn], non_blocking=True), lambda y, turn: y[:1])


def outputs_of_one_graph(right: bool) -> torch.Tensor:
    return _launched_twice(right, lambda x, turn: None, lambda y, turn: y * 3)


def outputs_to_the_host(right: bool) -> torch.Tensor:
    hosts = [torch.zeros(N).pin_memory() for _ in range(2)]
    return _launched_twice(right, lambda x, turn: None, lambda y, turn: hosts[turn].copy_(y, non_blocking=True))


def freed_while_in_use(right: bool) -> torch.Tensor:
    x, side = filled(5), torch.cuda.Stream()
    side.wait_stream(here())
    with torch.cuda.stream(side):
        busy()
        y = x * 2
    if right:
        x.record_stream(side)
    del x
    other = filled(9)
    here().wait_stream(side)
    return y + other


def freed_by_a_side_stream(right: bool) -> torch.Tensor:
    side = forked()
    with torch.cuda.stream(side):
        x = filled(5)
    here().wait_stream(side)
    busy()
    y = x * 2
    if right:
        side.wait_stream(here())
    del x
    with torch.cuda.stream(side):
        other = filled(9)
    here().wait_stream(side)
    return y + other


def pinned_source_of_a_graph(right: bool) -> torch.Tensor:
    host, x, graph = torch.full((N,), 2.0).pin_memory(), filled(0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        busy()
        x.copy_(host, non_blocking=True)
    graph.replay()
    if right:
        here().record_event().synchronize()
    host.fill_(7)
    torch.cuda.synchronize()
    return x


def copy_of_a_graph_to_the_host(right: bool) -> torch.Tensor:
    host, x, graph = torch.zeros(N).pin_memory(), filled(3), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        busy()
        host.copy_(x, non_blocking=True)
    graph.replay()
    if right:
        here().synchronize()
    seen = host.clone()
    torch.cuda.synchronize()
    return seen


def rewritten_and_put_back(right: bool) -> torch.Tensor:
    host, x = torch.full((N,), 2.0).pin_memory(), filled(0)
    busy()
    x.copy_(host, non_blocking=True)
    if right:
        here().synchronize()
    host.fill_(7)
    y = host.clone().sum()
    host.fill_(2)
    torch.cuda.synchronize()
    return x + y


def _in_rows(write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> Callable[[bool], torch.Tensor]:
    def program(right: bool) -> torch.Tensor:
        pool, written, read = filled(1, 8, N), rows(1, 4), rows(5, 0) if right else rows(5, 4)
        new, side = filled(5, 2, N), forked()
        with torch.cuda.stream(side):
            busy()
            write(pool, written, new)
        found = pool[read]
        here().wait_stream(side)
        return found + pool[written]

    return program


def scattered(right: bool) -> torch.Tensor:
    x, to, read = filled(1, 8), rows(1, 4), rows(5, 0) if right else rows(5, 4)
    side = forked()
    with torch.cuda.stream(side):
        busy()
        x.scatter_(0, to, 3.0)
    found = x.gather(0, read)
    here().wait_stream(side)
    return found


def rows_of_a_graph(right: bool) -> torch.Tensor:
    pool, slots, graph = filled(1, 8, N), rows(1, 2), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        busy()
        pool.index_fill_(0, slots, 5.0)
    slots.copy_(rows(1, 4))
    read = rows(5, 2) if right else rows(5, 4)
    side = forked()
    with torch.cuda.stream(side):
        graph.replay()
    found = pool[read]
    here().wait_stream(side)
    return found


def rows_in_two_branches(right: bool) -> torch.Tensor:
    pool, graph, side = filled(1, 8, N), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    written, read = rows(1, 4), rows(5, 0) if right else rows(5, 4)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        side.wait_stream(here())
        with torch.cuda.stream(side):
            busy()
            pool.index_fill_(0, written, 5.0)
        found = pool[read]
        here().wait_stream(side)
    graph.replay()
    return found


def two_kernels(right: bool) -> torch.Tensor:
    import emulation_kernels

    x = filled(1, 16)
    emulation_kernels.add[(1,)](filled(1, 8), 1.0, N=8)
    side = forked()
    with torch.cuda.stream(side):
        busy()
        emulation_kernels.add[(1,)](x, 1.0, N=8)
    emulation_kernels.add[(1,)](x[8:] if right else x[4:], 1.0, N=8)
    here().wait_stream(side)
    return x


@dataclass(frozen=True)
class Program:
    """A program for both labels."""

    name: str
    run: Callable[[bool], torch.Tensor]
    says: str


UNORDERED = "nothing orders the two"
PROGRAMS = (
    Program("branch that is joined late", joined_late, f"Tensor.add.* reads memory that Tensor.fill_.*{UNORDERED}"),
    Program("input of a branch", read_while_written, f"writes memory that Tensor.mul.*{UNORDERED}"),
    Program("two branches", two_branches, UNORDERED),
    Program("event that is too early", event_before_the_write, UNORDERED),
    Program("kernel of a branch", kernel_of_a_branch, f"triton kernel add.*{UNORDERED}"),
    Program("two graphs of one pool", one_pool, "pool"),
    Program("pools of their own", pools_of_their_own, "pool"),
    Program("one graph on two streams", one_graph_on_two_streams, UNORDERED),
    Program("inputs of one graph", inputs_of_one_graph, f"Tensor.fill_.*{UNORDERED}"),
    Program("inputs of one graph from the host", inputs_from_the_host, f"Tensor.copy_.*{UNORDERED}"),
    Program("outputs of one graph", outputs_of_one_graph, f"replay.*{UNORDERED}"),
    Program("outputs of one graph to the host", outputs_to_the_host, f"replay.*{UNORDERED}"),
    Program("freed while in use", freed_while_in_use, "record_stream"),
    Program("freed by a side stream", freed_by_a_side_stream, "record_stream"),
    Program("pinned source of a graph", pinned_source_of_a_graph, "its pinned source was written again"),
    Program("copy of a graph to the host", copy_of_a_graph_to_the_host, "the host has not waited for that copy"),
    Program("pinned memory that is put back", rewritten_and_put_back, "its pinned source was written again"),
    Program("index_put_", _in_rows(lambda x, at, new: x.index_put_((at,), new)), UNORDERED),
    Program("index_fill_", _in_rows(lambda x, at, new: x.index_fill_(0, at, 5.0)), UNORDERED),
    Program("index_copy_", _in_rows(lambda x, at, new: x.index_copy_(0, at, new)), UNORDERED),
    Program("index_add_", _in_rows(lambda x, at, new: x.index_add_(0, at, new)), UNORDERED),
    Program("scatter_", scattered, UNORDERED),
    Program("rows of a graph", rows_of_a_graph, UNORDERED),
    Program("rows in two branches", rows_in_two_branches, UNORDERED),
    Program("two kernels", two_kernels, UNORDERED),
)


def measured(program: Program, right: bool) -> str:
    """The first number of a program's result in each of three runs."""
    try:
        left = {str(program.run(right).flatten()[:4].tolist()) for _ in range(3)}
    except EmulationError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(EmulationError):
            torch.cuda.synchronize()  # what a program left undone is not the next one's
    return "\t".join(sorted(left))


def show(programs: Sequence[Program]) -> None:
    """Print what each program leaves; in the emulation if the command has an argument."""
    with torch.no_grad(), emulated_cuda() if sys.argv[1:] else contextlib.nullcontext():
        for each in programs:
            for right in (True, False):
                print("right" if right else "wrong", each.name, measured(each, right), sep="\t", flush=True)


if __name__ == "__main__":
    show(PROGRAMS)
