"""Which claimed values a list of cases tries, counted from the cases themselves.

A value is tried by a case that would show a backend which is wrong at that value: a page size by a request of more than
one page, a number of query rows by a request of that many. It is tried in each mode, because kernels are chosen by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..contract import Capabilities, ForwardMode
from .case import Case
from .parts import claims_of_parts, tried_of_parts
from .plans import context_len

__all__ = ["CLAIMS", "Claim", "Value", "most_rows", "rows_of", "says_untried", "untried"]

Value = int | str | tuple[str, str]
_EQUAL_LOGITS = ("mean", "negative")
"""Data that show no error of a query or a key: they try nothing of a claim."""


@dataclass(frozen=True)
class Claim:
    """One kind of claimed value."""

    words: str
    """Before its values; of a bound, behind its number."""
    claimed: Callable[[Capabilities, ForwardMode], Iterable[Value]]
    """Every value that is claimed in a mode; of a bound the largest alone."""
    tried: Callable[[Capabilities, Case], Value | None]
    """The value that a case tries; None: none."""
    bound: bool = False
    """A larger value that is tried covers the smaller ones."""

    def is_tried(self, claims: Capabilities, case: Case, value: Value) -> bool:
        """Whether ``case`` tries ``value``."""
        return case.data not in _EQUAL_LOGITS and self.covers(self.tried(claims, case), value)

    def covers(self, found: Value | None, value: Value) -> bool:
        """Whether a case that tries ``found`` tries ``value``."""
        if self.bound and isinstance(found, int) and isinstance(value, int):
            return found >= value
        return found == value


def rows_of(case: Case) -> tuple[int, ...]:
    """Query rows of each request of the case's own batch."""
    return case.new if case.mode.is_ragged() else (case.width,) * case.bs


def most_rows(claims: Capabilities, mode: ForwardMode) -> int:
    """As many query rows of one request as are claimed in a mode."""
    if mode is ForwardMode.EXTEND:
        return claims.max_extend_tokens
    return claims.max_q_rows if mode.is_speculative() else 1


def _lens(case: Case) -> Iterator[int]:
    if case.draft:
        # No row sees another branch.
        return (prefix + case.draft.forwards for prefix in case.prefixes)
    return (prefix + rows for prefix, rows in zip(case.prefixes, rows_of(case), strict=True))


def _is_mla(case: Case) -> bool:
    return case.is_mla


def _of_mla(claims: Capabilities, values: Iterable[int]) -> Iterable[int]:
    return values if "mla" in claims.families else ()


def _of_others(claims: Capabilities, values: Iterable[int]) -> Iterable[int]:
    return values if claims.families - {"mla"} else ()


def _grouped(claims: Capabilities) -> str:
    """The family whose cases try groups: with more KV heads than one a group can also be the wrong one."""
    return next((family for family in ("gqa", "mqa") if family in claims.families), "")


def _groups(claims: Capabilities, mode: ForwardMode) -> Iterable[int]:
    # A group of one is mha.
    return claims.gqa_ratios - {1} if _grouped(claims) else ()


def _group(claims: Capabilities, case: Case) -> int | None:
    return case.heads.q_heads // case.heads.kv_heads if case.heads.family == _grouped(claims) else None


def _page(claims: Capabilities, case: Case) -> int | None:
    return case.page_size if max(_lens(case)) > case.page_size else None


def _kv_layout(claims: Capabilities, case: Case) -> str | None:
    one_head = case.heads.kv_heads == 1 and bool(claims.families - {"mqa", "mla"})
    one_slot = case.page_size == 1 and claims.page_sizes != {1}
    # Of one KV head, in pages of one slot, or in one page, layouts are alike.
    alike = one_head or one_slot or max(_lens(case)) <= case.page_size
    return None if alike and case.kv_layout != "nhd" else case.kv_layout


