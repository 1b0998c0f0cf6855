"""Rows of each request: see ``cases/rows.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...contract import BackendContext, Capabilities, ForwardMode
from ...glossary import Entry
from ..draft import Draft
from ..extend import EVEN_WITHOUT_ROWS, LONG_PROMPT, NEW_TOKENS, WITHOUT_ROWS, new_tokens, with_new_tokens
from ..fields import Changes, Fields
from ..rows import Accepted, Decode, Drafted, Extend, Rows, Verify, changed_rows, room_for
from ..trees import Tree, chain
from .feature import (
    Asked,
    Bound,
    Columns,
    Covered,
    Draws,
    Feature,
    OnSteps,
    Outside,
    Row,
    Simpler,
    Size,
    Trait,
    Word,
)
from .fewer_rows import fewer_rows
from .numbers import MOST_REQUESTS, listed, numbers_word, read_numbers

MOST_USUAL_ROWS = 6
"""The most rows of a request in a covering array."""
MOST_ROWS = 256
"""Query rows of a request that are tried if more are declared."""
MOST_NEW_TOKENS = 260
"""Most new tokens of a request in extend: more than two tiles of 128 rows."""
_MOST_RANDOM_ROWS, _MOST_RANDOM_NEW, _MOST_RANDOM_BRANCHES = 12, 70, 4
_ROW_MODES = frozenset({ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2})
_MOST_NODES = 4096
"""Nodes of a tree in a case id."""
_MOST_ASKED = 1024
"""The most rows that a context asks for."""

_TREES: tuple[Tree, ...] = (chain(4), Tree((0, 0, 1, 1, 3)), Tree((0, 1, 0, 3, 0, 5, 1)), Tree((0, 0, 0)))
_DRAFTS = (Draft(1, 4), Draft(2, 3), Draft(1, 2), Draft(4, 2), Draft(3, 6), Draft(1, 7))
_MOST_DRAFTED_IN_SMOKE = 8
"""Rows of a draft, all forwards together: with large pages one of 15 takes as long as all other cases of its mode."""
_WITHOUT_ROWS = (WITHOUT_ROWS, EVEN_WITHOUT_ROWS)
_ACCEPTED = ("uneven", "one", "all")


def rows_of(case: Fields) -> tuple[int, ...]:
    """Query rows of each request of the case's own batch."""
    return case.new if case.mode.is_ragged() else (case.width,) * case.bs


def keys_of(case: Fields) -> Iterator[int]:
    """Keys that the last row of each request sees."""
    if case.draft:
        # No row sees another branch.
        return (prefix + case.draft.forwards for prefix in case.prefixes)
    return (prefix + rows for prefix, rows in zip(case.prefixes, rows_of(case), strict=True))


def most_rows(declared: Capabilities, mode: ForwardMode) -> int:
    """Most query rows of one request that are declared in a mode."""
    if mode is ForwardMode.EXTEND:
        return declared.bounds.max_extend_tokens
    return declared.bounds.max_q_rows if mode.is_speculative() else 1


def accepted(pattern: str, width: int, bs: int) -> tuple[int, ...]:
    """Accepted tokens of each of ``bs`` requests with ``width`` rows: ``one``, ``all`` or ``uneven``."""
    if pattern == "one":
        return (1,) * bs
    if pattern == "all":
        return (width,) * bs
    return tuple(1 + (i * 2) % width for i in range(bs))


