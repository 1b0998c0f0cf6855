"""The size of a batch as a column of the covering array: a case is large in one direction, and its heads are few.

A value makes the batch of a row larger, and keeps what the row has otherwise: its lengths and rows are those of the
first requests. So each option, format, layout and server variant meets more requests than a warp has lanes and a block
of 128 has threads, more rows of a request than one tile and than four, and more keys than one split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..cases.features.feature import Columns, Row
from ..cases.features.heads import typical_heads
from ..cases.features.rows import most_rows
from ..cases.fields import Changes
from ..cases.layers import PERIOD
from ..cases.rows import Accepted, Drafted, Extend, Rows, room_for
from ..contract import ROW_FORMATS, Capabilities, ForwardMode

_REQUESTS, _KEYS = "many requests", "1,024 more keys"
_ROWS: Mapping[str, int] = {"130 rows": 130, "520 rows": 520}
"""Value -> rows of the request that has the most."""
_MANY, _MOST = 40, 130
"""Requests: more than a warp has lanes, and, where rows cost little, more than a block of 128 threads."""
_CHEAP_WIDTH = 4
"""Rows of a request with which a batch has the most requests."""
_MORE, _LENGTHENED = 1024, 3
"""Keys, a multiple of all tiles, pages and splits, and the number of requests that have so many more."""
_LONG, _AT = 600, -9
"""Keys that one request has in addition, and which one."""
_FEW_ROWS = 3
"""Rows of the requests that are added."""
_MOST_HEADS, _MOST_DIM, _MOST_PAGE, _MOST_ON_AVERAGE = 6, 64, 16, 80

PAIRED = ("kv_dtype", "window", "logit_cap", "sinks", "selected", "holes", "empty_rows", "indexer", "chunks")
"""Columns that sizes are paired with, in addition to the further ones."""


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[str]]:
    if tier != "core":
        return {}
    if declared.state:
        # Keys cost a state nothing, and lengths of prompts are columns already.
        return {"size": ["", _REQUESTS]}
    rows = [name for name in _ROWS if mode is ForwardMode.EXTEND]
    reached = dict.fromkeys(min(_ROWS[name], most_rows(declared, mode)) for name in rows)
    return {"size": ["", _REQUESTS, _KEYS, *rows[: len(reached)]]}


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    size = row.get("size")
    if not size:
        return {}
    if not declared.state:
        refuse_large(declared, so_far)
    if size == _KEYS:
        return _with_keys(so_far)
    if so_far["layers"].varied:
        raise ValueError("a batch with many requests or rows has few layers")
    layers = {"layers": replace(so_far["layers"], count=PERIOD if _needs_two_layers(so_far) else 1)}
    if size == _REQUESTS:
        return {**layers, **_with_requests(declared, so_far)}
    rows = so_far["rows"]
    wanted = min(_ROWS[size], declared.bounds.max_extend_tokens)
    if rows.chunks > 1 and wanted > _ROWS["130 rows"]:
        raise ValueError("several chunks of so many rows take too long")
    longest = rows.new.index(max(rows.new))
    new = tuple(max(wanted, count) if at == longest else count for at, count in enumerate(rows.new))
    return {**layers, "rows": replace(rows, new=new, room=max(rows.room, room_for(new)))}


def _needs_two_layers(so_far: Changes) -> bool:
    spans, indexer = so_far.get("spans"), so_far.get("indexer")
    return bool(
        so_far["layers"].groups
        or so_far["layers"].hybrid
        or so_far.get("encoder_len")
        or (spans and spans.by_layer)
        or (indexer and indexer.shared)
    )


def refuse_large(declared: Capabilities, so_far: Changes) -> None:
    """Raise ``ValueError`` for heads that make a large batch dear, if there are smaller ones that its format takes."""
    heads, dim = so_far["heads"], so_far["head_dim"]
    form = ROW_FORMATS.get(so_far["kv_dtype"])
    found = [
        (each.layout.wide_rows, each.q_heads, width)
        for each in typical_heads(declared)
        for width in declared.heads.head_dims
        if form is None or form.fits(each.layout, so_far["dtype"], width)
    ]
    wide, most, widest = min(found, default=(False, 0, 0))
    if heads.layout.wide_rows > wide:
        raise ValueError("rows of MLA are wider than others")
    if heads.q_heads > max(most, _MOST_HEADS) or dim > max(widest, _MOST_DIM):
        raise ValueError(f"{heads} of {dim} are more than a large batch needs")


def _with_requests(declared: Capabilities, so_far: Changes) -> Changes:
    own: tuple[int, ...] = so_far["prefixes"]
    if sum(own) > _MOST_ON_AVERAGE * len(own):
        raise ValueError("so many requests are short")
    if so_far["page_size"] > max(_MOST_PAGE, min(declared.kv_pool.page_sizes)):
        raise ValueError("so many requests have small pages")
    more = runs([prefix + (prefix > 0) for prefix in own], _count(so_far) - len(own))
    more[_AT] += _LONG * any(own)
    return {
        "prefixes": (*own, *more),
        "rows": _with_more_rows(so_far["rows"], len(more)),
        "bucket": so_far["bucket"] + len(more),
    }


def _count(so_far: Changes) -> int:
    rows, splits = so_far["rows"], so_far.get("kv_splits")
    chunked = isinstance(rows, Extend) and rows.chunks > 1
    width = rows.draft.branches * rows.draft.steps if isinstance(rows, Drafted) else rows.width
    wide = width > _CHEAP_WIDTH and not isinstance(rows, Extend)
    return _MANY if splits or chunked or wide or so_far.get("encoder_len") else _MOST


def runs(values: Sequence[int], count: int) -> list[int]:
    """``count`` numbers, each of ``values`` about as often as the others: a case id writes a run of one number once."""
    return [values[at * len(values) // count] for at in range(count)]


def _with_more_rows(rows: Rows, count: int) -> Rows:
    if not isinstance(rows, Accepted | Extend):
        return rows
    new = (*rows.new, *runs([min(number, _FEW_ROWS) for number in rows.new[::-1]], count))
    return replace(rows, new=new) if isinstance(rows, Accepted) else replace(rows, new=new, room=room_for(new))


def _with_keys(so_far: Changes) -> Changes:
    own: tuple[int, ...] = so_far["prefixes"]
    if not any(own):
        raise ValueError("requests without a prefix have no more keys")
    lengthened = [at for at, prefix in enumerate(own) if prefix][:_LENGTHENED]
    return {"prefixes": tuple(prefix + _MORE * (at in lengthened) for at, prefix in enumerate(own))}


SIZES = Columns(_columns, _of_row, further=("size",))
