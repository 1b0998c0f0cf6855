"""The search: dimensions are made plain in ever smaller groups, then values smaller, as long as the case still fails.

Each step keeps a case that fails and is nearer to the plain one, so it ends; which cases are tried follows from the
first one, the claims and the results alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from ..cases.case import Case, parse_case
from ..cases.claimed import not_claimed
from ..cases.dimensions.dimension import Simpler
from ..cases.dimensions.table import DIMENSIONS as ALL
from ..cases.fields import Changes
from ..cases.plainest import plain_cases
from ..cases.rows import Extend, room_for
from ..contract import Capabilities
from ..results import BAD, CaseResult, Status, failed_check

__all__ = ["DIMENSIONS", "Need", "Search", "TimeUp", "changed", "needs", "odd_dimensions"]

DIMENSIONS: Mapping[str, Simpler] = {each.name: each.simpler for each in ALL if isinstance(each.simpler, Simpler)}
"""By name, in the order in which they are printed: that of a case id's words."""

_SEEDS = (1, 2, 3)
_MOST_FOR_SEEDS = 5
"""Dimensions beyond which no other seeds are tried: each pair of them takes a case-run for each seed."""


class TimeUp(Exception):
    """No more case-runs."""


@dataclass(frozen=True)
class Need:
    """A dimension in which the smallest case is not plain."""

    name: str
    value: str
    plain: str

    def __str__(self) -> str:
        return f"{self.name} {self.value} (plain: {self.plain})"


def changed(case: Case, changes: Changes) -> Case:
    """The case with other values, and in extend with the room in its graph that its new tokens need. Raises
    ``ValueError`` if there is no such case.
    """
    rows, bucket = changes.get("rows", case.rows), changes.get("bucket", case.bucket)
    if isinstance(rows, Extend) and sum(rows.new) > bucket * rows.room:
        changes = {**changes, "rows": replace(rows, room=room_for(rows.new))}
    return replace(case, **changes)


def odd_dimensions(case: Case, plain: Case) -> list[str]:
    """Names of ``DIMENSIONS`` in which a case differs from the plain one."""
    return [name for name, dimension in DIMENSIONS.items() if dimension.of(case) != dimension.of(plain)]


def needs(case: Case, plain: Case) -> list[Need]:
    """The same with their values."""
    found = ((name, DIMENSIONS[name].value) for name in odd_dimensions(case, plain))
    return [Need(name, words(case), words(plain)) for name, words in found]


@dataclass
class Search:
    """One failing case-run made small: ``begin``, then ``go_on``. Either may raise ``TimeUp``; ``smallest`` is then the
    smallest so far.
    """

    claims: Capabilities
    run: Callable[[Case], CaseResult]
    """One case-run, whatever the backend does."""
    seconds: float
    """From when the search is made; no case-run but the first begins after them."""
    any_failure: bool = False
    """Whether another check may fail than in the first case."""
    on_result: Callable[[CaseResult, Search], None] = lambda result, search: None
    """Called after each case-run that was new."""
    clock: Callable[[], float] = time.monotonic
    first: CaseResult | None = None
    smallest: CaseResult | None = None
    """The smallest case that fails as the first did."""
    plain: Case | None = None
    """What the case is made small towards: the plainest case of its mode that passes."""
    plain_passes: bool = False
    """Whether there is one, as far as is known; without it ``plain`` is the plainest case, which fails."""
    _results: dict[str, CaseResult] = field(default_factory=dict)
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self.clock()

    @property
    def runs(self) -> int:
        """Case-runs so far."""
        return len(self._results)

    def begin(self, case: Case) -> CaseResult:
        """Run the case. Where it fails, ``go_on`` makes it small."""
        self.first = result = self._result(case)
        if result.status in BAD:
            self.smallest = result
        return result

    def go_on(self) -> None:
        """Find the plain case, then make the failing one smaller until nothing nearer to it fails alike."""
        self._find_plain()
        while self._make_plain() | self._make_nearer() or self._make_plain_with_seeds():
            pass

    def _find_plain(self) -> None:
        candidates = [each for each in plain_cases(self.claims, self.case.mode) if not not_claimed(self.claims, each)]
        for self.plain in candidates:
            self.plain_passes = self._result(self.plain).status is Status.PASSED
            if self.plain_passes:
                return
        self.plain = candidates[0]

    def forget(self) -> None:
        """Take the first case for the smallest again."""
        self.smallest = self.first

    @property
    def case(self) -> Case:
        """The smallest case so far."""
        assert self.smallest is not None
        return parse_case(self.smallest.case)

    def odd(self) -> list[str]:
        """In which dimensions the smallest case is not plain."""
        assert self.plain is not None
        return odd_dimensions(self.case, self.plain)

    def _make_plain(self) -> bool:
        """All dimensions that are not plain at once, then halves of them, quarters, and each alone."""
        found = False
        size = len(self.odd())
        while size:
            for names in _blocks(self.odd(), size):
                found |= self._keeps(self._with_plain(names))
            size //= 2
        return found

    def _with_plain(self, names: Sequence[str]) -> Case | None:
        """The smallest case with the plain values of some dimensions. Those that need another's first wait for it."""
        assert self.plain is not None
        case, waiting = self.case, list(names)
        while waiting:
            left = []
            for name in waiting:
                try:
                    case = changed(case, DIMENSIONS[name].reset(case, self.plain))
                except ValueError:
                    left.append(name)
            if len(left) == len(waiting):
                return None
            waiting = left
        return case

    def _make_plain_with_seeds(self) -> bool:
        """Two dimensions at once for a seed. What an id decides beyond its words may be all that they have to do with
        the failure, and a seed decides it anew.
        """
        odd = self.odd()
        if "seed" in odd or not 2 < len(odd) <= _MOST_FOR_SEEDS:
            return False
        for pair in combinations(odd, 2):
            for seed in _SEEDS:
                case = self._with_plain(pair)
                if case is not None and self._keeps(case.with_seed(seed)):
                    return True
        return False

    def _make_nearer(self) -> bool:
        """Smaller values, of each dimension until none of them fails."""
        assert self.plain is not None
        found = False
        for name in DIMENSIONS:
            while name in self.odd() and self._one_nearer(DIMENSIONS[name].steps(self.claims, self.case, self.plain)):
                found = True
        return found

    def _one_nearer(self, options: Iterable[Changes]) -> bool:
        before = self.case
        for changes in options:
            try:
                case = changed(before, changes)
            except ValueError:
                continue
            if self._keeps(case):
                return True
        return False

    def _keeps(self, case: Case | None) -> bool:
        """Whether a case is nearer to plain, is claimed, and fails like the first one; it is the smallest then."""
        if case is None or self._cost(case) >= self._cost(self.case) or not_claimed(self.claims, case):
            return False
        result = self._result(case)
        if result.status not in BAD or not self._alike(result):
            return False
        self.smallest = result
        return True

    def _alike(self, result: CaseResult) -> bool:
        assert self.first is not None
        return self.any_failure or failed_check(result) == failed_check(self.first)

    def _cost(self, case: Case) -> tuple[int, list[tuple[float, ...]]]:
        assert self.plain is not None
        sizes = [dimension.size(case, self.plain) for dimension in DIMENSIONS.values()]
        return len(odd_dimensions(case, self.plain)), sizes

    def _result(self, case: Case) -> CaseResult:
        if case.id not in self._results:
            if self._results and self.clock() - self._begun >= self.seconds:
                raise TimeUp
            self._results[case.id] = self.run(case)
            self.on_result(self._results[case.id], self)
        return self._results[case.id]


def _blocks(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (names[at : at + size] for at in range(0, len(names), size))