def rows_of_two(mode: ForwardMode, rows: int, topk: int) -> Rows:
    """``rows`` rows per request; in modes that list rows, the second request has fewer than the first."""
    if mode is ForwardMode.DECODE:
        return Decode()
    if mode is ForwardMode.DRAFT_DECODE:
        return Drafted(Draft(1, 3))
    if mode is ForwardMode.TARGET_VERIFY:
        # The root has ``topk`` children, and each of them a chain.
        return Verify(Tree(tuple(max(0, node - topk) for node in range(1, rows))))
    new = (rows, min(3, rows - 1 or 1))
    if mode is ForwardMode.EXTEND:
        return Extend(new, room_for(new))
    return Accepted(new, rows, v2=mode is ForwardMode.DRAFT_EXTEND_V2)


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    rows = declared.bounds.max_q_rows
    if mode is ForwardMode.DECODE:
        return {}
    if mode is ForwardMode.EXTEND:
        names = [name for name in NEW_TOKENS if name not in _WITHOUT_ROWS]
        if tier != "core":
            names.remove(LONG_PROMPT)
        lacking = declared.server.takes_requests_without_rows
        return {"new_tokens": names} | ({"without_rows": ["", *_WITHOUT_ROWS]} if lacking else {})
    if mode is ForwardMode.DRAFT_DECODE:
        drafts = [draft for draft in _DRAFTS if tier != "smoke" or len(draft) <= _MOST_DRAFTED_IN_SMOKE]
        return {"draft": [draft for draft in drafts if draft.branches <= declared.bounds.max_draft_branches]}
    if mode is ForwardMode.TARGET_VERIFY:
        chains = [chain(min(n, rows)) for n in (2, 4, 7)]
        trees = [tree for tree in _TREES if len(tree) <= rows and tree.topk <= declared.bounds.max_topk]
        return {"tree": list(dict.fromkeys([*chains, *trees]))}
    widths = sorted({min(n, rows) for n in (2, 4, MOST_USUAL_ROWS)})
    return {"width": widths, "accepted": list(_ACCEPTED)}


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    requests, rows = len(so_far["prefixes"]), so_far["rows"]
    if "new_tokens" in row:
        new = new_tokens(
            row.get("without_rows") or row["new_tokens"],
            requests,
            so_far["page_size"],
            declared.bounds.max_extend_tokens,
        )
        return changed_rows(rows, new=new, room=room_for(new))
    if "accepted" in row:
        return changed_rows(rows, new=accepted(row["accepted"], row["width"], requests), width=row["width"])
    return changed_rows(rows, **{name: row[name] for name in ("tree", "draft") if name in row})


def _declared(declared: Capabilities, case: Fields) -> bool:
    if case.draft:
        return case.draft.branches <= declared.bounds.max_draft_branches
    # The width of an extend is the room of its graph, and not what a request has.
    rows = max(case.new) if case.mode is ForwardMode.EXTEND else case.width
    return rows <= most_rows(declared, case.mode)


def _widest_tree(declared: Capabilities, mode: ForwardMode) -> tuple[int, ...]:
    # The children of a node are rows next to it.
    return (
        (max(1, min(declared.bounds.max_topk, declared.bounds.max_q_rows - 1)),)
        if mode is ForwardMode.TARGET_VERIFY
        else ()
    )


def _is_chain(tree: Tree) -> bool:
    return tree == chain(len(tree))


def _read_counts(match: re.Match[str], so_far: Changes) -> Changes:
    rows = so_far["rows"]
    of = "room" if isinstance(rows, Extend) else "width"
    return changed_rows(rows, **{of: int(match[1]), "new": read_numbers(match[2])})


def _write_tree(case: Fields) -> str:
    return "" if not case.tree or _is_chain(case.tree) else "t" + ".".join(map(str, case.tree.parents))


def _phrases(case: Fields) -> Mapping[str, str]:
    if case.tree:
        kind = "a chain" if case.topk == 1 else "parents " + listed(case.tree.parents)
        return {"tree": f"{len(case.tree)} nodes, {kind}"}
    if case.draft:
        return {"draft": f"{case.draft.branches} branches, {case.draft.steps} steps"}
    if case.mode is ForwardMode.EXTEND:
        rows = f"{sum(case.new)} of {case.bucket * case.width} rows of the graph"
        return {"new": f"new tokens of each request: {listed(case.new)}; {rows}"}
    return {"new": f"accepted tokens of each request: {listed(case.new)} of {case.width} rows"} if case.new else {}


def _value(case: Fields) -> str:
    if case.tree:
        return f"chain of {len(case.tree)}" if _is_chain(case.tree) else "tree " + ".".join(map(str, case.tree.parents))
    if case.draft:
        return f"top-k {case.draft.branches} of {case.draft.steps} steps"
    new = ".".join(map(str, case.new))
    return new if case.mode is ForwardMode.EXTEND else f"{new} of {case.width}"


def _reset(case: Fields, minimal: Fields) -> Changes:
    """Minimal rows. Parts that are a feature of their own, such as chunks, do not change."""
    kept = {name: getattr(case.rows, name) for name in ("rounds", "with_prefix", "chunks") if hasattr(case.rows, name)}
    return changed_rows(minimal.rows.counted(minimal.new * case.bs), **kept)


