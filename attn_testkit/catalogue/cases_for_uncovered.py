"""Small cases for declared values that no other case of a tier tries; each case tries as many of them as it can.
``catalogue/not_covered.py`` says what a case tries. A case is built by successive changes. A change is kept if the case
then tries the new value and still everything that it tried before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..cases.case import Case
from ..cases.features.compression import declared_compressions
from ..cases.features.feature import Covered, Without
from ..cases.features.heads import fewest_latent_heads, other_heads
from ..cases.features.page_size import lens_beyond_a_page
from ..cases.features.rows import most_rows, rows_of, rows_of_two
from ..cases.fields import Changes
from ..cases.head_layouts import per_head
from ..contract import Capabilities, ForwardMode
from .not_covered import DECLARED_VALUES, Value, is_tried, not_covered

MOST_VALUES = 16
"""The largest number of values of one capability of which core tries all. If there are more, it tries powers of two,
the ends, and values that other cases have."""
_MOST_WORK = 1 << 21
"""Number of multiplications of queries with keys above which a case tries no second value."""
_MOST_WORK_OF_ROWS = 1 << 25
"""Most multiplications of the case with the most rows: together with a wide group it shows more than either does by
itself."""

_Entry = tuple[str, Value]


def cases_for_uncovered(
    declared: Capabilities,
    mode: ForwardMode,
    tier: str,
    cases: Sequence[Case],
    fits: Callable[[Case], bool],
    base: Case | None = None,
) -> Iterator[Case]:
    """Cases for values that ``cases`` do not cover in ``mode``, if a case that ``fits`` can try them. ``cases``: not
    empty; the new cases have their seed. ``base``: the case that is changed; by default ``two_request_case``.
    """
    base = (base or two_request_case(declared, mode)).with_seed(cases[0].seed)
    left = sorted((e for e in not_covered(declared, mode, cases) if _wanted(declared, mode, tier, *e)), key=_place)
    while left:
        case, tried = base, list[_Entry]()
        # Of one kind a case tries one value, and none where one would undo what it tries: hundreds are declared.
        done = set[str]()
        for name, value in left:
            if name in done:
                continue
            covered = DECLARED_VALUES[name]
            try:
                changed = case.with_changes(**_made(covered, declared, case, covered.capped(value)))
            except ValueError:  # what the case tries already excludes it
                continue
            most = _MOST_WORK_OF_ROWS if dict(tried).keys() & {"rows", "extend"} else _MOST_WORK
            cheap = not tried or _work(changed) <= most
            supported = cheap and changed.heads.family in declared.heads.families
            if not supported or not _tries(declared, changed, (name, value)):
                continue
            if not all(_tries(declared, changed, each) for each in tried):
                done.add(name)
            elif fits(changed):  # takes longest to say
                case, tried = changed, [*tried, (name, value)]
                done.add(name)
        if not tried:
            return
        left = [entry for entry in left if not _tries(declared, case, entry)]
        yield case


def _place(entry: _Entry) -> tuple[int, int]:
    """Sort key: wide groups come first, so that one of them occurs with the most rows."""
    name, value = entry
    return list(DECLARED_VALUES).index(name), -value if DECLARED_VALUES[name].largest_first and isinstance(
        value, int
    ) else 0


def _wanted(declared: Capabilities, mode: ForwardMode, tier: str, name: str, value: Value) -> bool:
    covered = DECLARED_VALUES[name]
    numbers = [number for number in covered.declared(declared, mode) if isinstance(number, int)]
    if isinstance(covered.make, Without) or tier == "full" or len(numbers) <= MOST_VALUES:
        return not isinstance(covered.make, Without)
    return isinstance(value, int) and (not value & (value - 1) or value in (min(numbers), max(numbers)))


def _tries(declared: Capabilities, case: Case, entry: _Entry) -> bool:
    name, value = entry
    return is_tried(DECLARED_VALUES[name], declared, case, DECLARED_VALUES[name].capped(value))


def _made(covered: Covered, declared: Capabilities, case: Case, value: Value) -> Changes:
    return {} if isinstance(covered.make, Without) else covered.make(declared, case, value)


def _work(case: Case) -> int:
    pairs = sum((prefix + rows) * rows for prefix, rows in zip(case.prefixes, rows_of(case), strict=True))
    return pairs * case.heads.q_heads * (case.head_dim + case.rope_dim)


def two_request_case(declared: Capabilities, mode: ForwardMode) -> Case:
    """Base of the small cases: two requests with the cheapest values that are declared."""
    page = min(declared.kv_pool.page_sizes)
    only_latent = not per_head(declared)
    rows, topk = min(4, most_rows(declared, mode)), min(2, declared.bounds.max_topk)
    return Case(
        rows=rows_of_two(mode, rows, topk),
        heads=fewest_latent_heads(declared) if only_latent else other_heads(declared),
        head_dim=min(declared.heads.head_dims),
        rope_dim=min(declared.heads.mla_rope_dims) if only_latent else 0,
        dtype=min(declared.precision.dtypes),
        kv_dtype=max(declared.kv_pool.kv_dtypes),
        page_size=page,
        prefixes=lens_beyond_a_page(page),
        compression=next(iter(declared_compressions(declared)), None),
        bucket=2,
    )
