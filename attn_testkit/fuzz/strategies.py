"""Random cases of a mode, over everything that is claimed; what Hypothesis shrinks to is the plainest.

Each list begins with its plainest value: a failure ends with few values that are not the first.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from ..cases.as_claimed import as_claimed
from ..cases.case import DATA, LAYOUTS, PADDINGS, Case
from ..cases.draft import Draft
from ..cases.extend import room_for
from ..cases.head_shapes import claimed_shapes
from ..cases.layer_cases import with_shapes
from ..cases.layers import PERIOD, SETTINGS, Layers
from ..cases.plainest import head_layouts, plainest_case
from ..cases.plans import context_len
from ..cases.trees import Tree, chain
from ..cases.ways import ways_that_fit
from ..contract import KV_LAYOUTS, Capabilities, ForwardMode, HeadShape

__all__ = ["differences", "random_cases"]

_MOST_REQUESTS = 5
_MOST_PREFIX = 400
"""Tokens; catalogues try the long ones, and here a case is to be quick."""
_MOST_ROWS = 12
"""Query rows of a request, and nodes of a tree."""
_MOST_NEW = 70
"""New tokens of a request in extend."""
_MOST_SLACK = 4
_MOST_WINDOW = 80
_MOST_FIRST = 6
"""Id of the first layer."""


def random_cases(claims: Capabilities, mode: ForwardMode) -> st.SearchStrategy[Case]:
    """Cases of a mode. Raises ``ValueError`` where the other claims leave none."""
    if not head_layouts(claims):
        raise ValueError(f"{mode} is claimed, and no head layout with it")
    # What is too long for the claims is drawn again: few are, and which depends on all of a case.
    return _cases(claims, mode, _ways(claims, mode)).filter(lambda case: context_len(case) <= claims.max_context_len)


@st.composite
def _cases(draw: st.DrawFn, claims: Capabilities, mode: ForwardMode, ways: list[str]) -> Case:
    heads = draw(st.sampled_from(head_layouts(claims)))
    mla = heads.family == "mla"
    longest = st.one_of(st.integers(0, 20), st.integers(0, _MOST_PREFIX))
    prefixes = tuple(draw(st.lists(longest, min_size=1, max_size=_MOST_REQUESTS)))
    rows = draw(_rows(claims, mode, len(prefixes)))
    slack = draw(st.integers(0, _MOST_SLACK))
    tree = rows.get("tree")
    windowed = mode in claims.sliding_window and (tree is None or tree.topk == 1 or claims.window_in_trees)
    # From one list whatever else is drawn, so that it can be made plain by itself.
    way = draw(st.sampled_from(ways))
    layers = draw(_layers(grouped=claims.kv_groups and not mode.is_draft_decode()))
    # Drawn whatever else is: what needs fewer draws would be taken for plainer.
    parts, shapes = draw(_parts(claims, mode)), draw(_shapes(claims))
    layers = replace(layers, groups=layers.groups and not way)
    case = Case(
        mode=mode,
        heads=heads,
        head_dim=draw(st.sampled_from([d for d in sorted(claims.head_dims) if d <= _widest(claims)])),
        rope_dim=draw(st.sampled_from(sorted(claims.mla_rope_dims))) if mla else 0,
        dtype=draw(st.sampled_from(sorted(claims.dtypes))),
        kv_dtype=draw(st.sampled_from(sorted(claims.kv_dtypes, reverse=True))),
        kv_layout=draw(st.sampled_from([name for name in KV_LAYOUTS if name in claims.kv_layouts])),
        page_size=draw(st.sampled_from(sorted(claims.page_sizes))),
        prefixes=prefixes,
        layout=draw(st.sampled_from(LAYOUTS)),
        data=draw(st.sampled_from(DATA)),
        window=draw(st.one_of(st.just(-1), _windows(claims))) if windowed else -1,
        logit_cap=draw(st.sampled_from([0.0, 1.5])) if claims.logit_cap else 0.0,
        sinks=draw(st.booleans()) if claims.sinks else False,
        layers=layers,
        bucket=len(prefixes) + slack,
        padding=draw(st.sampled_from(PADDINGS)) if slack else "prod",
        seed=draw(st.integers(0, 99)),
        **({} if layers.groups or way else parts),
        **rows,
    )
    if shapes and layers.count >= PERIOD and not case.parts and not way:
        return as_claimed(claims, with_shapes(case, shapes))
    case = as_claimed(claims, case)
    # Layers that are not causal have no window and no tree, which few cases happen to be without.
    plain = replace(case, window=-1, tree=chain(len(case.tree))) if case.tree else replace(case, window=-1)
    fitting = (
        replace(each, way=way) for each in (case, as_claimed(claims, plain)) if way in ways_that_fit(claims, each)
    )
    return next(fitting, case)


def _ways(claims: Capabilities, mode: ForwardMode) -> list[str]:
    """A third of the cases have a way, and the others may have KV groups or parts: no case has two of these."""
    found = ways_that_fit(claims, plainest_case(claims, mode))
    return [""] * (2 * len(found) or 1) + found


def _windows(claims: Capabilities) -> st.SearchStrategy[int]:
    return st.integers(claims.min_window, max(_MOST_WINDOW, claims.min_window))


def _shapes(claims: Capabilities) -> st.SearchStrategy[tuple[HeadShape, HeadShape] | None]:
    """None: all layers have the heads of the case."""
    pairs = claimed_shapes(claims) if claims.heads_by_layer and claims.families - {"mla"} else []
    return st.sampled_from([None, *pairs])


def _parts(claims: Capabilities, mode: ForwardMode) -> st.SearchStrategy[dict[str, Any]]:
    """Whether keys are attended in parts, and which."""
    kinds = claims.lse.kinds(mode) if claims.lse else ()
    as_given = mode in claims.new_rows_as_given and claims.kv_dtypes != {"same"}
    if not kinds or as_given:
        return st.just({})
    found = [st.just({}), *(_of_kind(kind, claims.lse is not None and claims.lse.merges) for kind in kinds)]
    return st.one_of(found)


def _of_kind(kind: str, merges: bool) -> st.SearchStrategy[dict[str, Any]]:
    if kind == "whole":
        return st.just({"parts": kind})
    parts = st.integers(2, 5).map(lambda ranks: f"{kind}{ranks}") if kind != "prefix" else st.just(kind)
    own = st.booleans() if merges else st.just(False)
    return st.fixed_dictionaries({"parts": parts, "own_merge": own})


def _layers(*, grouped: bool) -> st.SearchStrategy[Layers]:
    """The plainest are two layers from 0, in one KV group."""
    counts = sorted(range(1, len(SETTINGS) + 1), key=lambda count: abs(count - Layers().count))
    groups = st.booleans() if grouped else st.just(False)
    drawn = st.tuples(st.sampled_from(counts), st.integers(0, _MOST_FIRST), groups)
    return drawn.map(lambda each: Layers(each[0], each[1], each[2] and each[0] >= PERIOD))


def _widest(claims: Capabilities) -> int:
    # As in the catalogue: wider rows are those of MLA.
    return max(512, min(claims.head_dims))


def _rows(claims: Capabilities, mode: ForwardMode, requests: int) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a case that say which rows a request has."""
    most = min(claims.max_q_rows, _MOST_ROWS)
    if mode is ForwardMode.DECODE:
        return st.just({})
    if mode is ForwardMode.TARGET_VERIFY:
        return _trees(most, claims.max_topk).map(lambda tree: {"tree": tree, "width": len(tree)})
    if mode is ForwardMode.DRAFT_DECODE:
        drafts = st.builds(Draft, st.integers(1, min(claims.max_draft_branches, 4)), st.integers(2, 7))
        return drafts.map(lambda draft: {"draft": draft, "width": len(draft)})
    if mode is ForwardMode.EXTEND:
        each = st.integers(1, min(claims.max_extend_tokens, _MOST_NEW))
        return st.fixed_dictionaries({"new": _each(each, requests), "chunks": st.integers(1, 3)}).map(_with_room)
    return st.integers(1, most).flatmap(
        lambda width: st.fixed_dictionaries(
            {"width": st.just(width), "new": _each(st.integers(1, width), requests)}
        )
    )  # fmt: skip


def _with_room(rows: dict[str, Any]) -> dict[str, Any]:
    return {**rows, "width": room_for(rows["new"])}


def _each(counts: st.SearchStrategy[int], requests: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(counts, min_size=requests, max_size=requests).map(tuple)


@st.composite
def _trees(draw: st.DrawFn, most: int, topk: int) -> Tree:
    """Up to ``most`` nodes of up to ``topk`` children; the plainest is a chain."""
    parents: list[int] = []
    for node in range(1, draw(st.integers(1, most))):
        room = [parent for parent in range(node - 1, -1, -1) if parents.count(parent) < topk]
        parents.append(draw(st.sampled_from(room)))
    return Tree(tuple(parents))


def differences(case: Case, plainest: Case) -> list[str]:
    """Names of what is not as in the plainest case of the mode."""
    return [
        each.name
        for each in fields(case)
        if each.name not in ("mode", "host") and getattr(case, each.name) != getattr(plainest, each.name)
    ]