def _size(case: Fields, minimal: Fields) -> Size:
    if case.tree:
        return (case.topk, len(case.tree))
    if case.draft:
        return (case.draft.branches, case.draft.steps)
    if case.mode is ForwardMode.EXTEND:
        return (max(case.new), sum(case.new), case.width)
    return (len({*case.new, case.width}), case.width, sum(case.width - count for count in case.new))


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    rows, requests = so_far["rows"], len(so_far["prefixes"])
    most = min(declared.bounds.max_q_rows, _MOST_RANDOM_ROWS)
    match rows:
        case Verify():
            parents: list[int] = []
            for node in range(1, draws.number(1, most)):
                room = [
                    parent for parent in range(node - 1, -1, -1) if parents.count(parent) < declared.bounds.max_topk
                ]
                parents.append(draws.one_of(room))
            return changed_rows(rows, tree=Tree(tuple(parents)))
        case Drafted():
            branches = draws.number(1, min(declared.bounds.max_draft_branches, _MOST_RANDOM_BRANCHES))
            return changed_rows(rows, draft=Draft(branches, draws.number(2, 7)))
        case Extend():
            new = draws.numbers((requests, requests), (1, min(declared.bounds.max_extend_tokens, _MOST_RANDOM_NEW)))
            return changed_rows(rows, new=new, room=room_for(new))
        case Accepted():
            width = draws.number(1, most)
            return changed_rows(rows, width=width, new=draws.numbers((requests, requests), (1, width)))
    return {}


