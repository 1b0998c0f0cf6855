"""Batches narrower than the instance was configured for: drafts become shorter while a server runs.

vLLM captures graphs of every number of draft tokens on one instance (``num_speculative_tokens_per_batch_size``).
SGLang makes an instance for each (``speculative_adaptive``), next to each other: ``cases/co_residents.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....contract import Capabilities
from ...draft import Draft
from ...fields import C, Fields
from ...rows import Accepted, Drafted, Rows, Verify
from ...trees import chain
from .variant import ServerVariant

_LENS = (9, 70, 1)
_WIDEST = 8
MIN_WIDTH = 2
"""Narrower batches are those of other modes: a chain of its root is decode, and a draft of one step has no forward."""


def width_of(case: Fields) -> int:
    """Number that becomes smaller: nodes of a chain, rows of a draft-extend, steps of a draft; 0 in other modes."""
    return case.draft.steps if case.draft else case.width if case.mode.is_speculative() else 0


def rows_of_width(rows: Rows, width: int) -> Rows:
    """Rows of another width: a chain in target-verify. Raises ``ValueError`` in decode and extend."""
    match rows:
        case Verify():
            return Verify(chain(width))
        case Accepted():
            return replace(rows, width=width, new=tuple(min(count, width) for count in rows.new))
        case Drafted():
            return replace(rows, draft=Draft(rows.draft.branches, width))
    raise ValueError(f"rows of {rows.mode} have no width that a server changes")


def narrower(case: C) -> list[C]:
    """Cases of half the width and of the least one, which share the instance of a case with this variant."""
    if NARROWER_WIDTHS.word not in case.variants:
        return []
    widths = sorted({max(MIN_WIDTH, width_of(case) // 2), MIN_WIDTH}, reverse=True)
    variants = case.variants - {NARROWER_WIDTHS.word}
    return [
        case.with_changes(rows=rows_of_width(case.rows, width), variants=variants, instance_of=case) for width in widths
    ]


def shares_widths(case: Fields) -> bool:
    """True for a case whose instance has batches of other widths."""
    return NARROWER_WIDTHS.word in case.variants | (case.instance_of or case).variants


def _fits(declared: Capabilities, case: Fields) -> bool:
    return case.mode in declared.server.narrower_widths and width_of(case) > MIN_WIDTH


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if small.mode not in declared.server.narrower_widths:
        return
    small = small.of_requests(_LENS, padded=1, data="gauss", layout="shuffled")
    widest = _WIDEST if small.draft else min(_WIDEST, declared.max_q_rows)
    wide = small.with_changes(rows=rows_of_width(small.rows, max(widest, 1)))
    if wide.new:
        wide = wide.with_changes(rows=wide.rows.counted(((widest + 1) // 2, widest, 1)))
    if _fits(declared, wide):
        yield wide.with_changes(variants=frozenset({NARROWER_WIDTHS.word}))


NARROWER_WIDTHS = ServerVariant(
    "narrower_widths",
    "graphs of the width, of half of it and of 2 are captured on one instance and replayed in turn",
    "server.narrower_widths",
    _cases,
    _fits,
    alone=True,
    excludes={
        "branching trees": "servers that change the width of a draft verify chains",
        "states": "pools of states have room for one width",
        "loop": "the stages of a loop have their own widths",
        "multi-mode instance": "the other modes of the instance have one width",
    },
    order=140,
)
