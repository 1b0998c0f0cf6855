"""Whether a backend claims what a case asks of it, for cases that no catalogue made from its claims."""

from __future__ import annotations

from collections.abc import Callable

from ..contract import LAYER_WINDOWS, Capabilities, ForwardMode, HeadShape
from .case import Case, Heads
from .catalogue import within_claims
from .parts import tried_of_parts
from .untried import most_rows
from .ways import WAYS

__all__ = ["not_claimed"]


def not_claimed(claims: Capabilities, case: Case) -> str:
    """What of ``case`` is not claimed, in words, the first of ``_ASKED``; empty where all of it is."""
    return next((what(case) for what, holds in _ASKED if not holds(claims, case)), "")


def _shapes(case: Case) -> tuple[tuple[Heads, int], ...]:
    """Heads and head dim of every layer: a case whose layers differ has heads of its own, which no layer has."""
    return tuple((_heads_of(shape), shape.head_dim) for shape in case.layers.shapes) or ((case.heads, case.head_dim),)


def _heads_of(shape: HeadShape) -> Heads:
    if shape.num_qo_heads == shape.num_kv_heads:
        return Heads("mha", shape.num_qo_heads, shape.num_kv_heads)
    return Heads("mqa" if shape.num_kv_heads == 1 else "gqa", shape.num_qo_heads, shape.num_kv_heads)


def _heads_claimed(claims: Capabilities, heads: Heads) -> bool:
    return heads.family in claims.families and (
        heads.family == "mha" or heads.q_heads // heads.kv_heads in claims.gqa_ratios
    )


def _rows_claimed(claims: Capabilities, case: Case) -> bool:
    if case.draft:
        return case.draft.branches <= claims.max_draft_branches
    # The width of an extend is the room of its graph, and not what a request has.
    rows = max(case.new) if case.mode is ForwardMode.EXTEND else case.width
    return rows <= most_rows(claims, case.mode)


def _window_claimed(claims: Capabilities, case: Case) -> bool:
    """A backend whose layers may all differ takes layers that have the same window."""
    if case.window < 0:
        return True
    wider = LAYER_WINDOWS.index(claims.layer_windows) <= LAYER_WINDOWS.index(case.layer_windows)
    return case.mode in claims.sliding_window and case.window >= claims.min_window and wider


def _parts_claimed(claims: Capabilities, case: Case) -> bool:
    if not case.parts or claims.lse is None:
        return not case.parts
    as_given = case.kv_dtype != "same" and case.mode in claims.new_rows_as_given
    kind = case.parts.rstrip("0123456789")
    return kind in claims.lse.kinds(case.mode) and not as_given and (claims.lse.merges or not case.own_merge)


def _loop_claimed(claims: Capabilities, case: Case) -> bool:
    if not case.rounds or not case.draft:
        return True
    modes = claims.eager | claims.graph
    extends = {ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2}
    nodes = 1 + case.draft.branches * case.draft.steps
    return (
        ForwardMode.TARGET_VERIFY in modes
        and bool(extends & modes)
        and case.draft.branches <= claims.max_topk
        and nodes <= claims.max_q_rows
    )


def _way_claimed(claims: Capabilities, case: Case) -> bool:
    return not case.way or WAYS[case.way].needs_no_claim or WAYS[case.way].fits(claims, case)


_Line = tuple[Callable[[Case], str], Callable[[Capabilities, Case], bool]]
_ASKED: tuple[_Line, ...] = (
    (lambda n: f"mode {n.mode}", lambda c, n: n.mode in c.eager | c.graph),
    (lambda n: f"heads {n.heads}", lambda c, n: all(_heads_claimed(c, heads) for heads, _ in _shapes(n))),
    (lambda n: f"head dim {n.head_dim}", lambda c, n: all(dim in c.head_dims for _, dim in _shapes(n))),
    (
        lambda n: f"MLA rope width {n.rope_dim}",
        lambda c, n: n.rope_dim in (c.mla_rope_dims if n.heads.family == "mla" else {0}),
    ),
    (lambda n: f"dtype {n.dtype}", lambda c, n: n.dtype in c.dtypes),
    (lambda n: f"KV dtype {n.kv_dtype}", lambda c, n: n.kv_dtype in c.kv_dtypes),
    (lambda n: f"KV layout {n.kv_layout}", lambda c, n: n.kv_layout in c.kv_layouts),
    (lambda n: f"page size {n.page_size}", lambda c, n: n.page_size in c.page_sizes),
    (lambda n: "as many rows of a request", _rows_claimed),
    (lambda n: f"a tree with {n.topk} children of a node", lambda c, n: n.topk <= c.max_topk),
    (lambda n: f"sliding window {n.window} ({n.layer_windows})", _window_claimed),
    (
        lambda n: "a sliding window with a branching tree",
        lambda c, n: c.window_in_trees or n.window < 0 or n.topk < 2,
    ),
    (
        lambda n: "a softmax scale that is not 1/sqrt(head_dim)",
        lambda c, n: c.any_scaling or n.usual_scaling or n.heads.family == "mla",
    ),
    (lambda n: "soft cap", lambda c, n: c.logit_cap or not n.logit_cap),
    (lambda n: "sinks", lambda c, n: c.sinks or not n.sinks),
    (lambda n: "KV groups", lambda c, n: c.kv_groups or not n.layers.groups),
    (lambda n: "heads by layer", lambda c, n: c.heads_by_layer or not n.layers.shapes),
    (lambda n: f"log-sum-exp: {tried_of_parts(n)}", _parts_claimed),
    (lambda n: "several modes on one instance", lambda c, n: not n.mixed or {n.mode} < c.graph | c.eager),
    (
        lambda n: "a draft without a prefix",
        lambda c, n: c.drafts_without_prefix or n.prefixed or not n.draft,
    ),
    (lambda n: "a lossless loop of this draft", _loop_claimed),
    (lambda n: f"the way {n.way!r}", _way_claimed),
    (lambda n: "as many tokens of context", within_claims),
)
"""(what is asked, whether it is claimed), in the order of a case id's words."""
