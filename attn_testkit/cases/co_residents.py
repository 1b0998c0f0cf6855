"""Co-resident cases of a case: the cases of other modes on its instance, and the case of another instance."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from ..contract import Capabilities, ForwardMode
from .case import Case, Heads
from .draft import Draft
from .features.heads import MOST_USUAL_RATIO, typical_heads
from .features.rows import accepted
from .head_layouts import alike, as_many
from .nearest_declared import nearest_declared
from .rows import MIN_DRAFT_WIDTH, Accepted, Decode, Drafted, Extend, Rows, Verify, room_for, with_draft_width
from .trees import Tree, chain

_MOST_PAGE = 64
_MOST_DIM = 128


def many_heads(declared: Capabilities, like: Heads, most: int) -> Heads:
    """``most`` query heads, or the nearest declared number; MLA for MLA, and another layout otherwise. The only head of
    a layout that has one."""
    if like.layout.kv_heads == "single":
        return like
    groups = [group for group in declared.heads.gqa_ratios if 1 < group <= most]
    if like.layout.values_in_keys:
        return replace(like, q_heads=max(groups, default=like.q_heads))
    if "gqa" in declared.heads.families and groups:
        group = max([group for group in groups if group <= MOST_USUAL_RATIO] or [min(groups)])
        return Heads("gqa", most // group * group, most // group)
    if as_many(declared):
        return Heads(as_many(declared)[0].name, most, most)
    return Heads("mqa", max(groups, default=like.q_heads), 1)


def with_other_heads(declared: Capabilities, case: Case) -> Case:
    """``case`` with other heads, numbers and head dim, where they are declared: several KV heads, where small cases
    have one, so that a stride of heads counts. MLA stays MLA.
    """
    layouts = [heads for heads in typical_heads(declared) if alike(heads, case.heads)]
    of_several = [heads for heads in layouts if heads.family == "gqa"] or layouts
    others = sorted((heads for heads in of_several if heads != case.heads), key=lambda heads: heads.q_heads)
    dims = (
        []
        if case.heads.layout.values_in_keys
        else [dim for dim in declared.heads.head_dims if case.head_dim < dim <= _MOST_DIM]
    )
    return case.with_changes(
        heads=others[len(others) // 2] if others else case.heads,
        head_dim=min(dims, default=case.head_dim),
        dtype=max(declared.precision.dtypes - {"fp32"}, default=case.dtype),
    )


def branching(width: int) -> Tree:
    """``width`` nodes with two children each: code that treats the tree as a chain fails."""
    return Tree(tuple((node - 1) // 2 for node in range(1, width)))


def co_residents(
    case: Case,
    modes: Set[ForwardMode],
    max_q_rows: int,
    max_topk: int = 1,
    max_extend_tokens: int = 1 << 20,
    max_draft_branches: int = 1,
) -> list[Case]:
    """Cases of the other modes that can share a backend instance with ``case``: same shapes, layers and prefixes.

    One for each of ``modes`` but the case's own, in their order; no draft-decode if the rows of the others leave its
    branches no step. ``max_q_rows`` and what follows: as declared.
    """
    width = case.width if case.mode.is_speculative() and case.width > 1 else min(4, max_q_rows)
    counts = accepted("uneven", width, case.bs)
    few = min(width, max_extend_tokens)
    # S is one number of an instance, and the draft-extends have S + 1 rows.
    steps = width - 1 if any(mode.is_speculative() for mode in (*modes, case.mode)) else 3
    rows: dict[ForwardMode, Rows] = {
        ForwardMode.DECODE: Decode(),
        ForwardMode.TARGET_VERIFY: Verify(branching(width) if max_topk > 1 else chain(width)),
        ForwardMode.DRAFT_EXTEND: Accepted(counts, width),
        ForwardMode.DRAFT_EXTEND_V2: Accepted(counts, width, v2=True),
        ForwardMode.EXTEND: _prompts_with_states(case, max_extend_tokens)
        if case.state
        else Extend(accepted("uneven", few, case.bs), few),
    }
    if steps > 1:
        # A draft with an indexer is a chain.
        rows[ForwardMode.DRAFT_DECODE] = Drafted(Draft(min(1 if case.indexer else 2, max_draft_branches), steps))
    others = (rows[mode] for mode in sorted(modes - {case.mode}) if mode in rows)
    # With a slot for each node of a draft, the other modes have the first of them, or a decode has the list.
    return [
        case.with_changes(
            rows=each, state=case.state and case.state.in_mode(each.mode), multi_mode=False, instance_of=case
        )
        for each in others
    ]


_CHUNK = 16
"""Tokens of a chunk if no states are copied."""


def _prompts_with_states(case: Case, most: int) -> Extend:
    """Prompts of which two of three reach the end of a chunk, so that a server copies their states (sglang #34043)."""
    if case.by_slots:
        # Each request has as many new tokens as a draft has nodes, so shapes look like a target-verify (vLLM #53051).
        return Extend((case.width,) * case.bs, case.width)
    chunk = (case.state.snapshots if case.state else 0) or _CHUNK
    turns = (chunk + 1, chunk, 3)
    new = tuple(min(turns[place % len(turns)], most) for place in range(case.bs))
    return Extend(new, room_for(new))


def declared_co_residents(declared: Capabilities, case: Case, modes: Set[ForwardMode]) -> list[Case]:
    """``co_residents`` of these modes, within the declared limits."""
    max_topk = declared.bounds.max_topk if declared.windows.in_trees or case.window < 0 else 1
    most = (declared.bounds.max_q_rows, max_topk, declared.bounds.max_extend_tokens, declared.bounds.max_draft_branches)
    return [nearest_declared(declared, each) for each in co_residents(case, modes, *most)]


def co_resident_of(declared: Capabilities, case: Case) -> Case:
    """The case of another instance in the process, such as a draft model's instance next to its target's. It has other
    heads and other pages, if others are declared, and another width, like an instance for shorter drafts (SGLang's
    ``speculative_adaptive``).
    """
    own = case.heads
    layouts = [heads for heads in typical_heads(declared) if alike(heads, own)]
    heads = next((each for each in layouts if each.q_heads != own.q_heads), own)
    pages = sorted(declared.kv_pool.page_sizes, key=lambda size: (size == case.page_size, size > _MOST_PAGE, size))
    width = case.draft_width // 2
    rows = with_draft_width(case.rows, width) if width >= MIN_DRAFT_WIDTH and case.topk <= 1 else case.rows
    return nearest_declared(declared, case.with_changes(heads=heads, page_size=pages[0], rows=rows))
