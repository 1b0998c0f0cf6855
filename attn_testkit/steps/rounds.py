"""Rounds of target-verify: the accepted drafts, and the rounds before a step. The same requests are verified
repeatedly, each time in reverse order of the batch, on the states of the round before. A step names the step that runs
before it (``Step.follows``). So each run of a step, also in a diagnosis, is a run of its whole chain.
"""

from __future__ import annotations

import numpy as np

from ..cases.case import Case

_MOST = 3


def accepted_nodes(case: Case, index: int, count: int) -> tuple[int, ...]:
    """Accepted nodes of each of ``count`` drafts, for layers with states: all nodes in one batch, the fewest possible
    in another, and different numbers in the others. The root of a draft is the last sampled token, which servers always
    accept: only padded requests commit nothing.
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
    """Accepted nodes of each draft, this number of rounds before a step."""
    return accepted_nodes(case, index + _MOST * rounds, count)
