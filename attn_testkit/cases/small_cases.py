"""One small case for each claimed value that no other case of a tier tries; a case takes as many of them as it can.

What a case tries is asked of the case (``cases/untried.py``): one is built by one change after another, and a change is
kept if the case then tries the value and still everything that it tried before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..contract import Capabilities, ForwardMode
from .case import Case, Heads
from .draft import Draft
from .extend import room_for
from .pool_layouts import usual_layout
from .trees import Tree
from .untried import CLAIMS, Value, most_rows, rows_of, untried

__all__ = ["MOST_NEW_TOKENS", "MOST_ROWS", "MOST_VALUES", "plain_case", "small_cases"]

MOST_ROWS = 256
"""Query rows of a request: where more are claimed, so many are tried."""
MOST_NEW_TOKENS = 260
"""The same for new tokens of a request in extend: more than two tiles of 128 rows."""
MOST_VALUES = 16
"""Of one claim that are all tried in core. Of more powers of two are, the ends, and what the other cases try."""
_MOST_WORK = 1 << 21
"""Multiplications of queries with keys, beyond which a case takes no second value."""
_MOST_WORK_OF_ROWS = 1 << 25
"""The same for the case with the most rows: with a wide group it shows more than either alone."""

_Entry = tuple[str, Value]


def small_cases(
    claims: Capabilities, mode: ForwardMode, tier: str, cases: Sequence[Case], fits: Callable[[Case], bool]
) -> Iterator[Case]:
    """Cases for what ``cases`` leave untried in ``mode``, as far as a case that ``fits`` can try it.

    ``cases``: not empty; their seed is taken.
    """
    left = sorted((e for e in untried(claims, mode, cases) if _wanted(claims, mode, tier, *e)), key=_place)
    while left:
        case, tried = (
            replace(plain_case(claims, mode), seed=cases[0].seed, kv_layout=usual_layout(claims)),
            list[_Entry](),
        )
        for name, value in left:
            changed = _CHANGES[name](claims, case, _capped(name, value))
            most = _MOST_WORK_OF_ROWS if dict(tried).keys() & {"rows", "extend"} else _MOST_WORK
            cheap = not tried or _work(changed) <= most
            claimed = cheap and changed.heads.family in claims.families
            # Whether it fits takes longest to say: last.
            if claimed and all(_tries(claims, changed, each) for each in ((name, value), *tried)) and fits(changed):
                case, tried = changed, [*tried, (name, value)]
        if not tried:
            return
        left = [entry for entry in left if not _tries(claims, case, entry)]
        yield case


def _place(entry: _Entry) -> tuple[int, int]:
    """Wide groups come first, so that one of them meets the most rows."""
    name, value = entry
    return list(CLAIMS).index(name), -value if name in ("group", "mla_heads") and isinstance(value, int) else 0


def _wanted(claims: Capabilities, mode: ForwardMode, tier: str, name: str, value: Value) -> bool:
    numbers = [number for number in CLAIMS[name].claimed(claims, mode) if isinstance(number, int)]
    if name not in _CHANGES or tier == "full" or len(numbers) <= MOST_VALUES:
        return name in _CHANGES
    return isinstance(value, int) and (not value & (value - 1) or value in (min(numbers), max(numbers)))


def _tries(claims: Capabilities, case: Case, entry: _Entry) -> bool:
    name, value = entry
    return CLAIMS[name].is_tried(claims, case, _capped(name, value))


def _capped(name: str, value: Value) -> Any:
    """As much of a bound as cases are made of."""
    most = {"rows": MOST_ROWS, "extend": MOST_NEW_TOKENS, "topk": MOST_ROWS - 1, "branches": MOST_ROWS}.get(name)
    return min(value, most) if most and isinstance(value, int) else value


def _work(case: Case) -> int:
    pairs = sum((prefix + rows) * rows for prefix, rows in zip(case.prefixes, rows_of(case), strict=True))
    return pairs * case.heads.q_heads * (case.head_dim + case.rope_dim)


def plain_case(claims: Capabilities, mode: ForwardMode) -> Case:
    """What values are put into: two requests, of the cheapest that is claimed."""
    page = min(claims.page_sizes)
    is_mla = claims.families == {"mla"}
    rows, topk = min(4, most_rows(claims, mode)), min(2, claims.max_topk)
    return Case(
        mode=mode,
        heads=_mla_heads(claims) if is_mla else _other_heads(claims),
        head_dim=min(claims.head_dims),
        rope_dim=min(claims.mla_rope_dims) if is_mla else 0,
        dtype=min(claims.dtypes),
        kv_dtype=max(claims.kv_dtypes),
        page_size=page,
        prefixes=_lengths(page),
        bucket=2,
        **_rows(mode, rows, topk),
    )


def _lengths(page: int) -> tuple[int, ...]:
    """More than a page and than a tile of 16 keys, and a few."""
    return (max(page, 16) + 5, 3)


def _beyond(case: Case, window: int) -> tuple[int, ...]:
    """The lengths of ``case``, the first of which is more than a window."""
    return (max(case.prefixes[0], window + 1), *case.prefixes[1:])


def _rows(mode: ForwardMode, rows: int, topk: int) -> dict[str, Any]:
    """``rows`` a request; in the modes that list them the second request has fewer than the first."""
    if mode is ForwardMode.DECODE:
        return {}
    if mode is ForwardMode.DRAFT_DECODE:
        return _draft(1)
    if mode is ForwardMode.TARGET_VERIFY:
        # The root has ``topk`` children, and each of them a chain.
        return {"width": rows, "tree": Tree(tuple(max(0, node - topk) for node in range(1, rows)))}
    new = (rows, min(3, rows - 1 or 1))
    return {"width": room_for(new) if mode is ForwardMode.EXTEND else rows, "new": new}


def _draft(branches: int) -> dict[str, Any]:
    draft = Draft(branches, 3)
    return {"draft": draft, "width": len(draft)}


def _mla_heads(claims: Capabilities) -> Heads:
    return Heads("mla", min(claims.gqa_ratios), 1)


def _other_heads(claims: Capabilities) -> Heads:
    """A group of several heads where it costs little: with many rows they are more than a tile."""
    groups = sorted(claims.gqa_ratios - {1})
    if not groups or not claims.families & {"gqa", "mqa"}:
        return Heads("mha", 2, 2)
    return _group(claims, max([group for group in groups if group <= 8], default=groups[0]))


def _group(claims: Capabilities, group: int) -> Heads:
    return Heads("gqa", 2 * group, 2) if "gqa" in claims.families else Heads("mqa", group, 1)


def _with(claims: Capabilities, case: Case, heads: Heads, **changes: Any) -> Case:
    rope = (case.rope_dim or min(claims.mla_rope_dims)) if heads.family == "mla" else 0
    return replace(case, **{"heads": heads, "rope_dim": rope, **changes})


def _of_mla(claims: Capabilities, case: Case, **changes: Any) -> Case:
    return _with(claims, case, case.heads if case.is_mla else _mla_heads(claims), **changes)


def _of_others(claims: Capabilities, case: Case, **changes: Any) -> Case:
    return _with(claims, case, _other_heads(claims) if case.is_mla else case.heads, **changes)


def _with_topk(case: Case, topk: int) -> Case:
    return replace(case, **_rows(case.mode, max(case.width, topk + 1), topk))


_CHANGES: Mapping[str, Callable[[Capabilities, Case, Any], Case]] = {
    "rows": lambda claims, case, rows: replace(case, **_rows(case.mode, rows, max(1, case.topk))),
    "extend": lambda claims, case, tokens: replace(case, **_rows(case.mode, tokens, 0)),
    "topk": lambda claims, case, topk: _with_topk(case, topk),
    "branches": lambda claims, case, branches: replace(case, **_draft(branches)),
    "group": lambda claims, case, group: _with(claims, case, _group(claims, group)),
    "mla_heads": lambda claims, case, heads: _with(claims, case, Heads("mla", heads, 1)),
    "head_dim": lambda claims, case, dim: _of_others(claims, case, head_dim=dim),
    "latent": lambda claims, case, dim: _of_mla(claims, case, head_dim=dim),
    "rope": lambda claims, case, dim: _of_mla(claims, case, rope_dim=dim),
    "page": lambda claims, case, page: replace(case, page_size=page, prefixes=_lengths(page)),
    "dtypes": lambda claims, case, pair: replace(case, dtype=pair[0], kv_dtype=pair[1]),
    "window": lambda claims, case, window: replace(case, window=window, prefixes=_beyond(case, window)),
}
"""Name of a claim -> a case that tries a value of it. Of the others no value is left by the cases of a tier."""
