"""Batches of odd sizes and lengths: each number of requests up to 48, and each remainder of a length by 128.

A kernel that is wrong for 37 requests, or for lengths that leave 81 by 96, is met by chance or never. The batches here
are cheap: a request has at most 128 keys. ``ci/seldom.py`` prints what all cases of a tier meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..contract import Capabilities
from .case import Case
from .schedule import make_schedule
from .server_variants import usual_page

__all__ = ["BATCHES", "Met", "met_by", "seldom_cases"]

BATCHES: Sequence[tuple[int, int]] = (
    (13, 24), (16, 30), (19, 36), (22, 42), (25, 27), (28, 32), (33, 38), (34, 40), (43, 45), (46, 48),
)  # fmt: skip
"""(requests, bucket) of each case. Its replays also have the bucket, one less, half of it and one less than that: so
few cases have each number of requests from 11 to 48. Other cases have the smaller ones."""
_LENGTHS = 128


def seldom_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Made of ``small``, a case with little work for each row and key."""
    small = replace(small, page_size=usual_page(declared), data="gauss", layout="shuffled")
    first = 0
    for size, bucket in BATCHES:
        prefixes = tuple((first + number) % _LENGTHS + 1 for number in range(size))
        first += size
        yield small.of_requests(prefixes, padded=bucket - size)


@dataclass(frozen=True)
class Met:
    """Lengths and batch sizes that occur in a replay, or a first eager step, of some cases."""

    lengths: frozenset[int]
    """Keys of a request, its new ones included."""
    sizes: frozenset[int]
    """Live requests of a step."""

    def moduli(self, most: int) -> list[int]:
        """Numbers up to ``most`` by which lengths leave every remainder."""
        return [number for number in range(1, most + 1) if len({length % number for length in self.lengths}) == number]


def met_by(cases: Iterable[Case]) -> Met:
    """Find what the steps of cases meet. This lays out every schedule: a second for hundreds."""
    steps = [step for case in cases for step in make_schedule(case).steps]
    lengths = frozenset(int(length) for step in steps for length in step.lens)
    return Met(lengths, frozenset(len(step.requests) for step in steps))
