"""The search: features are reset in ever smaller groups, then values made smaller, as long as the case still fails.

Each step keeps a case that fails and is nearer to the minimal one, so the search ends. Its cases depend only on the
first one, the capabilities and the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from ..cases.case import Case, parse_case
from ..cases.declared import not_declared
from ..cases.features.feature import Simpler
from ..cases.features.table import FEATURES as ALL
from ..cases.fields import Changes
from ..cases.rows import Extend, room_for
from ..catalogue.minimal import minimal_cases
from ..contract import Capabilities
from ..results.case_result import BAD, CaseResult, Status, failed_check
from .failing_step import case_of_step, failing_step

FEATURES: Mapping[str, Simpler] = {each.name: each.simpler for each in ALL if isinstance(each.simpler, Simpler)}
"""Features by name, in the order in which they are printed, which is the order of a case id's words."""

_SEEDS = (1, 2, 3)
_MOST_FOR_SEEDS = 5
"""Number of features beyond which no other seeds are tried: each pair needs one case-run per seed."""


class TimeUp(Exception):
    """Raised if there is no time for another case-run."""


@dataclass(frozen=True)
class Need:
    """A feature in which the smallest case differs from the minimal one."""

    name: str
    value: str
    minimal: str

    def __str__(self) -> str:
        return f"{self.name} {self.value} (minimal: {self.minimal})"


def changed(case: Case, changes: Changes) -> Case:
    """Change values of a case; in extend, also make room in its graph for its new tokens. Raises ``ValueError`` if
    there is no such case.
    """
    rows, bucket = changes.get("rows", case.rows), changes.get("bucket", case.bucket)
    if isinstance(rows, Extend) and sum(rows.new) > bucket * rows.room:
        changes = {**changes, "rows": replace(rows, room=room_for(rows.new))}
    return case.with_changes(**changes)


def odd_features(case: Case, minimal: Case) -> list[str]:
    """Names of ``FEATURES`` in which a case differs from the minimal one."""
    return [name for name, feature in FEATURES.items() if feature.of(case) != feature.of(minimal)]


def needs(case: Case, minimal: Case) -> list[Need]:
    """Features in which a case differs from the minimal one, with their values."""
    found = ((name, FEATURES[name].value) for name in odd_features(case, minimal))
    return [Need(name, words(case), words(minimal)) for name, words in found]


@dataclass
class Search:
    """The search for the smallest failing case: ``begin``, then ``go_on``. Either may raise ``TimeUp``; ``smallest`` is
    then the smallest so far.
    """

    declared: Capabilities
    run: Callable[[Case], CaseResult]
    """Function that runs one case, whatever the backend does."""
    seconds: float
    """Time limit from the construction of the search; only the first case-run may start after it."""
    any_failure: bool = False
    """True if another check may fail than in the first case."""
    on_result: Callable[[CaseResult, Search], None] = lambda result, search: None
    """Function that is called after each new case-run."""
    clock: Callable[[], float] = time.monotonic
    first: CaseResult | None = None
    smallest: CaseResult | None = None
    """The smallest case that fails as the first did."""
    minimal: Case | None = None
    """The goal: the minimal case of its mode that passes."""
    plain_passes: bool = False
    """True if such a case is known; else ``minimal`` is the minimal case, which fails."""
    needs_steps_before: str = ""
    """The step that fails, if it passes as the first step; empty if it also fails there, or is the first."""
    _results: dict[str, CaseResult] = field(default_factory=dict)
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self.clock()

    @property
    def runs(self) -> int:
        """Number of case-runs so far."""
        return len(self._results)

    def begin(self, case: Case) -> CaseResult:
        """Run the case. If it fails, ``go_on`` minimizes it."""
        self.first = result = self._result(case)
        if result.status in BAD:
            self.smallest = result
        return result

    def go_on(self) -> None:
        """Find the minimal case, then move the failing one toward it until nothing nearer fails in the same way."""
        self._find_plain()
        self._begin_with_the_failing_step()
        while self._make_plain() | self._make_nearer() or self._make_plain_with_seeds():
            pass

    def _find_plain(self) -> None:
        candidates = [
            each for each in minimal_cases(self.declared, self.case.mode) if not not_declared(self.declared, each)
        ]
        for self.minimal in candidates:
            self.plain_passes = self._result(self.minimal).status is Status.PASSED
            if self.plain_passes:
                return
        self.minimal = candidates[0]

    def _begin_with_the_failing_step(self) -> None:
        """Use the failing step as the case's own batch, if it also fails there."""
        assert self.first is not None
        step = failing_step(self.case, self.first)
        alone = case_of_step(self.case, step) if step else None
        if step is None or alone is None or not_declared(self.declared, alone):
            return
        result = self._result(alone)
        if self._fails_alike(result):
            self.smallest = result
        else:
            self.needs_steps_before = f"{step.name} ({step.label})"

    def _fails_alike(self, result: CaseResult) -> bool:
        assert self.first is not None
        return result.status in BAD and (self.any_failure or failed_check(result) == failed_check(self.first))

    def forget(self) -> None:
        """Return to the first case as the smallest."""
        self.smallest = self.first

    @property
    def case(self) -> Case:
        """The smallest case so far."""
        assert self.smallest is not None
        return parse_case(self.smallest.case)

    def odd(self) -> list[str]:
        """Names of features in which the smallest case differs from the minimal one."""
        assert self.minimal is not None
        return odd_features(self.case, self.minimal)

    def _make_plain(self) -> bool:
        """Reset all differing features at once, then halves of them, quarters, and each by itself."""
        found = False
        size = len(self.odd())
        while size:
            odd = self.odd()
            for names in (odd[at : at + size] for at in range(0, len(odd), size)):
                found |= self._keeps(self._with_plain(names))
            size //= 2
        return found

    def _with_plain(self, names: Sequence[str]) -> Case | None:
        """Reset some features of the smallest case. A feature that depends on another waits for it."""
        assert self.minimal is not None
        case, waiting = self.case, list(names)
        while waiting:
            left = []
            for name in waiting:
                try:
                    case = changed(case, FEATURES[name].reset(case, self.minimal))
                except ValueError:
                    left.append(name)
            if len(left) == len(waiting):
                return None
            waiting = left
        return case

    def _make_plain_with_seeds(self) -> bool:
        """Replace two features at once by a seed. The two features may only contribute derived parameters to the
        failure, and a seed changes those too.
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
        """Try smaller values of each feature until none of them fails."""
        assert self.minimal is not None
        found = False
        for name in FEATURES:
            while name in self.odd() and self._one_nearer(FEATURES[name].steps(self.declared, self.case, self.minimal)):
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
        """Store a case as the smallest if it is declared, nearer to the minimal one, and fails like the first one."""
        if case is None or self._cost(case) >= self._cost(self.case) or not_declared(self.declared, case):
            return False
        result = self._result(case)
        if not self._fails_alike(result):
            return False
        self.smallest = result
        return True

    def _cost(self, case: Case) -> tuple[int, list[tuple[float, ...]]]:
        assert self.minimal is not None
        sizes = [feature.size(case, self.minimal) for feature in FEATURES.values()]
        return len(odd_features(case, self.minimal)), sizes

    def _result(self, case: Case) -> CaseResult:
        if case.id not in self._results:
            if self._results and self.clock() - self._begun >= self.seconds:
                raise TimeUp
            self._results[case.id] = self.run(case)
            self.on_result(self._results[case.id], self)
        return self._results[case.id]
