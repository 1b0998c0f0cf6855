"""Rows of a KV pool whose scales a backend reads in another way than they were stored."""

from __future__ import annotations

from collections.abc import Iterator

from ...families.softmax.packed_rows import misread_rows
from .assumed_numbers import right_keys_and_a_wrong_number
from .evidence import Evidence, Supposed
from .hint import assumption


@assumption(lambda e: e.expected.data.row_format is not None and right_keys_and_a_wrong_number(e))
def misread_scales_of_rows(e: Evidence) -> Iterator[Supposed]:
    """The step is right for other scales of a head, a key, a block or a part, or for swapped halves of a byte."""
    for text, data in misread_rows(e.expected.data, e.schedule.case.page_size):
        yield Supposed(text, data)
