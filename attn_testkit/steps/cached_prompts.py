"""Prompts whose states a prefix cache keeps, and the requests that continue them (``StateShape.continues``).

A step of such a case follows one of prompts (``Step.follows``), as a server runs them: the prompts leave states on the
instance, at the end of a chunk if the case has snapshots, and after the whole prompt otherwise. Then other requests
begin with the same tokens and continue the states in their own slots. Several requests may continue one state.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 3
"""Most prompts; this number of rows of the request table belongs to no request of a batch."""


def cached_lengths(prefixes: Sequence[int], chunk: int, room: int) -> tuple[int, ...]:
    """Numbers of tokens after which a state is kept, different and ascending; empty if no request has any.

    ``prefixes``: tokens of each request before the step. ``chunk``: multiples of it can be kept. ``room``: most tokens
    of a prompt. There are half as many states as requests, so that two requests continue one.
    """
    found = sorted({min(each, room) // chunk * chunk for each in prefixes} - {0})
    begun = sum(each >= found[0] for each in prefixes) if found else 0
    most = min(_MOST, max(1, begun // 2), len(found))
    return tuple(found[place * (len(found) - 1) // max(most - 1, 1)] for place in range(most))


def continued_length(prefix: int, lengths: Sequence[int]) -> int:
    """The longest of ``lengths`` that is no longer than ``prefix``; 0 if all are."""
    return max((each for each in lengths if each <= prefix), default=0)
