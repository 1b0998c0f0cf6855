"""The order of cases if there may not be time for all: cases that failed, then new values, then new pairs of values."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from ...cases.case import Case
from ...cases.fields import DEFAULTS
from ...contract import Execution
from .reach import Since
from .request import Item

Entry = tuple[Item, Case]
_FIRST_ROUND, _ALONE = 16, 128
"""Number of cases of one backend before the next backend follows, and of a single backend; each later round has twice
as many. A round costs each worker a new process, which imports the backend again: a server takes 10 to 20 s for that.
"""


def most_valuable_first(entries: Sequence[Entry], failed: Collection[tuple[str, str]]) -> tuple[Item, ...]:
    """The items in the order in which they are to run.

    ``failed``: (backend, case id) of the last run's failures, which come first. Then come cases until every value of
    every feature occurs, as in smoke; then always the case with the most new pairs of values. The order has rounds.
    In each round one backend follows the other, no_grad comes before inference_mode as in any plan, cases with little
    work come before those with a hundred times as much, and eager and graph of a case are adjacent.
    """
    backends = list(dict.fromkeys(item.backend for item, _ in entries))
    size = _FIRST_ROUND if len(backends) > 1 else _ALONE
    place: dict[tuple[str, str], tuple[int, int, int]] = {}
    for backend in backends:
        own = {case.id: case for item, case in entries if item.backend == backend}
        before = {case for name, case in failed if name == backend}
        first = _first(own, before)
        taken = {case.id for case in first}
        rest = richest_first((case for case in own.values() if case.id not in taken), pairs_of, met=first)
        for number, case in enumerate([*first, *rest]):
            work = 0 if case.id in before else work_of(case)
            place[backend, case.id] = (_round(number, len(first), size), work, number)

    def key(entry: Entry) -> tuple[int, int, bool, int, int, bool]:
        item, case = entry
        round_, work, number = place[item.backend, item.case]
        graph = item.execution == Execution.GRAPH.value
        return round_, backends.index(item.backend), case.inference_mode, work, number, graph

    return tuple(item for item, _ in sorted(entries, key=key))


_LITTLE = 10**7
"""Number of products of K and q up to which a case counts as little work."""


def work_of(case: Case) -> int:
    """Order of magnitude of a case's work: 0 for little work; 1 for up to a hundred times as much, and so on."""
    counts = case.new or (case.width,) * len(case.prefixes)
    pairs = sum(new * (prefix + new) for prefix, new in zip(case.prefixes, counts, strict=True))
    products = pairs * case.heads.q_heads * (case.head_dim + case.rope_dim) * case.layers.count
    work = 0
    while products >= _LITTLE:
        products, work = products // 100, work + 1
    return work


def _first(own: dict[str, Case], failed: Collection[str]) -> list[Case]:
    """Cases that failed, and the further cases that are needed to cover every value."""
    first = [case for case in own.values() if case.id in failed]
    met = {value for case in first for value in values_of(case)}
    for case in richest_first((case for case in own.values() if case.id not in failed), values_of, met=first):
        if values_of(case) <= met:
            break
        met |= values_of(case)
        first.append(case)
    return first


def _round(number: int, first: int, size: int) -> int:
    """Round of an item; round 0 comes before the pairs."""
    if number < first:
        return 0
    return ((number - first) // size + 1).bit_length()


Features = frozenset[Hashable]
T = TypeVar("T")


def richest_first(cases: Iterable[T], features: Callable[[T], Features], met: Iterable[T] = ()) -> Iterator[T]:
    """Cases, or case-runs, ordered so that the next one has the most features that are neither in ``met`` nor in one
    before it; ties keep their order."""
    seen = {feature for case in met for feature in features(case)}
    waiting = [(-len(features(case) - seen), number, case) for number, case in enumerate(cases)]
    heapq.heapify(waiting)
    while waiting:
        _, number, case = heapq.heappop(waiting)
        # It can only have become less since it was counted: where it is still the most, it is the most of all.
        gain = -len(features(case) - seen)
        if waiting and (gain, number) > waiting[0][:2]:
            heapq.heappush(waiting, (gain, number, case))
            continue
        seen |= features(case)
        yield case


def values_of(case: Case) -> Features:
    """Pairs (field, value) of everything that a case tries."""
    return frozenset(_values(case))


def pairs_of(case: Case) -> Features:
    """Every pair of values of two fields that a case has."""
    return frozenset(itertools.combinations(_values(case), 2))


def _values(case: Case) -> list[tuple[str, Hashable]]:
    return [(name, value) for name, value in case.values.items() if name != "seed"]


def reaching(entries: Sequence[Entry], since: Since) -> tuple[Item, ...]:
    """The case-runs that ``since`` selects, in their order: those that reach a change, up to its limit, the most
    valuable first; and further ones, so that each check, each feature, and each mode and execution has one.
    """

    def aspects(entry: Entry) -> Features:
        item, case = entry
        return frozenset((item.backend, each) for each in (*_aspects(item, case), *since.checks.get(item.key, ())))

    def worth(entry: Entry) -> Features:
        return frozenset((entry[0].backend, each) for each in (*pairs_of(entry[1]), *aspects(entry)))

    due = [entry for entry in entries if since.reaches(entry[0].key)]
    if len(due) > since.most:
        due = list(itertools.islice(richest_first(due, worth), since.most))
    chosen = {item for item, _ in due}
    met = {each for entry in due for each in aspects(entry)}
    for entry in richest_first((entry for entry in entries if entry[0] not in chosen), aspects, met=due):
        if aspects(entry) <= met:
            break
        met |= aspects(entry)
        chosen.add(entry[0])
    return tuple(item for item, _ in entries if item in chosen)


def _aspects(item: Item, case: Case) -> Iterator[Hashable]:
    """Mode and execution of a case-run, and the names of the features that its case uses."""
    yield item.mode, item.execution
    yield case.heads.family
    for name, value in case.values.items():
        if name in DEFAULTS and name not in ("seed", "variants") and value != DEFAULTS[name]:
            yield name
    yield from case.variants
