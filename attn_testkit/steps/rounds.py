"""Rounds of target-verify: which drafts are accepted, and how many rounds a step continues.

The same requests are verified again and again, in reverse order of the batch each time, on the states that the round
before left on the instance. A step names the one that runs before it (``Step.follows``). So each run of a step, for a
diagnosis too, is one of its whole chain.
"""

from __future__ import annotations

import numpy as np

from ..cases.case import Case

_MOST = 3


def accepted_nodes(case: Case, index: int, count: int) -> tuple[int, ...]:
    """Accepted nodes of each of ``count`` drafts, for layers with states: all in one batch, as few as can be in
    another, and different ones elsewhere.

    The root of a draft is the token that was sampled last, and servers always accept it: only padded requests commit
    nothing.
    """
    least, most = 1, case.width
    if index in (1, 2):
        return ((most, least)[index - 1],) * count
    first = int(np.random.default_rng([case.digest, index, 0xACCE]).integers(0, 1 << 16))
    return tuple(least + (first + place) % (most + 1 - least) for place in range(count))


def rounds_before(index: int) -> int:
    """Number of rounds that a step continues. The first step of a case has none before it."""
    return index % _MOST


def accepted_before(case: Case, index: int, rounds: int, count: int) -> tuple[int, ...]:
    """Accepted nodes of each draft, so many rounds before a step."""
    return accepted_nodes(case, index + _MOST * rounds, count)
