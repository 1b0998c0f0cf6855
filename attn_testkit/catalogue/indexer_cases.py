"""Cases with an indexer that the covering array may not contain: many ties, and server variants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..cases.case import Case
from ..cases.draft import Draft
from ..cases.features.feature import Without
from ..cases.features.indexer import INDEXER
from ..cases.features.server.table import usual_page, variant_cases
from ..cases.features.server.two_batch_overlap import is_cut
from ..cases.indexing import NEAR, Indexing
from ..cases.layers import PERIOD, Layers
from ..cases.rows import Drafted, Extend, room_for
from ..cases.selection import Selection
from ..contract import Capabilities, ForwardMode

_TIED_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND)
_MANY_ROWS, _NEAR_KEYS = 34, 20_480
"""Rows and keys that exceed limits of FlashInfer: its filtered top-k runs for more than 32 rows, and one of its bins
holds 16,384 keys."""
_LONG = 66_000
"""Keys of a narrow selection: 7,000 of them tie, which is more than a buffer for few places holds."""
_LEAST = 256
"""Smallest top-k whose number of tied keys depends on it."""
_REUSE = 4
"""Layers that use one selection in GLM-5.2 (``index_topk_freq``). Two layers do not show one that uses a selection and
does not hand it on."""
_STEPS = 4
"""Tokens of a draft with three forwards: two of them use the selection of the first."""
_MORE = 64
"""Keys that a row of the first request leaves out."""
_KEYS_EACH = 10
"""Keys per selected key. Data with ties have nine vectors, so a tenth more keys tie than a row selects."""


def indexer_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, a case with little work for each row and key; none without an indexer in its
    mode."""
    sparse = declared.sparse
    if sparse is None or sparse.indexer is None:
        return
    if small.mode is ForwardMode.DRAFT_DECODE:
        for each in first_selection_cases(declared, small):
            if sparse.indexer.reuses_selections:
                assert each.indexer is not None
                # A model may do both: some layers use the selection of a layer before, and of a forward before.
                each = each.with_changes(indexer=replace(each.indexer, reuse=PERIOD), layers=Layers(2 * PERIOD))
            yield each.with_changes(sinks=declared.options.sinks)
        return
    if small.indexer is None:
        # All server variants of this mode have selections of the kit.
        for each in variant_cases(declared, small):
            if each.indexer is None and "bigpool" not in each.variants:
                found = with_indexer(declared, each)
                if found.indexer and is_cut(each) and sparse.indexer.reuses_selections:
                    # Each of the two batches keeps a selection from one layer to the next (sglang #38007).
                    found = found.with_changes(indexer=replace(found.indexer, reuse=PERIOD))
                yield found
    if sparse.indexer.reuses_selections:
        yield _of_many_layers(with_indexer(declared, small))
    if small.mode not in _TIED_MODES or sparse.indexer.fused:
        return
    # Each width may have its own kernel, with other bins.
    for topk in sorted(each for each in sparse.topk if each > 1) or sparse.topk:
        many = with_indexer(declared, small, topk, "ties")
        many = many.with_changes(page_size=usual_page(declared), layers=Layers(1), layout="shuffled", data="gauss")
        # A few winners, and thousands of equal scores after them: more tie than a buffer of candidates holds, and
        # most of what a row selects is of these (sglang #30645).
        yield many.of_requests((_LONG if topk < _LEAST else _KEYS_EACH * topk, 70))
        yield _of_near_scores(with_indexer(declared, many, topk, NEAR))


def first_selection_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """A draft of several forwards, of which later ones use the selection of the first, derived from ``small``; none if
    this is not declared. With one forward a draft shows nothing of it."""
    indexer = declared.sparse.indexer if declared.sparse else None
    if small.mode is not ForwardMode.DRAFT_DECODE or indexer is None or "first" not in indexer.drafts:
        return
    case = with_indexer(declared, small.with_changes(rows=Drafted(Draft(1, _STEPS))))
    assert case.indexer is not None
    assert case.selection is not None
    first = case.with_changes(indexer=replace(case.indexer, first=True, data=""))
    yield first.of_requests((2 * case.selection.topk + 5, case.selection.topk), layout="shuffled", data="gauss")


def _of_many_layers(case: Case) -> Case:
    """Most layers use the selection of a layer before them, and the last one uses another."""
    assert case.indexer is not None
    assert case.selection is not None
    few = case.with_changes(indexer=replace(case.indexer, reuse=_REUSE), layers=Layers(_REUSE + 2, 3))
    topk = case.selection.topk
    return few.of_requests((topk + _MORE, 2 * topk + 5), layout="shuffled", data="gauss")


def _of_near_scores(case: Case) -> Case:
    """Cases with more scores in a bin of a radix select than the bin holds, with the best scores anywhere among them
    (vLLM #52149, sglang #36807); in extend also more rows than small kernels support.
    """
    new = (_MANY_ROWS, 1)
    rows = Extend(new, room_for(new)) if case.mode is ForwardMode.EXTEND else case.rows
    return case.of_requests((_NEAR_KEYS, 70), rows=rows)


def with_indexer(declared: Capabilities, case: Case, topk: int = 0, data: str = "") -> Case:
    """``case`` with the declared indexer. ``topk``: 0 for the smallest one that selects several keys. Raises
    ``AssertionError`` without an indexer in ``declared``.
    """
    sparse = declared.sparse
    assert sparse is not None
    assert not isinstance(INDEXER.fit, Without)
    width = topk or min(sparse.topk, key=lambda each: (each == 1, each))
    asked = case.with_changes(selection=Selection.of(sparse, width), indexer=Indexing(0, data=data))
    return asked.with_changes(**INDEXER.fit(declared, asked))
