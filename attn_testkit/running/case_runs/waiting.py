"""Case-runs that wait for a lane, and the order in which several lanes take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ...cases.case import parse_case
from ..planning.long_cases import effort_of
from ..planning.request import Item

Group = deque[Item]
"""Items of one case, eager and graph, for one worker: they share data and the oracle's answer."""
_COSTLY = 4.0
"""Effort below which a case waits for its turn."""
_SAFETY = 2.0
"""Factor for estimates of effort that are too small. With 1 the last lane of a core of states was busy 8 s longer."""


def groups_of(items: Sequence[Item]) -> list[Group]:
    """Group adjacent items of one case."""
    groups: list[Group] = []
    last = None
    for item in items:
        key = (item.backend, item.case)
        if key != last:
            groups.append(deque())
        groups[-1].append(item)
        last = key
    return groups


class Waiting:
    """The groups that no lane has taken. Lanes take them in their order, and a costly one before its turn.

    One that takes as long as its part of the rest would otherwise keep one lane busy after the others are done. It is
    taken as late as this allows, because simple cases, which come first, have the more readable failures.
    """

    def __init__(self, groups: Sequence[Group], lanes: int, *, early: bool) -> None:
        """``early``: whether groups may be taken before their turn."""
        self._groups, self._lanes, self._early = groups, lanes, early and lanes > 1
        self._first = self._taken = 0
        self._before_turn: set[int] = set()
        """Groups at or after ``_first`` that were taken."""
        self._efforts: dict[int, float] = {}
        self._left = 0.0
        """Effort of all groups that are left."""
        self._costly: dict[tuple[str, bool], list[int]] = {}
        """Groups of a backend, under ``no_grad`` or under ``inference_mode``, the costliest last."""

    def __len__(self) -> int:
        return len(self._groups) - self._taken

    def of_lane(self) -> Iterator[tuple[Item, Item | None]]:
        """Yield the items of one lane, each with the next one if it is known. A lane gets its next group while it is
        busy with the last item of the previous group, so that its worker does not wait. It does not do so if few
        groups are left, because another lane may be free sooner.
        """
        group = self._take()
        while group:
            item = group.popleft()
            if not group and (self._lanes == 1 or len(self) > self._lanes):
                group = self._take()
            yield item, group[0] if group else None
            if not group:
                group = self._take()

    def _take(self) -> Group:
        """The next group; an empty one if none is left."""
        while self._first in self._before_turn:
            self._before_turn.remove(self._first)
            self._first += 1
        if self._first == len(self._groups):
            return deque()
        index = self._first
        if self._early and self._taken >= self._lanes:
            # Not before each lane has its first: reading thousands of ids takes a moment.
            if not self._efforts:
                self._weigh()
            index = self._next()
            self._left -= self._efforts[index]
        self._taken += 1
        self._before_turn.add(index)
        return self._groups[index]

    def _next(self) -> int:
        costly = self._costly[self._kind(self._first)]
        while costly[-1] < self._first or costly[-1] in self._before_turn:
            costly.pop()
        effort = self._efforts[costly[-1]]
        return costly[-1] if effort >= _COSTLY and effort * _SAFETY * self._lanes >= self._left else self._first

    def _weigh(self) -> None:
        left = (index for index in range(self._first, len(self._groups)) if index not in self._before_turn)
        self._efforts = {index: effort_of(parse_case(self._groups[index][0].case)) for index in left}
        self._left = sum(self._efforts.values())
        # Of equal ones the first is taken first.
        for index in sorted(self._efforts, key=lambda index: (self._efforts[index], -index)):
            self._costly.setdefault(self._kind(index), []).append(index)

    def _kind(self, index: int) -> tuple[str, bool]:
        """A worker has one backend, and does not go back from ``inference_mode`` to ``no_grad``."""
        item = self._groups[index][0]
        return item.backend, parse_case(item.case).inference_mode
