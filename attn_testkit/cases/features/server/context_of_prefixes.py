"""A context that counts keys before the step only: drafts of a request at its end have positions past it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...plan import Plan
from ...rows import Verify, with_draft_width
from ...trees import Tree
from .variant import ServerVariant

_PAGES = 4
"""Pages that are full at the cap, so that new tokens begin a page that a table of the context does not have."""
_WIDTH = 4
_TREE = Tree((0, 0, 1))
"""Two branches, of one node and of two."""


def _fits(declared: Capabilities, case: Fields) -> bool:
    return "prefix" in declared.server.context_len and case.draft_width > 0


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if not _fits(declared, small):
        return
    width = _WIDTH if small.draft else min(_WIDTH, declared.bounds.max_q_rows)
    case = small.of_requests((9, _PAGES * small.page_size, 1), padded=1, data="gauss", layout="shuffled")
    case = case.with_changes(rows=with_draft_width(case.rows, width))
    if case.mode is ForwardMode.DRAFT_EXTEND:
        # The request at the cap has rows after it.
        case = case.with_changes(rows=case.rows.counted((1, width, width)))
    yield case.with_changes(variants=frozenset({CONTEXT_OF_PREFIXES.word}))
    if case.tree and declared.bounds.max_topk >= _TREE.topk and declared.bounds.max_q_rows >= len(_TREE):
        # A buffer of tree masks with a column for each token of the context is too small only if all requests of the
        # largest graph are at the cap (sglang #29450).
        full = small.of_requests((_PAGES * small.page_size,) * 2, data="gauss", layout="shuffled")
        yield full.with_changes(rows=Verify(_TREE), variants=frozenset({CONTEXT_OF_PREFIXES.word}))


def _plans(case: Fields, plans: list[Plan]) -> list[Plan]:
    """No request has more keys before its step than the longest of the own batch, which has exactly the cap."""
    cap = max(case.prefixes)
    return [replace(plan, prefixes=tuple(min(prefix, cap) for prefix in plan.prefixes)) for plan in plans]


CONTEXT_OF_PREFIXES = ServerVariant(
    "context_of_prefixes",
    "max_context_len counts keys before the step only, and one request has exactly this many",
    "server.context_len",
    _cases,
    _fits,
    plans=_plans,
    says={"context_len": "prefix"},
    alone=True,
    excludes={
        "far": "no request is near that context",
        "multi-mode instance": "the other modes of the instance count all keys",
        "loop": "the stages of a loop count all keys",
        "states": "layers that keep a state have no page table",
    },
    order=150,
    also=("context cap",),
)
