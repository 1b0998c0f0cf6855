"""Named patterns of failure. A hint is given when the evidence fits it, and never invented."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .drafts import only_empty_prefixes
from .evidence import Evidence
from .keys import elsewhere, key_range, masked_too_late, own_rows_mixed, pool_layout, read_twice
from .memory import stored_elsewhere
from .numbers import narrow_products, new_rows, other_scaling, right_keys
from .parameters import other_parameters
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
from .values import computed_nan, nothing_computed, one_row_each, rows_of_other_layers

__all__ = ["Evidence", "hints"]

Pattern = Callable[[Evidence], str]
"""Empty where the evidence does not fit."""

_PATTERNS: tuple[Pattern, ...] = (
    stored_elsewhere,
    rows_of_others,
    rows_of_other_layers,
    uneven_offsets,
    only_empty_prefixes,
    kept_from_before,
    length_threshold,
    part_of_a_head,
    some_heads,
    row_tile,
    one_row_each,
    nothing_computed,
    some_dims,
    last_page,
    masked_too_late,
    later_requests,
    later_by_number,
    pool_layout,
    other_shape,
    elsewhere,
    read_twice,
    own_rows_mixed,
    key_range,
    new_rows,
    narrow_products,
    other_scaling,
    other_parameters,
    right_keys,
    computed_nan,
    only_padded,
)
_SAYS_MORE: Mapping[Pattern, tuple[Pattern, ...]] = {
    stored_elsewhere: _PATTERNS,
    rows_of_other_layers: (later_requests, elsewhere, key_range, right_keys),
    kept_from_before: (nothing_computed, key_range, right_keys),
    nothing_computed: (key_range,),
    own_rows_mixed: (key_range,),
    other_shape: (key_range, right_keys),
    new_rows: (right_keys,),
    narrow_products: (right_keys,),
    other_scaling: (other_parameters, right_keys),
    other_parameters: (right_keys,),
}
"""Pattern -> those behind it that have nothing to say where it fits: they would guess at what it knows."""


def hints(evidence: Evidence) -> list[str]:
    """Every pattern that fits, the most telling first."""
    found: list[str] = []
    silent: set[Pattern] = set()
    for pattern in _PATTERNS:
        if pattern not in silent and (text := pattern(evidence)):
            found.append(text)
            silent.update(_SAYS_MORE.get(pattern, ()))
    return found
