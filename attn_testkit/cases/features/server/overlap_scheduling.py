"""The next step is planned before the device has finished this one, as overlapping schedulers do."""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities
from ...fields import C, Fields
from .variant import ServerVariant

_LENS = (9, 70, 1, 33)


def _fits(declared: Capabilities, case: Fields) -> bool:
    return declared.server.overlap_scheduling


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if _fits(declared, small):
        yield small.of_requests(
            _LENS, padded=1, layout="shuffled", data="gauss", variants=frozenset({"overlap_scheduling"})
        )


OVERLAP_SCHEDULING = ServerVariant(
    "overlap_scheduling",
    "the next step is planned while the device is still busy with this one",
    "server.overlap_scheduling",
    _cases,
    _fits,
    order=110,
    also=("ahead", "overlap scheduling"),
)
