"""Layers that are not causal: a row sees all keys of its request, including the keys of later rows of the step."""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...rows import Extend, Verify, room_for
from ...trees import chain
from .variant import ServerVariant

_LENS = (9, 530, 70, 0)
"""Prefixes with more keys than a tile, also next to few rows: a loop that ends with the tile of the rows leaves keys
out (jax #24495)."""
_BLOCKS = (4, 17)
"""Rows of a draft block: few, and more than a tile."""
_NEW = (20, 1, 3, 7)
"""New tokens in extend. The last request is a whole prompt; a second batch has only whole prompts, as encoders have."""


def _fits(declared: Capabilities, case: Fields) -> bool:
    return case.mode in declared.options.non_causal


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if small.mode not in declared.options.non_causal:
        return
    if small.mode is ForwardMode.EXTEND:
        new = tuple(min(count, declared.bounds.max_extend_tokens) for count in _NEW)
        prompts = new[:3]
        found = [
            small.of_requests(_LENS, rows=Extend(new, room_for(new))),
            small.of_requests((0,) * len(prompts), rows=Extend(prompts, room_for(prompts))),
        ]
    else:
        blocks = dict.fromkeys(min(rows, declared.bounds.max_q_rows) for rows in _BLOCKS)
        found = [small.of_requests(_LENS, padded=1, rows=Verify(chain(n))) for n in blocks]
    for case in found:
        yield case.with_changes(data="gauss", variants=frozenset({"noncausal"}))


NON_CAUSAL = ServerVariant(
    "noncausal",
    "layers are not causal: a row sees later keys of its request, too",
    "non_causal",
    _cases,
    _fits,
    gives_none=True,
    causal=False,
    excludes={
        "branching trees": "a block of a diffusion model is not a tree",
    },
    order=80,
    also=("non-causal", "bidirectional"),
)