def _undeclared_rows(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    rows = declared.bounds.max_q_rows + 1
    if not context.modes & _ROW_MODES or rows > _MOST_ASKED:
        return None
    more = replace(context, num_draft_tokens=rows, max_num_tokens=context.max_bs * rows)
    return f"{rows} query rows per request", more


def _undeclared_tokens(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    tokens = declared.bounds.max_extend_tokens + 1
    if ForwardMode.EXTEND not in context.modes or tokens > _MOST_ASKED:
        return None
    more = replace(context, max_extend_tokens=tokens, max_num_tokens=max(context.max_num_tokens, tokens))
    return f"{tokens} new tokens per request", more


def _undeclared_children(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if ForwardMode.TARGET_VERIFY not in context.modes or declared.bounds.max_topk >= _MOST_ASKED:
        return None
    return f"topk {declared.bounds.max_topk + 1}", replace(context, topk=declared.bounds.max_topk + 1)


def _undeclared_branches(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    branches = declared.bounds.max_draft_branches + 1
    if ForwardMode.DRAFT_DECODE not in context.modes or branches > _MOST_ASKED:
        return None
    more = replace(context, draft_branches=branches, max_num_tokens=context.max_bs * branches)
    return f"draft branches {branches}", more


_UNDECLARED: tuple[Outside, ...] = (_undeclared_rows, _undeclared_children, _undeclared_tokens, _undeclared_branches)


def _wrong(case: Fields) -> str:
    rows = case.rows
    if isinstance(rows, Accepted | Extend) and len(rows.new) != case.bs:
        return f"{rows.new}: there must be one count per request, and there are {case.bs} requests"
    if isinstance(rows, Extend) and sum(rows.new) > case.bucket * rows.room:
        return f"{sum(rows.new)} new tokens are more than the {case.bucket} x {rows.room} rows of their graph"
    return ""


ROWS = Feature(
    name="rows",
    order=80,
    fields=("rows",),
    traits=(
        Trait("requests without rows", lambda case: case.mode is ForwardMode.EXTEND and 0 in case.new),
        Trait("branching trees", lambda case: case.topk > 1),
        Trait("branches of a draft", lambda case: case.draft is not None and case.draft.branches > 1),
    ),
    wrong=_wrong,
    words=(
        Word(
            r"chain(\d+)",
            lambda match, so_far: changed_rows(so_far["rows"], tree=chain(int(match[1]))),
            lambda case: f"chain{len(case.tree)}" if case.tree and _is_chain(case.tree) else "",
            bounds=(Bound("nodes of the chain", 1, _MOST_NODES),),
        ),
        Word(
            r"t(\d+(?:\.\d+)*)",
            lambda match, so_far: changed_rows(so_far["rows"], tree=Tree(tuple(map(int, match[1].split("."))))),
            _write_tree,
            bounds=(Bound("parent of a node", 0, _MOST_NODES, most_listed=_MOST_NODES),),
        ),
        Word(
            r"topk(\d+)steps(\d+)",
            lambda match, so_far: changed_rows(so_far["rows"], draft=Draft(int(match[1]), int(match[2]))),
            lambda case: f"topk{case.draft.branches}steps{case.draft.steps}" if case.draft else "",
            bounds=(Bound("branches of the draft", 1, 1024), Bound("steps of the draft", 1, 1024, 2)),
        ),
        Word(
            r"n(\d+)a([\d.x]+)",
            _read_counts,
            lambda case: f"n{case.width}a{numbers_word(case.new)}" if case.new else "",
            bounds=(
                Bound("rows of a request", 1, 1 << 20),
                Bound("tokens of each request", 0, 1 << 20, 2, most_listed=MOST_REQUESTS, most_together=1 << 24),
            ),
        ),
    ),
    explained=(
        Entry(
            "chain4",
            "target-verify: a draft without branches, here of 4 tokens with the root.",
            also=("chain",),
            numbers=True,
        ),
        Entry(
            "t0.0.1",
            "target-verify: a draft tree, as the parent of each node after the root.",
            also=("tree", "draft tree", "token tree"),
            numbers=True,
        ),
        Entry(
            "n6a1.3",
            "Draft-extend modes: rows per request in the graph, then the accepted tokens of each request. In "
            "extend: rows per request of the bucket, then the new tokens of each request.",
            also=("accepted tokens", "accepted counts"),
            numbers=True,
        ),
        Entry(
            "topk2steps4",
            "draft-decode: 2 branches of 4 tokens per request.",
            also=("draft branches", "branches"),
            numbers=True,
        ),
    ),
    describe=_phrases,
    declared=(
        Asked(lambda case: "as many rows of a request", _declared),
        Asked(
            lambda case: "requests without rows in extend",
            lambda declared, case: (
                0 not in case.new or case.mode is not ForwardMode.EXTEND or declared.server.takes_requests_without_rows
            ),
        ),
        Asked(
            lambda case: f"a tree with {case.topk} children of a node",
            lambda declared, case: case.topk <= declared.bounds.max_topk,
        ),
    ),
    values=Columns(
        _columns,
        _of_row,
        {"new_tokens": ("page_size",)},
        {"without_rows": ("prefixes",)},
        ("without_rows",),
    ),
    covered=(
        Covered(
            "rows",
            "query rows",
            lambda declared, mode: (declared.bounds.max_q_rows,) if mode.is_speculative() else (),
            lambda declared, case: max(rows_of(case)),
            lambda declared, case, rows: {"rows": rows_of_two(case.mode, rows, max(1, case.topk))},
            bound=True,
            most=MOST_ROWS,
        ),
        Covered(
            "extend",
            "new tokens of a request",
            lambda declared, mode: (declared.bounds.max_extend_tokens,) if mode is ForwardMode.EXTEND else (),
            lambda declared, case: max(case.new, default=0),
            lambda declared, case, tokens: {"rows": rows_of_two(case.mode, tokens, 0)},
            bound=True,
            most=MOST_NEW_TOKENS,
        ),
        Covered(
            "topk",
            "children of a tree node",
            _widest_tree,
            lambda declared, case: case.topk,
            lambda declared, case, topk: {"rows": rows_of_two(case.mode, max(case.width, topk + 1), topk)},
            bound=True,
            most=MOST_ROWS - 1,
        ),
        Covered(
            "branches",
            "branches of a draft",
            lambda declared, mode: (declared.bounds.max_draft_branches,) if mode is ForwardMode.DRAFT_DECODE else (),
            lambda declared, case: case.draft.branches if case.draft else 0,
            lambda declared, case, branches: changed_rows(case.rows, draft=Draft(branches, 3)),
            bound=True,
            most=MOST_ROWS,
        ),
    ),
    simpler=Simpler(
        value=_value,
        of=lambda case: (case.width, frozenset(case.new), case.tree, case.draft),
        reset=_reset,
        size=_size,
        steps=fewer_rows,
    ),
    undeclared=_UNDECLARED,
    random=_random,
    varies="step",
    apply=(OnSteps(lambda case, plans: with_new_tokens(case, plans) if case.mode is ForwardMode.EXTEND else plans),),
)
