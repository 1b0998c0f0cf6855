"""Labelled programs for order in which numbers or masks choose what is read and written; as in ``order_programs.py``.

``python index_programs.py`` runs them on a device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from order_programs import UNORDERED, N, Program, busy, filled, forked, here, rows, show


def _of_a_table(
    write: Callable[[torch.Tensor, torch.Tensor], object],
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    make: Callable[[], torch.Tensor] = lambda: filled(1, 8, N),
    numbers: Callable[[int], torch.Tensor] = lambda row: rows(row, row + 1),
) -> Callable[[bool], torch.Tensor]:
    """A server's stream writes rows of a table while a forward reads others, or one of the same."""

    def program(right: bool) -> torch.Tensor:
        table, server = make(), forked()
        written, read_from = numbers(2), numbers(4 if right else 3)
        # Kernels of torch are loaded when they first run, which takes a lock and waits.
        write(make(), written)
        read(make(), read_from)
        torch.cuda.synchronize()
        with torch.cuda.stream(server):
            busy()
            write(table, written)
        found = read(table, read_from)
        here().wait_stream(server)
        return found.float()

    return program


def _mask(numbers: torch.Tensor) -> torch.Tensor:
    return torch.zeros(8, dtype=torch.bool, device="cuda").index_fill_(0, numbers, True)


def _many(row: int) -> torch.Tensor:
    """16,384 rows, of which those for 2 and 3 have one in common, and those for 2 and 4 none."""
    found = torch.arange(0 if row == 2 else 1, 1 << 16, 4, device="cuda")
    return found if row != 3 else torch.cat((found, rows(32768)))


def _bytes() -> torch.Tensor:
    return torch.ones(8, N, dtype=torch.uint8, device="cuda")


def _tall() -> torch.Tensor:
    return filled(1, 1 << 16, 8)


def _heads_first() -> torch.Tensor:
    """[slot, head, dim] of memory in which the heads come first."""
    return filled(1, 4, 8, N // 4).transpose(0, 1)


def _into(read: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> Callable[[bool], torch.Tensor]:
    """A forward on another stream gathers into a buffer of which a part is read."""

    def program(right: bool) -> torch.Tensor:
        table, found, side = filled(1, 8, N), filled(0, 2, N), forked()
        read(table, rows(1, 2), filled(0, 2, N))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            busy()
            read(table, rows(1, 2), found)
        if right:
            here().wait_stream(side)
        first = found[0] + 1
        here().wait_stream(side)
        return first

    return program


def filled_beside(right: bool) -> torch.Tensor:
    """A copy with other rows reads all of the table."""
    table, server = filled(1, 8, N), forked()
    table.index_fill(0, rows(1), 9.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(server):
        busy()
        table[6].fill_(3)
    if right:
        here().wait_stream(server)
    found = table.index_fill(0, rows(1), 9.0)
    here().wait_stream(server)
    return found[6]


def table_under_a_replay(right: bool) -> torch.Tensor:
    """sglang #31270: a graph reads a table of slots that the server's stream may already write for the next step."""
    table, plan, graph = filled(1, 8, N), filled(0, 2, N), torch.cuda.CUDAGraph()
    requests, next_one = rows(1, 4), rows(4)
    torch.index_select(table, 0, requests, out=plan)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        busy()
        if not right:
            torch.index_select(table, 0, requests, out=plan)
        out = plan * 2
    torch.index_select(table, 0, requests, out=plan)
    server = forked()
    graph.replay()
    with torch.cuda.stream(server):
        table.index_fill_(0, next_one, 5.0)
    here().wait_stream(server)
    return out[1]


PROGRAMS = (
    Program(
        "bytes by index",
        _of_a_table(lambda x, at: x.index_put_((at,), x.new_zeros(())), lambda x, at: x[at], _bytes),
        UNORDERED,
    ),
    Program(
        "bytes by rows",
        _of_a_table(lambda x, at: x.index_copy_(0, at, x.new_zeros(2, N)), lambda x, at: x.index_select(0, at), _bytes),
        UNORDERED,
    ),
    Program(
        "mask",
        _of_a_table(lambda x, at: x.index_put_((_mask(at),), x.new_full((), 5.0)), lambda x, at: x[at]),
        UNORDERED,
    ),
    Program(
        "rows of a mask", _of_a_table(lambda x, at: x.index_fill_(0, at, 5.0), lambda x, at: x[_mask(at)]), UNORDERED
    ),
    Program(
        "places of a mask",
        _of_a_table(
            lambda x, at: x.masked_scatter_(_mask(at)[:, None].expand_as(x), x.new_zeros(x.shape)),
            lambda x, at: x[at],
            lambda: filled(1, 8, 64),
        ),
        UNORDERED,
    ),
    Program(
        "row and column",
        _of_a_table(lambda x, at: x.index_put_((at, at), x.new_full((), 5.0)), lambda x, at: x[at, at]),
        UNORDERED,
    ),
    Program("columns", _of_a_table(lambda x, at: x.index_fill_(1, at, 5.0), lambda x, at: x[:, at]), UNORDERED),
    Program(
        "heads first",
        _of_a_table(lambda x, at: x.index_put_((at,), x.new_full((), 5.0)), lambda x, at: x[at], _heads_first),
        UNORDERED,
    ),
    Program(
        "flat places",
        _of_a_table(lambda x, at: x.put_(at, x.new_full((2,), 5.0)), lambda x, at: x.take(at)),
        UNORDERED,
    ),
    Program(
        "lookup",
        _of_a_table(lambda x, at: x.index_fill_(0, at, 5.0), lambda x, at: torch.nn.functional.embedding(at, x)),
        UNORDERED,
    ),
    Program(
        "16,384 rows",
        _of_a_table(lambda x, at: x.index_put_((at,), x.new_full((), 5.0)), lambda x, at: x[at], _tall, _many),
        UNORDERED,
    ),
    Program("selected into a buffer", _into(lambda x, at, out: torch.index_select(x, 0, at, out=out)), UNORDERED),
    Program(
        "gathered into a buffer",
        _into(lambda x, at, out: torch.gather(x, 0, at[:, None].expand(2, N), out=out)),
        UNORDERED,
    ),
    Program("copy with other rows", filled_beside, UNORDERED),
    Program("table under a replay", table_under_a_replay, UNORDERED),
)


if __name__ == "__main__":
    show(PROGRAMS)
