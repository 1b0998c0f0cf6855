"""Named patterns of failure. A hint is given when the evidence fits it, and never invented."""

from __future__ import annotations

from collections.abc import Callable

from .evidence import Evidence
from .keys import elsewhere, key_range, masked_too_late, own_rows_mixed, pool_layout, read_twice
from .numbers import narrow_products, new_rows, other_scaling, right_keys
from .rows import (
    kept_from_before,
    last_page,
    later_by_number,
    later_requests,
    length_threshold,
    only_padded,
    other_shape,
    part_of_a_head,
    row_tile,
    rows_of_others,
    some_dims,
    some_heads,
    uneven_offsets,
)

__all__ = ["Evidence", "hints"]

_PATTERNS: tuple[Callable[[Evidence], str], ...] = (
    rows_of_others,
    uneven_offsets,
    kept_from_before,
    length_threshold,
    part_of_a_head,
    some_heads,
    row_tile,
    some_dims,
    last_page,
    masked_too_late,
    later_requests,
    later_by_number,
    pool_layout,
    elsewhere,
    read_twice,
    own_rows_mixed,
    key_range,
    new_rows,
    narrow_products,
    other_scaling,
    other_shape,
    right_keys,
    only_padded,
)


def hints(evidence: Evidence) -> list[str]:
    """Every pattern that fits, the most telling first."""
    return [text for pattern in _PATTERNS if (text := pattern(evidence))]
