"""Small cases of smoke for declared features that no row of its arrays has: one case for each, in the first mode that
declares it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from ..cases.case import Case
from ..cases.features.server.table import variant_cases
from ..contract import Capabilities, ForwardMode
from .array import array_of
from .cases_for_uncovered import two_request_case
from .indexer_cases import first_selection_cases
from .layer_cases import shaped_cases
from .never_together import features


def feature_cases(declared: Capabilities, mode: ForwardMode, small: Case, cases: Sequence[Case]) -> Iterator[Case]:
    """Cases derived from ``small``, a case with little work for each row and key. ``cases``: those that smoke has in
    the mode."""
    tests = features(declared, mode, small)
    left = {name: test for name, test in tests.items() if not any(map(test, cases))}
    for earlier in ForwardMode if left else ():
        if earlier is mode:
            break
        if earlier in declared.eager | declared.graph:
            others = features(declared, earlier, two_request_case(declared, earlier))
            left = {name: test for name, test in left.items() if name not in others}
    if not left:
        return
    further = array_of(declared, mode, "smoke").further_cases()
    of_fields = chain(shaped_cases(declared, [small]), first_selection_cases(declared, small))
    for each in chain(variant_cases(declared, small), further, of_fields):
        has = {name for name, test in left.items() if test(each)}
        if has:
            yield each
            left = {name: test for name, test in left.items() if name not in has}
