"""Named patterns of failure. A hint is given when the evidence fits it, and never invented."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .changed import (
    beyond_32_bits,
    later_tiles,
    right_with_fewer_requests,
    right_with_other_layers,
    right_without,
)
from .drafts import only_empty_prefixes
from .evidence import Evidence
from .heads import heads_not_computed, results_of_other_heads
from .keys import (
    beyond_a_slot,
    elsewhere,
    key_range,
    masked_too_late,
    own_rows_mixed,
    pool_layout,
    read_twice,
    weighs_a_little,
)
from .lengths import lengths_of_others
from .memory import stored_elsewhere
from .numbers import narrow_products, new_rows, other_scaling, right_keys, vanished_weights
from .parameters import other_parameters
from .parts import only_empty_parts
from .query_scales import other_query_scale
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
from .unwritten import columns_not_written, last_request_not_written
from .values import computed_nan, nothing_computed, one_row_each, rows_of_other_layers
from .visibility import (
    entered_at_query_offsets,
    last_rows_right,
    positions_of_another_request,
    rows_counted_by_heads,
    rows_of_a_later_tile,
    rows_without_prefix,
    window_of_another_layer,
    window_on_new_rows_alone,
)

__all__ = ["Evidence", "hints"]

Pattern = Callable[[Evidence], str]
"""Empty where the evidence does not fit."""

_PATTERNS: tuple[Pattern, ...] = (
    beyond_32_bits,
    stored_elsewhere,
    entered_at_query_offsets,
    rows_without_prefix,
    rows_of_others,
    positions_of_another_request,
    lengths_of_others,
    rows_of_other_layers,
    results_of_other_heads,
    uneven_offsets,
    only_empty_prefixes,
    only_empty_parts,
    last_request_not_written,
    columns_not_written,
    kept_from_before,
    length_threshold,
    part_of_a_head,
    other_shape,
    right_with_other_layers,
    heads_not_computed,
    some_heads,
    row_tile,
    one_row_each,
    nothing_computed,
    some_dims,
    last_page,
    masked_too_late,
    weighs_a_little,
    later_requests,
    later_by_number,
    pool_layout,
    elsewhere,
    read_twice,
    beyond_a_slot,
    own_rows_mixed,
    window_on_new_rows_alone,
    window_of_another_layer,
    rows_counted_by_heads,
    rows_of_a_later_tile,
    new_rows,
    narrow_products,
    other_query_scale,
    vanished_weights,
    other_scaling,
    other_parameters,
    last_rows_right,
    right_without,
    right_with_fewer_requests,
    later_tiles,
    key_range,
    right_keys,
    computed_nan,
    only_padded,
)
_GUESSES: tuple[Pattern, ...] = (right_without, right_with_fewer_requests, later_tiles, key_range, right_keys)
"""Those that ask for other cases, and those that tell what a wrong number or length may come from."""
_SAYS_MORE: Mapping[Pattern, tuple[Pattern, ...]] = {
    beyond_32_bits: _PATTERNS,
    stored_elsewhere: _PATTERNS,
    rows_without_prefix: _PATTERNS,
    positions_of_another_request: (uneven_offsets, nothing_computed, later_requests, last_page, row_tile, *_GUESSES),
    lengths_of_others: (uneven_offsets, length_threshold, later_requests, last_page, row_tile, *_GUESSES),
    rows_of_other_layers: (later_requests, elsewhere, *_GUESSES),
    kept_from_before: (nothing_computed, key_range, right_keys),
    nothing_computed: (key_range,),
    read_twice: (beyond_a_slot,),
    beyond_a_slot: _GUESSES,
    own_rows_mixed: (key_range,),
    only_empty_parts: (later_requests, last_page, elsewhere, *_GUESSES),
    last_request_not_written: _GUESSES,
    columns_not_written: (part_of_a_head, some_dims, *_GUESSES),
    some_dims: (key_range, right_keys),
    other_shape: (right_with_other_layers, some_heads, *_GUESSES),
    right_with_other_layers: (some_heads, elsewhere, read_twice, later_requests, last_page, *_GUESSES),
    heads_not_computed: (some_heads, *_GUESSES),
    some_heads: (elsewhere,),
    entered_at_query_offsets: (rows_of_others, uneven_offsets, later_requests, elsewhere, *_GUESSES),
    results_of_other_heads: (some_heads, one_row_each, later_requests, *_GUESSES),
    later_by_number: _GUESSES,
    window_on_new_rows_alone: (window_of_another_layer, *_GUESSES),
    window_of_another_layer: _GUESSES,
    rows_counted_by_heads: (rows_of_a_later_tile, *_GUESSES),
    rows_of_a_later_tile: _GUESSES,
    last_rows_right: _GUESSES,
    new_rows: _GUESSES,
    narrow_products: _GUESSES,
    other_query_scale: (other_scaling, other_parameters, *_GUESSES),
    vanished_weights: (other_scaling, other_parameters, *_GUESSES),
    other_scaling: (other_parameters, *_GUESSES),
    other_parameters: _GUESSES,
    right_without: _GUESSES[1:],
    right_with_fewer_requests: (key_range, right_keys),
    later_tiles: (key_range, right_keys),
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
