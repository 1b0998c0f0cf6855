"""Rows of a KV pool whose scales a backend reads differently from how they were stored."""

from __future__ import annotations

from collections.abc import Iterator

from ...families.softmax.packed_rows import misread_rows
from .evidence import LONGEST, Evidence, Supposed
from .hint import Level, assumption, hint


def _wrong_over_packed_rows(e: Evidence) -> bool:
    """True if results over packed rows are wrong, whatever keys seem to be attended to: a scale changes the marks,
    too."""
    wrong = e.comparison.all_finite and not e.comparison.right and not e.counts_alone
    return e.expected.data.row_format is not None and wrong and max(e.lens, default=0) <= LONGEST


@assumption(_wrong_over_packed_rows, silences=(Level.PATTERN, Level.PLACE))
def misread_scales_of_rows(e: Evidence) -> Iterator[Supposed]:
    """The step is right for other scales of a head, a key, a block or a part, or for swapped halves of a byte."""
    for text, data in misread_rows(e.expected.data, e.schedule.case.page_size):
        yield Supposed(text, data)


@hint(
    Level.PATTERN,
    when=lambda e: not e.comparison.all_finite and not e.reads_foreign,
    silences=("lost_selected_keys",),
    family="sparse",
)
def other_bytes_of_pages(e: Evidence) -> str:
    """NaN over pages that have the scales of their rows last."""
    packed, size = e.expected.data.row_format, e.schedule.case.page_size
    if packed is None or not packed.format.page_multiple:
        return ""
    inside = packed.nbytes - packed.nbytes_apart
    last = packed.format.page_bytes(size * packed.nbytes) - size * packed.nbytes
    return (
        f"a page of this pool has {size} rows of {inside} bytes with numbers, then {size} rows of "
        f"{packed.nbytes_apart} bytes with scales, then {last} unused bytes: probably numbers, an unused byte or "
        "another page are read as scales"
    )
