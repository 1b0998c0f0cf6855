"""Cases of memory that another instance hands over: each kind of ranks with each page size, and prompts that end before
a page of the sender, at its end and after it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..cases.case import Case
from ..cases.features.handed import handed_from, kinds_and_pools
from ..contract import Capabilities
from .layer_options import without_options

_SMALLEST = 4
"""Pages of fewer slots are not paired with prompts that end at their end."""


def handed_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, with as little work for each row and key as the declaration allows.

    A prompt that ends inside a page of the sender leaves slots there, which are another page here (vLLM #26759). Two of
    three prompts are also longer than a page here.
    """
    kinds, pages, layouts = kinds_and_pools(declared)
    plain = without_options(declared, small)
    for number, (kind, page) in enumerate(product(kinds, pages)):
        sender = max(page, _SMALLEST)
        larger = max(sender, small.page_size)
        lens = (2 * larger + 3, sender, larger + sender - 1, 1)
        case = plain.of_requests(lens, padded=1, data="gauss", layout="shuffled")
        try:
            handed = handed_from(case, kind, page, layouts[number % len(layouts)])
        except ValueError:
            continue
        yield case.with_changes(handed=handed)