def _widest_tree(claims: Capabilities, mode: ForwardMode) -> tuple[int, ...]:
    # The children of a node are rows beside it.
    return (max(1, min(claims.max_topk, claims.max_q_rows - 1)),) if mode is ForwardMode.TARGET_VERIFY else ()


def _windowed(case: Case) -> bool:
    return case.window >= 0 and case.window + 1 < max(_lens(case))


def _options(claims: Capabilities, mode: ForwardMode) -> dict[str, bool]:
    """Name -> whether it is claimed."""
    window = mode in claims.sliding_window
    trees = max(_widest_tree(claims, mode), default=1) > 1
    return {
        "sliding window": window,
        "sliding window in trees": window and trees and claims.window_in_trees,
        "soft cap": claims.logit_cap,
        "sinks": claims.sinks,
        "KV groups": claims.kv_groups and not mode.is_draft_decode(),
        "heads by layer": claims.heads_by_layer and bool(claims.families - {"mla"}),
        "layers that are not causal": mode in claims.non_causal,
    }


_HAS: dict[str, Callable[[Case], bool]] = {
    "sliding window": _windowed,
    "sliding window in trees": lambda case: _windowed(case) and case.topk > 1,
    "soft cap": lambda case: case.logit_cap > 0,
    "sinks": lambda case: case.sinks,
    "KV groups": lambda case: case.layers.groups,
    "heads by layer": lambda case: bool(case.layers.shapes),
    "layers that are not causal": lambda case: case.way == "noncausal",
}


def _option(name: str) -> Claim:
    return Claim(
        "",
        lambda claims, mode: (name,) if _options(claims, mode)[name] else (),
        lambda claims, case: name if _HAS[name](case) else None,
    )


CLAIMS: dict[str, Claim] = {
    "rows": Claim(
        "query rows",
        lambda claims, mode: (claims.max_q_rows,) if mode.is_speculative() else (),
        lambda claims, case: max(rows_of(case)),
        bound=True,
    ),
    "extend": Claim(
        "new tokens of a request",
        lambda claims, mode: (claims.max_extend_tokens,) if mode is ForwardMode.EXTEND else (),
        lambda claims, case: max(case.new, default=0),
        bound=True,
    ),
    "topk": Claim("children of a tree node", _widest_tree, lambda claims, case: case.topk, bound=True),
    "branches": Claim(
        "branches of a draft",
        lambda claims, mode: (claims.max_draft_branches,) if mode is ForwardMode.DRAFT_DECODE else (),
        lambda claims, case: case.draft.branches if case.draft else 0,
        bound=True,
    ),
    "family": Claim("family", lambda claims, mode: claims.families, lambda claims, case: case.heads.family),
    "group": Claim("group", _groups, _group),
    "mla_heads": Claim(
        "MLA heads",
        lambda claims, mode: _of_mla(claims, claims.gqa_ratios),
        lambda claims, case: case.heads.q_heads if _is_mla(case) else None,
    ),
    "head_dim": Claim(
        "head dim",
        lambda claims, mode: _of_others(claims, claims.head_dims),
        lambda claims, case: None if _is_mla(case) else case.head_dim,
    ),
    "latent": Claim(
        "MLA latent width",
        lambda claims, mode: _of_mla(claims, claims.head_dims),
        lambda claims, case: case.head_dim if _is_mla(case) else None,
    ),
    "rope": Claim(
        "MLA rope width",
        lambda claims, mode: _of_mla(claims, claims.mla_rope_dims),
        lambda claims, case: case.rope_dim if _is_mla(case) else None,
    ),
    "page": Claim("page size", lambda claims, mode: claims.page_sizes, _page),
    "kv_layout": Claim("KV layout", lambda claims, mode: claims.kv_layouts, _kv_layout),
    "dtypes": Claim(
        "dtype and KV dtype",
        lambda claims, mode: ((dtype, kv) for dtype in claims.dtypes for kv in claims.kv_dtypes),
        lambda claims, case: (case.dtype, case.kv_dtype),
    ),
    **{name: _option(name) for name in _HAS},
    # Of the smallest, where it is not the usual one.
    "window": Claim(
        "sliding window of size",
        lambda claims, mode: {claims.min_window} - {0} if mode in claims.sliding_window else (),
        lambda claims, case: case.window if _windowed(case) else None,
    ),
    "parts": Claim("log-sum-exp:", claims_of_parts, lambda claims, case: tried_of_parts(case)),
    # With the first of the new tokens: how many more there are has no part in it.
    "context": Claim(
        "tokens of context",
        lambda claims, mode: (claims.max_context_len,),
        lambda claims, case: _tokens_of_context(claims, case),
        bound=True,
    ),
}
"""Name -> claim, in the order in which they are read, and are given small cases (``cases/small_cases.py``)."""


