"""Cases that stand beside another: those of the other modes on its instance, and that of another instance."""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import replace
from typing import Any

from ..contract import Capabilities, ForwardMode
from .as_claimed import as_claimed
from .case import Case, Heads
from .draft import Draft
from .trees import Tree, chain

__all__ = [
    "MOST_USUAL_RATIO",
    "accepted",
    "branching",
    "claimed_companions",
    "companions",
    "head_layouts",
    "many_heads",
    "nearest",
    "neighbour_of",
    "some_of",
    "unlike",
]

MOST_USUAL_RATIO = 8
"""Query heads a KV head that a covering array goes up to."""
_MOST_PAGE = 64
_MOST_DIM = 128


def head_layouts(claims: Capabilities) -> list[Heads]:
    """The layouts of heads that a covering array tries of these claims."""
    ratios = sorted(claims.gqa_ratios - {1})
    heads: list[Heads] = []
    if "mha" in claims.families:
        heads.append(Heads("mha", 2, 2))
    if "gqa" in claims.families and ratios:
        # The smallest, one that is no power of two, and one large enough to matter.
        odd = [r for r in ratios if r & (r - 1) and r <= MOST_USUAL_RATIO]
        large = [r for r in ratios if r <= MOST_USUAL_RATIO]
        heads += [Heads("gqa", 2 * r, 2) for r in dict.fromkeys([*ratios[:1], *odd[:1], *large[-1:]])]
    if "mqa" in claims.families and ratios:
        heads.append(Heads("mqa", nearest(ratios, 4), 1))
    if "mla" in claims.families:
        wanted = [r for r in sorted(claims.gqa_ratios) if r in (2, 16)] or sorted(claims.gqa_ratios)[:1]
        heads += [Heads("mla", r, 1) for r in wanted]
    return heads


def many_heads(claims: Capabilities, like: Heads, most: int) -> Heads:
    """``most`` query heads, or what is claimed that comes next to it; MLA for MLA, and another layout for any other."""
    groups = [group for group in claims.gqa_ratios if 1 < group <= most]
    if like.family == "mla":
        return Heads("mla", max(groups, default=like.q_heads), 1)
    if "gqa" in claims.families and groups:
        group = max([group for group in groups if group <= MOST_USUAL_RATIO] or [min(groups)])
        return Heads("gqa", most // group * group, most // group)
    if "mha" in claims.families:
        return Heads("mha", most, most)
    return Heads("mqa", max(groups, default=like.q_heads), 1)


def unlike(claims: Capabilities, case: Case) -> Case:
    """``case`` with other heads, numbers and head dim, where they are claimed: several KV heads, where small cases have
    one, so that a stride of heads counts. MLA stays MLA.
    """
    layouts = [heads for heads in head_layouts(claims) if (heads.family == "mla") == case.is_mla]
    of_several = [heads for heads in layouts if heads.family == "gqa"] or layouts
    others = sorted((heads for heads in of_several if heads != case.heads), key=lambda heads: heads.q_heads)
    dims = [] if case.is_mla else [dim for dim in claims.head_dims if case.head_dim < dim <= _MOST_DIM]
    return replace(
        case,
        heads=others[len(others) // 2] if others else case.heads,
        head_dim=min(dims, default=case.head_dim),
        dtype=max(claims.dtypes - {"fp32"}, default=case.dtype),
    )


def nearest(values: Collection[int], to: int) -> int:
    """Of what is claimed, the one that is nearest to a usual one; the smaller of two."""
    return min(values, key=lambda value: (abs(value - to), value))


def some_of(values: Collection[int], count: int) -> list[int]:
    """The smallest, the largest, and some between."""
    values = sorted(values)
    if len(values) <= count:
        return values
    step = (len(values) - 1) / (count - 1)
    return [values[round(i * step)] for i in range(count)]


def branching(width: int) -> Tree:
    """``width`` nodes, two children each: nothing that takes it for a chain gets it right."""
    return Tree(tuple((node - 1) // 2 for node in range(1, width)))


def accepted(pattern: str, width: int, bs: int) -> tuple[int, ...]:
    """Accepted tokens of each of ``bs`` requests with ``width`` rows: ``one``, ``all`` or ``uneven``."""
    if pattern == "one":
        return (1,) * bs
    if pattern == "all":
        return (width,) * bs
    return tuple(1 + (i * 2) % width for i in range(bs))


def companions(
    case: Case,
    modes: Set[ForwardMode],
    max_q_rows: int,
    max_topk: int = 1,
    max_extend_tokens: int = 1 << 20,
    max_draft_branches: int = 1,
) -> list[Case]:
    """Cases of the other modes that can share a backend instance with ``case``: same shapes, layers and prefixes.

    One for each of ``modes`` but the case's own, in their order; for draft-decode none where the others' rows leave its
    branches no step. ``max_q_rows`` and what follows: as claimed.
    """
    width = case.width if case.mode.is_speculative() and case.width > 1 else min(4, max_q_rows)
    bs = case.bs
    others = []
    # S is one number of an instance, and the draft-extends have S + 1 rows.
    steps = width - 1 if any(mode.is_speculative() for mode in (*modes, case.mode)) else 3
    for mode in sorted(modes - {case.mode}):
        changes: dict[str, Any] = {"mode": mode, "tree": None, "new": (), "width": width, "chunks": 1, "mixed": False}
        changes["host"] = case
        if mode is ForwardMode.DRAFT_DECODE:
            if steps > 1:
                draft = Draft(min(2, max_draft_branches), steps)
                others.append(replace(case, **{**changes, "draft": draft, "width": len(draft)}))
            continue
        if mode is ForwardMode.DECODE:
            changes["width"] = 1
        elif mode is ForwardMode.TARGET_VERIFY:
            changes["tree"] = branching(width) if max_topk > 1 else chain(width)
        else:
            if mode is ForwardMode.EXTEND:
                changes["width"] = width = min(width, max_extend_tokens)
            changes["new"] = accepted("uneven", width, bs)
        others.append(replace(case, **changes))
    return others


def claimed_companions(claims: Capabilities, case: Case, modes: Set[ForwardMode]) -> list[Case]:
    """``companions`` of these modes, no larger than is claimed."""
    max_topk = claims.max_topk if claims.window_in_trees or case.window < 0 else 1
    most = (claims.max_q_rows, max_topk, claims.max_extend_tokens, claims.max_draft_branches)
    return [as_claimed(claims, each) for each in companions(case, modes, *most)]


def neighbour_of(claims: Capabilities, case: Case) -> Case:
    """The case of another instance in the process, as a draft model has one beside its target's.

    It has other heads and other pages, where others are claimed.
    """
    own = case.heads
    layouts = [heads for heads in head_layouts(claims) if (heads.family == "mla") == (own.family == "mla")]
    heads = next((each for each in layouts if each.q_heads != own.q_heads), own)
    pages = sorted(claims.page_sizes, key=lambda size: (size == case.page_size, size > _MOST_PAGE, size))
    return as_claimed(claims, replace(case, heads=heads, page_size=pages[0]))
