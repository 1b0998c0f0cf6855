"""Cases of encoder-only layers whose lengths an array does not have: long, equal, and many sequences."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.features.encoder_only import encodes, kinds_of
from ..cases.rows import Extend, room_for
from ..contract import Capabilities

_SEQUENCES = (
    # Several windows, one whole window, less than a window, and a last window of a row or two.
    ((131, 24, 3, 60), 1, "gauss"),
    # The rows of a bucket, cut differently in each replay (sglang #16902).
    ((35, 35, 35), 0, "gauss"),
    # A wrong key of many shows only with one-hot values.
    ((300,), 2, "one_hot"),
    # More sequences than a block has threads, and a window for each.
    ((1,) * 66 + (2,) * 66, 4, "gauss"),
)
"""Rows of the sequences, padded sequences, data pattern."""


def encoder_cases(declared: Capabilities, base: Case) -> Iterator[Case]:
    """A case of each kind of layers for several batches. ``base``: a case of the mode with small values."""
    for kind in kinds_of(declared, base.mode):
        for lengths, padded, data in _SEQUENCES:
            new = tuple(min(rows, declared.bounds.max_extend_tokens) for rows in lengths)
            case = base.of_requests((0,) * len(new), padded, rows=Extend(new, room_for(new)), data=data)
            yield case.with_changes(**encodes(declared, kind, case.values | {"rows": case.rows}))