def _tokens_of_context(claims: Capabilities, case: Case) -> int:
    """All that are claimed, where the longest request and its new rows fill them."""
    most = max(case.prefixes) + 1
    if most < claims.max_context_len - _REGIONS * case.page_size:
        return most
    return max(most, context_len(case))


_REGIONS = 6
"""Pages that a draft may take behind its prefix."""


def untried(claims: Capabilities, mode: ForwardMode, cases: Sequence[Case]) -> list[tuple[str, Value]]:
    """Claimed values that none of ``cases`` tries in ``mode``: names of ``CLAIMS`` and values, sorted.

    ``cases`` of other modes count for nothing.
    """
    own = [case for case in cases if case.mode is mode and case.data not in _EQUAL_LOGITS]
    lacking: list[tuple[str, Value]] = []
    for name, claim in CLAIMS.items():
        # Hundreds of cases try a few values, and hundreds are claimed.
        found = {claim.tried(claims, case) for case in own}
        values = sorted(claim.claimed(claims, mode), key=_order)
        lacking += [(name, value) for value in values if not any(claim.covers(one, value) for one in found)]
    return lacking


def says_untried(claims: Capabilities, modes: Sequence[ForwardMode], cases: Sequence[Case]) -> tuple[str, ...]:
    """What ``untried`` finds in ``modes``, in words: one phrase for the values of a claim that the same modes lack."""
    lacking: dict[tuple[str, Value | None], list[ForwardMode]] = {}
    for mode in modes:
        own = [case for case in cases if case.mode is mode]
        for name, value in untried(claims, mode, own):
            lacking.setdefault(_words(claims, CLAIMS[name], value, own), []).append(mode)
    phrases: dict[tuple[str, tuple[ForwardMode, ...]], list[Value]] = {}
    for (words, one), where in lacking.items():
        phrases.setdefault((words, tuple(where)), []).extend([] if one is None else [one])
    return tuple(
        " ".join(filter(None, (words, _listed(values))))
        + ("" if len(where) == len(modes) else f" ({', '.join(where)})")
        for (words, where), values in phrases.items()
    )


def _words(claims: Capabilities, claim: Claim, value: Value, own: Sequence[Case]) -> tuple[str, Value | None]:
    """What is lacking, and the value where others may stand beside it."""
    if not claim.bound:
        return claim.words, value
    numbers = (claim.tried(claims, case) for case in own if case.data not in _EQUAL_LOGITS)
    most = max((number for number in numbers if isinstance(number, int)), default=0)
    return f"more than {most:,} of {value:,} {claim.words}", None


def _listed(values: Sequence[Value]) -> str:
    """``2, 4-7, 16``: three numbers and more that follow each other are a range."""
    runs: list[list[Value]] = []
    for value in values:
        last = runs[-1][-1] if runs else None
        if isinstance(value, int) and isinstance(last, int) and value == last + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(_spelled, run) for run in runs)
    return ", ".join(part for group in parts for part in group)


def _spelled(value: Value) -> str:
    return " with ".join(value) if isinstance(value, tuple) else str(value)


def _order(value: Value) -> tuple[int, str]:
    return (value, "") if isinstance(value, int) else (0, _spelled(value))
