"""Cases whose model has three layers, under the ids of a later pipeline rank: in two KV groups, one of which has freed
whole pages, and with heads that differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..cases.case import Case
from ..cases.co_residents import with_other_heads
from ..cases.declared import within_declared
from ..cases.features.layers import fields_with_shapes
from ..cases.features.rows import most_rows
from ..cases.features.server.table import SERVER_VARIANTS
from ..cases.head_layouts import by_layer
from ..cases.head_shapes import declared_shapes
from ..cases.layers import Layers
from ..cases.nearest_declared import nearest_declared
from ..cases.rows import Accepted, Extend, room_for
from ..contract import ROW_FORMATS, Capabilities, HeadShape
from .layer_options import with_options, without_options
from .never_together import features

_RANK = Layers(3, 5)
_LENS = (21, 40, 4)
_SPLIT_LENS = (600, 40, 4)
"""Lengths at which kernels split keys: the first is longer than the known splits of 256 and 512 keys."""
_ROWS = 5
_WINDOW = 7
"""A window that is shorter than two of the requests."""


def layer_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases without options, and with all declared options; derived from ``small``, which has little work for each
    row."""
    minimal = small.of_requests(_LENS, padded=1, data="gauss", layers=_RANK)
    window = nearest_declared(declared, small.with_changes(window=_WINDOW)).window
    options = with_options(declared, with_other_heads(declared, minimal), window).with_changes(
        kv_dtype=min(declared.kv_pool.kv_dtypes)
    )
    options = _behind_rows_that_decode(declared, options)
    minimal = without_options(declared, minimal)
    page = min((page for page in declared.kv_pool.page_sizes if page > 1), default=1)
    # A windowed group has freed whole pages of the first two requests.
    lens = (2 * page + window, 4 * page + window - 1, 6)
    pages = dict.fromkeys(each.with_changes(page_size=page, prefixes=lens) for each in (minimal, options))
    if declared.kv_pool.kv_groups and not small.draft:
        for each in pages:
            yield replace(each, layers=replace(_RANK, groups=True))
    # Packed rows have the same bytes in all layers.
    plain = min(declared.kv_pool.kv_dtypes - ROW_FORMATS.keys(), default="")
    if declared.heads.heads_by_layer and by_layer(declared) and plain:
        numbers = (each if each.kv_dtype not in ROW_FORMATS else each.with_changes(kv_dtype=plain) for each in pages)
        yield from _head_cases(declared, *numbers)


def _behind_rows_that_decode(declared: Capabilities, case: Case) -> Case:
    """Cases in which requests of one row come first, as servers sort them. The plan for the others begins after these
    rows, and is made once for each KV group (vLLM #27650).
    """
    rows, decoding = case.rows, (1,) * (case.bs - 1)
    if isinstance(rows, Accepted):
        return case.with_changes(rows=replace(rows, new=(*decoding, rows.width)))
    if isinstance(rows, Extend):
        new = (*decoding, min(_ROWS, most_rows(declared, case.mode)))
        return case.with_changes(rows=replace(rows, new=new, room=max(rows.room, room_for(new))))
    return case


def _head_cases(declared: Capabilities, minimal: Case, *options: Case) -> Iterator[Case]:
    """Each pair of shapes once; the first pair in two KV groups, if these are declared; and a pair with different query
    heads at lengths that are split, because memory for partial results is allocated by their number.
    """
    pairs, most = declared_shapes(declared), options[0] if options else minimal
    for shapes, each in zip(pairs, (most, minimal), strict=False):
        yield with_shapes(each, shapes)
    if declared.kv_pool.kv_groups and pairs and not minimal.draft:
        yield with_shapes(most.with_changes(layers=replace(_RANK, groups=True)), pairs[0])
    for shapes in pairs[-1:]:
        yield with_shapes(minimal.with_changes(prefixes=_SPLIT_LENS), shapes)


def shaped_cases(declared: Capabilities, found: Sequence[Case]) -> Iterator[Case]:
    """Heads by layer together with each feature that is declared with them: as few cases of the array (``found``) as
    contain all features, with the first pair of shapes."""
    pairs = declared_shapes(declared) if declared.heads.heads_by_layer and by_layer(declared) else []
    if not pairs or not found:
        return
    tests = features(declared, found[0].mode, found[0])
    shaped = [made for case in found if (made := _shaped(declared, case, pairs[0])) is not None]
    left = {name for name, test in tests.items() if any(map(test, shaped))}
    while left:
        best = max(shaped, key=lambda case: (sum(tests[name](case) for name in left), -sum(case.prefixes)))
        yield best
        left -= {name for name in left if tests[name](best)}


def _shaped(declared: Capabilities, case: Case, shapes: tuple[HeadShape, HeadShape]) -> Case | None:
    """``case`` with two shapes of layers, without KV splits and shared KV, and in one KV group, if it may have two
    shapes."""
    variants = frozenset(word for word in case.variants if "one KV group" not in SERVER_VARIANTS[word].excludes)
    one_pool = {"kv_splits": "", "merged_by_backend": False, "kv_sharing": False, "variants": variants}
    try:
        made = with_shapes(case.with_changes(layers=_RANK, **one_pool), shapes)
    except ValueError:
        return None
    return made if nearest_declared(declared, made) == made and within_declared(declared, made) else None


def with_shapes(case: Case, shapes: tuple[HeadShape, HeadShape]) -> Case:
    """``case`` with two alternating layer shapes, and heads and a head dim that contain both."""
    return case.with_changes(**fields_with_shapes(case.layers, shapes))
