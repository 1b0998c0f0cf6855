"""KV splits: attention to some keys at a time, each with a log-sum-exp; the results are then merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...contract import Capabilities, ForwardMode, KVSplit
from ...glossary import Entry
from ..fields import Changes, Fields
from .feature import (
    Asked,
    Bound,
    Columns,
    Covered,
    Draws,
    Feature,
    Row,
    Size,
    Trait,
    Without,
    Word,
    of_fields,
)
from .numbers import nearer_numbers

_MERGED = "merged by the backend"
_MOST_RANKS = 5
_COMBINED = {
    "whole": ("whole",),
    "prefix": ("prefix",),
    "pages": ("pages2", "pages3"),
    "tokens": ("tokens3", "tokens2"),
}


def _kind(case: Fields) -> str:
    """One of ``contract.merging.SPLIT_KINDS``; empty for a case without splits."""
    return case.kv_splits.rstrip("0123456789")


def splits_of(case: Fields) -> tuple[KVSplit, ...]:
    """Splits in the order in which the backend attends to them. The first stores the new rows, and has the sinks."""
    kind = _kind(case)
    if kind == "prefix":
        # As servers do it: the new rows first.
        return KVSplit("new"), KVSplit("prefix", sinks=False)
    if kind in ("pages", "tokens"):
        ranks = int(case.kv_splits.removeprefix(kind))
        interleave = case.page_size if kind == "pages" else 1
        return tuple(KVSplit("rank", rank, ranks, interleave, sinks=rank == 0) for rank in range(ranks))
    return (KVSplit(),) if kind else ()


def _kinds(declared: Capabilities, mode: ForwardMode) -> tuple[str, ...]:
    kinds = declared.lse.kinds(mode) if declared.lse else ()
    merged = declared.lse is not None and declared.lse.merges and any(kind != "whole" for kind in kinds)
    return (*kinds, _MERGED) if merged else kinds


def _tried(case: Fields) -> str | None:
    return _MERGED if case.merged_by_backend else _kind(case) or None


def _phrase(case: Fields) -> str:
    if not case.kv_splits:
        return ""
    merged = (
        "" if case.kv_splits == "whole" else f"; merged by {'the backend' if case.merged_by_backend else 'the kit'}"
    )
    return ", ".join(map(str, splits_of(case))) + ", each with its log-sum-exp" + merged


def _declared(declared: Capabilities, case: Fields) -> bool:
    if not case.kv_splits or declared.lse is None:
        return not case.kv_splits
    as_given = case.kv_dtype != "same" and case.mode in declared.precision.new_rows_as_given
    return (
        _kind(case) in declared.lse.kinds(case.mode)
        and not as_given
        and (declared.lse.merges or not case.merged_by_backend)
    )


def _fewer(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    kind = _kind(case)
    ranks = case.kv_splits.removeprefix(kind)
    yield {"merged_by_backend": False}
    yield {"kv_splits": "whole", "merged_by_backend": False}
    yield from ({"kv_splits": f"{kind}{fewer}"} for fewer in nearer_numbers(int(ranks or 2), 2))


def _size(case: Fields, minimal: Fields) -> Size:
    ranks = case.kv_splits.removeprefix(_kind(case))
    return (case.merged_by_backend, case.kv_splits not in ("", "whole"), int(ranks or 0))


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    """One number of ranks for each kind of split. The backend merges KV splits if it can."""
    if not declared.lse:
        return {}
    merges = [kind for kind in ("prefix", "pages", "tokens") if declared.lse.merges]
    return {"splits": [("", False), *((_COMBINED[kind][0], kind in merges[1:]) for kind in declared.lse.kinds(mode))]}


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    return dict(zip(("kv_splits", "merged_by_backend"), row.get("splits", ("", False)), strict=True))


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    kinds = declared.lse.kinds(so_far["rows"].mode) if declared.lse else ()
    as_given = so_far["rows"].mode in declared.precision.new_rows_as_given and declared.kv_pool.kv_dtypes != {"same"}
    kind = draws.one_of(["", *kinds]) if kinds and not as_given else ""
    ranks = draws.number(2, _MOST_RANKS) if kind in ("pages", "tokens") else ""
    merges = kind not in ("", "whole") and declared.lse is not None and declared.lse.merges
    merged_by_backend = merges and draws.one_of([False, True])
    if so_far["layers"].groups or so_far["layers"].shapes:
        return {}
    return {"kv_splits": f"{kind}{ranks}", "merged_by_backend": merged_by_backend}


def _wrong(case: Fields) -> str:
    if case.merged_by_backend and case.kv_splits in ("", "whole"):
        return "the backend merges KV splits, but the case has none"
    return ""


KV_SPLITS = Feature(
    name="KV splits",
    order=290,
    fields=("kv_splits", "merged_by_backend"),
    traits=(
        Trait(
            "KV splits",
            lambda case: bool(case.kv_splits),
            excludes={
                "multi-mode instance": "the other modes of the instance attend to all keys at once",
                "loop": "the model of the loop attends to all keys at once",
                "KV groups": "each KV group has its own request table, but KV splits belong to one",
                "heads by layer": "log-sum-exps of all layers are in one tensor",
            },
        ),
        Trait(
            "KV splits of fewer keys",
            lambda case: case.kv_splits not in ("", "whole"),
            excludes={
                "draft-decode": "branches have their own pages, which are not divided among ranks",
            },
        ),
    ),
    wrong=_wrong,
    words=(
        Word(
            r"lse(?:(whole)|(prefix|(?:pages|tokens)(?P<ranks>\d+))(merged)?)",
            lambda match, so_far: {"kv_splits": match[1] or match[2], "merged_by_backend": bool(match[4])},
            lambda case: f"lse{case.kv_splits}{'merged' if case.merged_by_backend else ''}" if case.kv_splits else "",
            bounds=(Bound("number of KV splits", 2, 4096, "ranks"),),
        ),
    ),
    explained=(
        Entry(
            "log-sum-exp",
            "The logarithm of the softmax denominator. With it partial results over different keys can be merged.",
            also=("lse", "LSE", "logsumexp"),
            page="how-to/log-sum-exp.md",
        ),
        Entry(
            "KV splits",
            "The keys of a request are attended in several calls, by prefix and new tokens or by rank, and "
            "the results are merged.",
            also=("parts", "cascade", "context parallelism"),
            page="how-to/log-sum-exp.md",
        ),
        Entry(
            "merged by the backend",
            "The backend's `merge_state` merges the results of KV splits; otherwise the kit does.",
            also=("own merge", "merge", "merge_state"),
            page="how-to/log-sum-exp.md",
        ),
        Entry("lsewhole", "The call over all keys returns its log-sum-exp too.", page="how-to/log-sum-exp.md"),
        Entry("lseprefix", "KV splits: the prefix, and the rows of the step.", page="how-to/log-sum-exp.md"),
        Entry(
            "lsepages2",
            "KV splits of 2 ranks, each of which has every second page.",
            page="how-to/log-sum-exp.md",
            numbers=True,
        ),
        Entry(
            "lsetokens3",
            "KV splits of 3 ranks, each of which has every third token.",
            page="how-to/log-sum-exp.md",
            numbers=True,
        ),
        Entry(
            "lseprefixmerged",
            "The prefix and the rows of the step, merged by the backend.",
            page="how-to/log-sum-exp.md",
        ),
        Entry(
            "lsepages2merged",
            "The pages of 2 ranks, merged by the backend.",
            page="how-to/log-sum-exp.md",
            numbers=True,
        ),
        Entry(
            "lsetokens3merged",
            "The tokens of 3 ranks, merged by the backend.",
            page="how-to/log-sum-exp.md",
            numbers=True,
        ),
    ),
    describe=lambda case: {"kv_splits": _phrase(case)},
    declared=(Asked(lambda case: f"log-sum-exp: {_tried(case)}", _declared),),
    values=Columns(_columns, _of_row, further=("splits",)),
    covered=(
        Covered(
            "kv_splits",
            "log-sum-exp:",
            _kinds,
            lambda declared, case: _tried(case),
            Without("catalogue/kv_splits.py has every kind."),
        ),
    ),
    simpler=of_fields("kv_splits", "merged_by_backend", size=_size, steps=_fewer),
    undeclared=Without("So far no context asks for undeclared KV splits."),
    random=_random,
    varies="instance",
    apply=Without("runner_modes/kv_splits.py is between model and backend: it asks for each split and merges them."),
)
