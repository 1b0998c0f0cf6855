"""Batches whose requests agree in what programs choose a path by: all are as long, so that nothing is masked; one
request is live, and the others are padding. Other cases mix them; prompts without a prefix are rows of the array.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case, Heads
from ..cases.co_residents import many_heads, with_other_heads
from ..cases.features.rows import most_rows
from ..cases.features.server.table import usual_page
from ..cases.head_layouts import as_many, latent, latent_heads
from ..cases.layers import Layers
from ..cases.rows import Extend
from ..contract import Capabilities, ForwardMode

_EQUAL_PROMPT = 96
_GROUPS, _MLA_HEADS = (2, 4, 8, 32), (128,)
_LONG, _LONG_OF_MLA = (1100, 1151), (530, 511)
"""Prefixes at which every known kernel uses its code path for long requests. Together with its row, the second is a
multiple of all tiles and pages."""
_MANY_KV_HEADS = 32
_BEHIND_A_TILE, _BUCKET = 130, 10
"""Rows of a lone request that fill its graph. Without one row for each other request of the bucket they fit a tile of
128."""


def uniform_batch_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, a case with little work for each row and key."""
    small = small.with_changes(page_size=usual_page(declared), data="gauss", layout="shuffled")
    if small.mode is ForwardMode.EXTEND:
        rows = min(_BEHIND_A_TILE, most_rows(declared, small.mode))
        # A bound on the rows of a request where each has a row (onnxruntime #28409). With many KV heads: tiles of rows
        # and heads are numbered through, and are more than there are workers (tt-metal #54413).
        heads = _many_kv_heads(declared, small.heads)
        yield small.of_requests((3,), padded=_BUCKET - 1, rows=Extend((rows,), -(-rows // _BUCKET)), heads=heads)
    yield from _of_one_length(declared, small)


def _many_kv_heads(declared: Capabilities, like: Heads) -> Heads:
    """Many KV heads, each with as few query heads as declared."""
    groups = sorted(declared.heads.gqa_ratios - {1})
    if not like.layout.wide_rows and as_many(declared):
        return Heads(as_many(declared)[0].name, _MANY_KV_HEADS, _MANY_KV_HEADS)
    if not like.layout.wide_rows and "gqa" in declared.heads.families and groups:
        return Heads("gqa", _MANY_KV_HEADS * groups[0], _MANY_KV_HEADS)
    return many_heads(declared, like, _MANY_KV_HEADS)


def _of_one_length(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Requests of one length; in decode with several groups of heads, in the other modes with one. One kernel for many
    heads per KV head split keys from 1,024 on, and read the keys of the first request if nothing was masked (mlx
    #4431).
    """
    one = small.with_changes(layers=Layers(1))
    if small.mode is not ForwardMode.DECODE:
        rows = min(_EQUAL_PROMPT, most_rows(declared, small.mode))
        extends = small.mode is ForwardMode.EXTEND
        of_both = Extend((rows,) * 2, rows) if extends else small.rows.counted((small.width,) * 2)
        lens = (_LONG_OF_MLA if small.heads.layout.wide_rows else _LONG)[:1] * 2
        yield with_other_heads(declared, one).of_requests(lens, rows=of_both)
        return
    groups = [(Heads("gqa", 2 * group, 2), 0, _LONG) for group in _GROUPS if group in declared.heads.gqa_ratios]
    if "gqa" not in declared.heads.families or not groups:
        groups = (
            [] if small.heads.layout.wide_rows else [(many_heads(declared, small.heads, small.heads.q_heads), 0, _LONG)]
        )
    if latent(declared):
        rope = small.rope_dim or min(declared.heads.mla_rope_dims)
        groups += [
            (latent_heads(declared, count), rope, _LONG_OF_MLA)
            for count in _MLA_HEADS
            if count in declared.heads.gqa_ratios
        ]
    for turn, (heads, rope, lens) in enumerate(groups):
        length = lens[turn % 2]
        yield one.with_changes(heads=heads, rope_dim=rope, prefixes=(length,) * 3, bucket=4)
