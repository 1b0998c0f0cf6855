"""KV splits: attention to some keys at a time, each with a log-sum-exp; the results are then merged."""

from __future__ import annotations

import re
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
    "ranks": ("ranks3by2",),
}
_SPELLED = re.compile(r"([a-z]*?)(\d+)?(?:by(\d+))?")
_MOST_INTERLEAVED, _MOST_INTERLEAVED_AT_RANDOM = 1 << 16, 40


def _kind_and_numbers(case: Fields) -> tuple[str, int, int]:
    """One of ``contract.merging.SPLIT_KINDS``, R, and I; an empty kind for a case without splits."""
    spelled = _SPELLED.fullmatch(case.kv_splits)
    assert spelled is not None, f"kv_splits={case.kv_splits!r} does not spell KV splits"
    kind, ranks = spelled[1], int(spelled[2] or 0)
    return kind, ranks, int(spelled[3] or (case.page_size if kind == "pages" else 1))


def _kind(case: Fields) -> str:
    """One of ``contract.merging.SPLIT_KINDS``; empty for a case without splits."""
    return _kind_and_numbers(case)[0]


def has_own_pools(case: Fields) -> bool:
    """True if each rank of the case is a separate instance with a separate KV pool."""
    return case.kv_splits.startswith("ranks")


def splits_of(case: Fields) -> tuple[KVSplit, ...]:
    """Splits in the order in which the backend attends to them. The first stores the new rows, and has the sinks."""
    kind, ranks, interleave = _kind_and_numbers(case)
    if kind == "prefix":
        # As servers do it: the new rows first.
        return KVSplit("new"), KVSplit("prefix", sinks=False)
    if ranks:
        own = has_own_pools(case)
        return tuple(KVSplit("rank", rank, ranks, interleave, sinks=rank == 0, own_pool=own) for rank in range(ranks))
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
    parts = splits_of(case)
    if has_own_pools(case):
        dealt = f"{parts[0].interleave} token{'s' * (parts[0].interleave > 1)} of a request at a time"
        return f"{len(parts)} ranks, each with its own pool, request table and log-sum-exp; they get {dealt}{merged}"
    return ", ".join(map(str, parts)) + ", each with its log-sum-exp" + merged


def _declared(declared: Capabilities, case: Fields) -> bool:
    if not case.kv_splits or declared.lse is None:
        return not case.kv_splits
    as_given = case.kv_dtype != "same" and case.mode in declared.precision.new_rows_as_given
    # The tails of a rank's pages are poisoned.
    finite_tails = has_own_pools(case) and case.kv_dtype in declared.needs.finite_page_tails
    return (
        _kind(case) in declared.lse.kinds(case.mode)
        and not as_given
        and not finite_tails
        and (declared.lse.merges or not case.merged_by_backend)
    )


def _fewer(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    kind, ranks, interleave = _kind_and_numbers(case)
    by = f"by{interleave}" if has_own_pools(case) else ""
    yield {"merged_by_backend": False}
    yield {"kv_splits": "whole", "merged_by_backend": False}
    yield from ({"kv_splits": f"{kind}{fewer}{by}"} for fewer in nearer_numbers(ranks or 2, 2))
    if by:
        yield from ({"kv_splits": f"{kind}{ranks}by{fewer}"} for fewer in nearer_numbers(interleave, 1))


def _size(case: Fields, minimal: Fields) -> Size:
    _, ranks, interleave = _kind_and_numbers(case)
    return (case.merged_by_backend, case.kv_splits not in ("", "whole"), ranks, interleave)


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    """One number of ranks for each kind of split. The backend merges KV splits if it can."""
    if not declared.lse:
        return {}
    merged = ("pages", "tokens", "ranks") if declared.lse.merges else ()
    return {"splits": [("", False), *((_COMBINED[kind][0], kind in merged) for kind in declared.lse.kinds(mode))]}


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    return dict(zip(("kv_splits", "merged_by_backend"), row.get("splits", ("", False)), strict=True))


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    kinds = declared.lse.kinds(so_far["rows"].mode) if declared.lse else ()
    if so_far.get("layout") == "shared":
        kinds = tuple(kind for kind in kinds if kind != "ranks")
    as_given = so_far["rows"].mode in declared.precision.new_rows_as_given and declared.kv_pool.kv_dtypes != {"same"}
    kind = draws.one_of(["", *kinds]) if kinds and not as_given else ""
    ranks: int | str = draws.number(2, _MOST_RANKS) if kind in ("pages", "tokens", "ranks") else ""
    if kind == "ranks":
        ranks = f"{ranks}by{draws.number(1, _MOST_INTERLEAVED_AT_RANDOM)}"
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
        Trait("KV splits of one pool", lambda case: case.kv_splits not in ("", "whole") and not has_own_pools(case)),
        Trait(
            "ranks with their own pools",
            has_own_pools,
            excludes={
                "shared prefixes": "a page of a rank has keys of R pages, which requests would have to share",
                "bigpool": "each rank has a pool, and one of that size fills the memory of a device",
            },
        ),
    ),
    wrong=_wrong,
    words=(
        Word(
            r"lse(?:(whole)|(prefix|(?:pages|tokens)(?P<ranks>\d+))(merged)?)",
            lambda match, so_far: {"kv_splits": match[1] or match[2], "merged_by_backend": bool(match[4])},
            lambda case: (
                f"lse{case.kv_splits}{'merged' if case.merged_by_backend else ''}"
                if case.kv_splits and not has_own_pools(case)
                else ""
            ),
            bounds=(Bound("number of KV splits", 2, 4096, "ranks"),),
        ),
        Word(
            r"(ranks(?P<ranks>\d+)by(?P<interleave>\d+))(merged)?",
            lambda match, so_far: {"kv_splits": match[1], "merged_by_backend": bool(match[4])},
            lambda case: f"{case.kv_splits}{'merged' if case.merged_by_backend else ''}" if has_own_pools(case) else "",
            bounds=(
                Bound("number of ranks", 2, 64, "ranks"),
                Bound("consecutive tokens on a rank", 1, _MOST_INTERLEAVED, "interleave"),
            ),
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
            "ranks3by2",
            "Decode context parallelism: 3 ranks, each an instance with a separate KV pool, get 2 tokens of a request "
            "at a time.",
            also=("DCP", "decode context parallelism", "dcp_world_size"),
            page="how-to/context-parallelism.md",
            numbers=True,
        ),
        Entry(
            "ranks3by2merged",
            "The results of 3 ranks with separate KV pools, merged by the backend.",
            page="how-to/context-parallelism.md",
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
