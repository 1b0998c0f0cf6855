"""Batch sizes and lengths that the steps of some cases have: ``ci/seldom.py`` prints those of a tier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..cases.case import Case
from .schedule import make_schedule


@dataclass(frozen=True)
class Met:
    """Lengths and batch sizes that occur in a replay, or a first eager step, of some cases."""

    lengths: frozenset[int]
    """Keys of a request, its new ones included."""
    sizes: frozenset[int]
    """Live requests of a step."""

    def moduli(self, most: int) -> list[int]:
        """Divisors up to ``most`` for which the lengths give every remainder."""
        return [number for number in range(1, most + 1) if len({length % number for length in self.lengths}) == number]


def met_by(cases: Iterable[Case]) -> Met:
    """Find the lengths and batch sizes of the steps of cases. This lays out every schedule, which takes a second for
    hundreds of cases."""
    steps = [step for case in cases for step in make_schedule(case).steps]
    lengths = frozenset(int(length) for step in steps for length in step.lens)
    return Met(lengths, frozenset(len(step.requests) for step in steps))
