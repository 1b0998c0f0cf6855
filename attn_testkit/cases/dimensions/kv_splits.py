"""KV splits: keys that are attended in parts, each with its log-sum-exp, and merged."""

from __future__ import annotations

from collections.abc import Iterator

from ...contract import Capabilities, ForwardMode, KVSplit
from ..fields import Changes, Fields
from .dimension import Asked, Bound, Covered, Dimension, Draws, Size, Without, Word, of_fields
from .numbers import nearer_numbers

__all__ = ["KV_SPLITS", "splits_of"]

_MERGED = "merged by the backend"
_MOST_RANKS = 5


def _kind(case: Fields) -> str:
    """One of ``contract.merging.SPLIT_KINDS``; empty for a case without parts."""
    return case.parts.rstrip("0123456789")


def splits_of(case: Fields) -> tuple[KVSplit, ...]:
    """In the order in which they are attended. The first stores the new rows, and has the sinks."""
    kind = _kind(case)
    if kind == "prefix":
        # As servers do it: the new rows first.
        return KVSplit("new"), KVSplit("prefix", sinks=False)
    if kind in ("pages", "tokens"):
        ranks = int(case.parts.removeprefix(kind))
        interleave = case.page_size if kind == "pages" else 1
        return tuple(KVSplit("rank", rank, ranks, interleave, sinks=rank == 0) for rank in range(ranks))
    return (KVSplit(),) if kind else ()


def _kinds(declared: Capabilities, mode: ForwardMode) -> tuple[str, ...]:
    kinds = declared.lse.kinds(mode) if declared.lse else ()
    merged = declared.lse is not None and declared.lse.merges and any(kind != "whole" for kind in kinds)
    return (*kinds, _MERGED) if merged else kinds


def _tried(case: Fields) -> str | None:
    return _MERGED if case.own_merge else _kind(case) or None


def _phrase(case: Fields) -> str:
    if not case.parts:
        return ""
    merged = "" if case.parts == "whole" else f"; merged by {'the backend' if case.own_merge else 'the kit'}"
    return ", ".join(map(str, splits_of(case))) + ", each with its log-sum-exp" + merged


def _declared(declared: Capabilities, case: Fields) -> bool:
    if not case.parts or declared.lse is None:
        return not case.parts
    as_given = case.kv_dtype != "same" and case.mode in declared.new_rows_as_given
    return _kind(case) in declared.lse.kinds(case.mode) and not as_given and (declared.lse.merges or not case.own_merge)


def _fewer(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    kind = _kind(case)
    ranks = case.parts.removeprefix(kind)
    yield {"own_merge": False}
    yield {"parts": "whole", "own_merge": False}
    yield from ({"parts": f"{kind}{fewer}"} for fewer in nearer_numbers(int(ranks or 2), 2))


def _size(case: Fields, minimal: Fields) -> Size:
    ranks = case.parts.removeprefix(_kind(case))
    return (case.own_merge, case.parts not in ("", "whole"), int(ranks or 0))


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    kinds = declared.lse.kinds(so_far["rows"].mode) if declared.lse else ()
    as_given = so_far["rows"].mode in declared.new_rows_as_given and declared.kv_dtypes != {"same"}
    kind = draws.one_of(["", *kinds]) if kinds and not as_given else ""
    ranks = draws.number(2, _MOST_RANKS) if kind in ("pages", "tokens") else ""
    merges = kind not in ("", "whole") and declared.lse is not None and declared.lse.merges
    own_merge = merges and draws.one_of([False, True])
    if so_far["layers"].groups or so_far["layers"].shapes:
        return {}
    return {"parts": f"{kind}{ranks}", "own_merge": own_merge}


KV_SPLITS = Dimension(
    name="parts",
    fields=("parts", "own_merge"),
    words=(
        Word(
            r"lse(?:(whole)|(prefix|(?:pages|tokens)(?P<ranks>\d+))(merged)?)",
            lambda match, so_far: {"parts": match[1] or match[2], "own_merge": bool(match[4])},
            lambda case: f"lse{case.parts}{'merged' if case.own_merge else ''}" if case.parts else "",
            bounds=(Bound("number of KV splits", 2, 4096, "ranks"),),
        ),
    ),
    describe=lambda case: {"parts": _phrase(case)},
    declared=(Asked(lambda case: f"log-sum-exp: {_tried(case)}", _declared),),
    fit=Without("Cases are made of declared parts."),
    values=Without("cases/kv_splits.py makes its cases, and cases/randomly_combined.py combines them."),
    covered=(
        Covered(
            "parts",
            "log-sum-exp:",
            _kinds,
            lambda declared, case: _tried(case),
            Without("cases/kv_splits.py has every kind."),
        ),
    ),
    simpler=of_fields("parts", "own_merge", size=_size, steps=_fewer),
    undeclared=Without("No context asks for undeclared parts so far."),
    random=_random,
    varies="instance",
    apply=Without("runner_modes/kv_splits.py stands between model and backend, asks for each part and merges."),
)
