"""Batches of odd sizes and lengths: each number of requests up to 48, and each remainder of a length by 128.

A kernel that is wrong only for 37 requests, or for lengths with remainder 81 by 96, would be found by chance or never.
The batches here are cheap: a request has at most 128 keys. ``ci/seldom.py`` prints the batch sizes and remainders of
all cases of a tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..cases.case import Case
from ..cases.features.server.table import usual_page
from ..contract import Capabilities

BATCHES: Sequence[tuple[int, int]] = (
    (13, 24), (16, 30), (19, 36), (22, 42), (25, 27), (28, 32), (33, 38), (34, 40), (43, 45), (46, 48),
)  # fmt: skip
"""(requests, bucket) of each case. Its replays also run with the bucket size, one less, half of it, and one less than
half. So a few cases have each number of requests from 11 to 48. Other cases have smaller numbers."""
_LENGTHS = 128


def seldom_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, a case with little work for each row and key."""
    small = small.with_changes(page_size=usual_page(declared), data="gauss", layout="shuffled")
    first = 0
    for size, bucket in BATCHES:
        prefixes = tuple((first + number) % _LENGTHS + 1 for number in range(size))
        first += size
        yield small.of_requests(prefixes, padded=bucket - size)
