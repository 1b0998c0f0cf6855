"""``SpanShape``: bidirectional spans of a case, and where each step has them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

SPANS_PATTERN = r"spans(prefix)?(wide)?(bylayer)?"
"""The word of spans in a case id."""
Span = tuple[int, int]
"""First and last position of a span, both included, counted from the request's first token."""
_BLOCK = 32
"""Rows of a block of a diffusion model (LLaDA 2; ``dllm_block_size`` of SGLang)."""
_MOST_BLOCKS = 6
_KINDS = 5


@dataclass(frozen=True)
class SpanShape:
    """The spans of a case; ``contract/spans.py`` has the meaning of each field."""

    of_prefix: bool = False
    """Spans are in the prefix or begin there, too."""
    wide: bool = False
    """True if some spans have more positions than the window of a layer."""
    by_layer: bool = False
    """True if some layers have spans and others do not."""

    def __str__(self) -> str:
        return f"spans{'prefix' * self.of_prefix}{'wide' * self.wide}{'bylayer' * self.by_layer}"

    @classmethod
    def read(cls, match: re.Match[str]) -> SpanShape:
        """The spans of a match of ``SPANS_PATTERN``."""
        return cls(bool(match[1]), bool(match[2]), bool(match[3]))


def spans_of_request(shape: SpanShape, turn: int, prefix: int, new: int, window: int, seed: int) -> tuple[Span, ...]:
    """Spans of a request with ``prefix`` keys and ``new`` rows, ascending. Requests of successive turns differ in their
    spans. Turn 0: adjacent spans from the first row on, like blocks of a diffusion model. 1: no span. 2: spans at the
    first row and at the last, one of a row, and two that are adjacent. 3: a span in the middle. 4: a span that begins
    in the prefix, or all rows if the prefix may have no spans. ``window``: W of the narrowest window, -1 for none. Only
    with ``shape.wide`` are spans longer than W + 1.
    """
    rng = np.random.default_rng(seed)
    most = 1 << 30 if window < 0 or shape.wide else window + 1
    end, kind = prefix + new, turn % _KINDS
    if kind == 1:
        return ()
    found: list[Span] = []
    if shape.of_prefix and prefix > 1:
        first = int(rng.integers(0, prefix - 1))
        found.append((first, min(prefix - 2, first + min(most, 1 + prefix // 2) - 1)))
    if kind == 0 or (kind == 2 and new < _KINDS):
        size = min(_BLOCK, most, max(1, new // 2))
        starts = range(prefix, end, size)[:_MOST_BLOCKS]
        found += [(first, min(first + size, end) - 1) for first in starts]
    elif kind == 2:
        part = min(most, max(1, new // 4))
        found += [(prefix, prefix + part - 1), (prefix + part, prefix + part)]
        found.append((end - min(part, new - part - 1), end - 1))
    elif kind == 3:
        first = prefix + int(rng.integers(0, max(1, new // 3)))
        found.append((first, min(first + most - 1, first + max(1, new // 2), end - 1)))
    else:
        before = min(prefix, int(rng.integers(1, 9))) if shape.of_prefix else 0
        first = prefix - before
        found = [span for span in found if span[1] < first]
        found.append((first, min(first + most - 1, end - 1 - (before > 0 and new > 2))))
    return tuple(found)
