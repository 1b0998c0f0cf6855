"""Batches that are narrower than the configured width of an instance: drafts become shorter while a server runs.

vLLM captures graphs of every number of draft tokens on one instance (``num_speculative_tokens_per_batch_size``). SGLang
makes an instance for each number (``speculative_adaptive``), and these exist next to each other:
``cases/co_residents.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ....contract import Capabilities
from ...fields import C, Changes, Fields
from ...rows import MIN_DRAFT_WIDTH, with_draft_width
from .variant import ServerVariant

_LENS = (9, 70, 1)
_WIDEST = 8


def _narrower(case: C) -> list[C]:
    """Cases of half the width and of the least width, which share the instance of a case with this variant."""
    widths = sorted({max(MIN_DRAFT_WIDTH, case.draft_width // 2), MIN_DRAFT_WIDTH}, reverse=True)
    variants = case.variants - {NARROWER_WIDTHS.word}
    return [
        case.with_changes(rows=with_draft_width(case.rows, width), variants=variants, instance_of=case)
        for width in widths
    ]


def shares_widths(case: Fields) -> bool:
    """True for a case whose instance has batches of other widths."""
    return NARROWER_WIDTHS.word in case.variants | (case.instance_of or case).variants


def _fits(declared: Capabilities, case: Fields) -> bool:
    return case.mode in declared.server.narrower_widths and case.draft_width > MIN_DRAFT_WIDTH


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if small.mode not in declared.server.narrower_widths:
        return
    small = small.of_requests(_LENS, padded=1, data="gauss", layout="shuffled")
    widest = _WIDEST if small.draft else min(_WIDEST, declared.bounds.max_q_rows)
    wide = small.with_changes(rows=with_draft_width(small.rows, max(widest, 1)))
    if wide.new:
        wide = wide.with_changes(rows=wide.rows.counted(((widest + 1) // 2, widest, 1)))
    if _fits(declared, wide):
        yield wide.with_changes(variants=frozenset({NARROWER_WIDTHS.word}))


def _context(schedules: Sequence[Any]) -> Changes:
    cases = [each.case for each in schedules]
    widths = {case.draft_width for case in cases if case.mode is cases[0].mode}
    return {"draft_widths": tuple(sorted(widths)) if len(widths) > 1 else ()}


NARROWER_WIDTHS = ServerVariant(
    "narrower_widths",
    "graphs of the width, of half of it and of 2 are captured on one instance and replayed in turn",
    "server.narrower_widths",
    _cases,
    _fits,
    alone=True,
    excludes={
        "branching trees": "servers that change the width of a draft verify chains",
        "states": "pools of states are made for one width",
        "loop": "the stages of a loop have their own widths",
        "multi-mode instance": "the other modes of the instance have one width",
    },
    order=140,
    also=("adaptive speculation", "dynamic speculative decoding", "draft widths"),
    context=_context,
    on_its_instance=_narrower,
)
