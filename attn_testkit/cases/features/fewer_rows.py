"""Rows between a failing case's and the fewest: what ``minimize`` tries for ``features/rows.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...contract import Capabilities
from ..fields import Changes, Fields
from ..rows import Accepted, Decode, Drafted, Extend, Rows, Verify, room_for
from ..trees import Tree, chain
from .numbers import nearer_numbers


def fewer_rows(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    """Yield the rows to try in turn, the most valuable first."""
    found: Iterator[Rows]
    match case.rows:
        case Decode():
            found = iter(())
        case Verify(tree):
            found = map(Verify, _smaller_trees(tree))
        case Drafted(draft):
            fewer = [replace(draft, branches=count) for count in (1, *nearer_numbers(draft.branches, 1))]
            fewer += [replace(draft, steps=count) for count in (2, *nearer_numbers(draft.steps, 2))]
            found = (replace(case.rows, draft=each) for each in fewer)
        case Extend():
            found = _fewer_new(case.rows)
        case Accepted():
            found = _fewer_accepted(case.rows)
    yield from ({"rows": rows} for rows in found)


def _fewer_new(rows: Extend) -> Iterator[Rows]:
    """One of several counts removed, the largest first; or a graph without unused rows."""
    for old in sorted(set(rows.new), reverse=True):
        for count in (1, *nearer_numbers(old, 1)):
            new = tuple(count if each == old else each for each in rows.new)
            yield replace(rows, new=new, room=room_for(new))
    yield replace(rows, room=room_for(rows.new))


def _smaller_trees(tree: Tree) -> Iterator[Tree]:
    """A chain; fewer nodes; without one of its leaves."""
    sizes = [2, *nearer_numbers(len(tree), 1)]
    yield chain(len(tree))
    yield from (chain(size) for size in sizes)
    yield from (Tree(tree.parents[: size - 1]) for size in sizes)
    for leaf in reversed([node for node in range(1, len(tree)) if node not in tree.parents]):
        kept = (parent - (parent > leaf) for node, parent in enumerate(tree.parents, start=1) if node != leaf)
        yield Tree(tuple(kept))


def _fewer_accepted(rows: Accepted) -> Iterator[Rows]:
    """Accepted counts to try: all rows of every request; fewer rows, with the same accepted or the same rejected
    tokens; the same count for every request; one count removed.
    """
    width, new, count_of = rows.width, rows.new, len(rows.new)
    yield replace(rows, new=(width,) * count_of)
    for fewer in dict.fromkeys((2, max(new), *nearer_numbers(width, 1))):
        yield replace(rows, width=fewer, new=tuple(min(count, fewer) for count in new))
        yield replace(rows, width=fewer, new=tuple(max(1, count - width + fewer) for count in new))
    yield from (replace(rows, new=(count,) * count_of) for count in sorted(set(new), reverse=True))
    for old in sorted(set(new)):
        yield replace(rows, new=tuple(width if count == old else count for count in new))
    for old in sorted(set(new)):
        for more in filter(None, (width - 1, *nearer_numbers(old, width))):
            yield replace(rows, new=tuple(more if count == old else count for count in new))
