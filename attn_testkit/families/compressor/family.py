"""Layers that compress keys as a family: the record in which its parts come together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

from ...steps.data import StepData
from ...steps.schedule import Schedule
from ..family import Answer, Family, Question, Supposition
from .compress import Slip, compress
from .data import CompressorData, layers, make_compressor_data
from .memory import COMPRESSOR_POOL

SLIPS: Mapping[Slip, str] = {
    "own group": "a row is made of its own group only, without the group before it",
    "this step": "a row is made only of tokens of this step, without the states of earlier ones",
    "zeros": "tokens that the first group lacks count in the softmax, as scores of 0",
    "halves": "the halves of the columns are exchanged between a group and the group before it",
    "late": "the window of a row is one token early",
    "own position": "a row is rotated by the position of its last token, and not by the first of its group",
    "next group": "a row is rotated by the number of its group, and not by the position of its first token",
    "no rotation": "a row is not rotated",
    "other pairs": "the rotation pairs the first half of the numbers with the second, and not adjacent numbers",
    "no norm": "a row is not normalized",
}
"""Mistakes in words."""
_OF_OVERLAPS = ("own group", "zeros", "halves")


def answer(schedule: Schedule, data: StepData, given: bool) -> Answer:
    """Compressed rows as outputs. The output of a token that completes no group may be any finite number."""
    return _answer(cast(CompressorData, data), "")


def _answer(data: CompressorData, slip: Slip) -> Answer:
    found = compress(data, slip)
    limit = found.limit.masked_fill(~found.ends[:, None], math.inf)
    return Answer(out=found.rows.unsqueeze(2), limit=limit.unsqueeze(2))


def _supposed(schedule: Schedule, data: StepData) -> Iterator[Supposition]:
    data = cast(CompressorData, data)
    for slip, text in SLIPS.items():
        if data.compression.overlaps or slip not in _OF_OVERLAPS:
            yield Supposition(text, _answer(data, slip))


COMPRESSOR = Family(
    name="compressor",
    features=frozenset(
        {"mode", "requests", "heads", "head dim", "dtype", "page size", "keys", "rows", "chunks", "layout",
         "compression", "layers", "padded requests", "padding", "multi_mode", "variants", "seed"}
    ),
    layers=layers,
    data=make_compressor_data,
    memory=COMPRESSOR_POOL,
    answer=answer,
    supposed=_supposed,
    questions=frozenset({Question.NAMED_PATTERNS}),
    poisoned="states of tokens of which no later row is made, and compressed rows",
)  # fmt: skip
