"""A full context: a request with as many tokens as are declared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..cases.case import CODES, Case
from ..cases.features.server.table import usual_page
from ..cases.layers import Layers
from ..cases.plans import context_len
from ..contract import Capabilities

_LONG, _LONG_OF_MLA = 66_000, 8_192
"""Keys of a case in each mode, if as many are declared; keys of MLA have 576 numbers."""
_SHORT = 300
"""Tokens of context that all cases have anyway."""
_DRAWS = 40
_PAGES_BELOW = 6
"""Pages below the full context: a draft has a region of pages for each branch next to its prefix."""


def full_context_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """A request with as many tokens as are declared, if no other case comes near, and a request with five eighths of
    them, whose keys are not a multiple of a power of two: masks and tables of a fixed size end or wrap there
    (vllm-ascend #6803).
    ``small`` has little work for each row and key.
    """
    most = declared.bounds.max_context_len
    if most <= _SHORT or (most > _LONG_OF_MLA if small.heads.layout.wide_rows else most > _LONG):
        return
    two = small.of_requests((1, 1), layers=Layers(1), page_size=usual_page(declared))
    # A derived parameter decides whether the request table is wider than the longest request. The longest request that
    # fits is looked for.
    for below, shift in product(range(1, _PAGES_BELOW * two.page_size), range(_DRAWS)):
        near = two.with_changes(prefixes=(most - below, most * 5 // 8 + shift), layout="shuffled", data=CODES)
        if context_len(near) <= most:
            yield near
            return
