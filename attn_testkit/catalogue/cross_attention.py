"""Cross-attention layers: encoders that are longer and shorter than the decoder's keys, in both places of slots."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.dimensions.heads import other_heads
from ..cases.dimensions.rows import most_rows
from ..cases.layers import Layers
from ..cases.rows import Extend, room_for
from ..cases.server_variants import usual_page
from ..contract import ROW_FORMATS, Capabilities, ForwardMode

_LENS = (2, 40, 9, 17)
_PREFIXES = (0, 40, 9, 0)
"""Prefixes of an extend: two requests begin, and bring their encoder keys."""
_NEW = (7, 5, 1, 20)


def cross_attention_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """One for each declared place of encoder slots, made of ``small``, a case with little work."""
    cross = declared.cross_attention
    # ``small`` has packed rows if no other are declared.
    if small.mode not in cross.modes or small.heads.layout.values_in_keys or small.kv_dtype in ROW_FORMATS:
        return
    small = small.with_changes(heads=other_heads(declared), page_size=usual_page(declared), data="gauss")
    small = small.with_changes(layout="shuffled", sinks=False)
    for place in sorted(cross.encoder_slots):
        case = small.with_changes(layers=Layers(groups=place == "own_group"), encoder_len=2 * small.page_size + 5)
        if small.mode is ForwardMode.EXTEND:
            new = tuple(min(count, most_rows(declared, small.mode)) for count in _NEW)
            yield case.of_requests(_PREFIXES, rows=Extend(new, room_for(new)))
        else:
            yield case.of_requests(_LENS, padded=1)
