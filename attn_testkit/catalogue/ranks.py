"""Cases of ranks with pools of their own: lengths at the borders of ranks, which the covering array cannot say."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import CODES, Case, Heads
from ..cases.features.numbers import nearest
from ..cases.head_layouts import latent, latent_heads
from ..cases.selection import Selection
from ..contract import Capabilities
from .indexer_cases import with_indexer
from .layer_options import with_options, without_options

_PAGE = 4
_LONG = 150
_MOST = 8
"""Most ranks of a case."""


def rank_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, a case with as little work for each row as the declaration allows.

    The lengths lie around I tokens (the first key of the second rank), I * R tokens (the second key of the first rank)
    and R pages of keys (the second page of a rank), so that drafts and prompts cross from rank to rank. Some requests
    have fewer keys than there are ranks. A backend that merges does so in the cases in which most ranks are empty, in
    which sums are far from 1, and in which all options meet; the kit merges in the others, and finds a NaN there.
    """
    own = declared.lse is not None and declared.lse.merges
    page = nearest(declared.kv_pool.page_sizes, _PAGE)
    # Tails of a rank's pages are poisoned. FP8 comes first.
    kv_dtypes = sorted(declared.kv_pool.kv_dtypes - declared.needs.finite_page_tails)
    if not kv_dtypes:
        return
    plain = without_options(declared, small).with_changes(kv_dtype=kv_dtypes[-1], **_selected(declared))
    # vLLM deals tokens or pages; SGLang deals tokens; the last two numbers are smaller than a page and divide none.
    for ranks, interleave in ((2, page), (3, 1), (4, page // 2 or 2), (_MOST, 5)):
        case = _of_ranks(plain, page, ranks, interleave, _around(page, ranks, interleave))
        yield case.with_changes(data="gauss", merged_by_backend=own and ranks == _MOST)
    # Only the first rank has keys of all requests but the longest.
    yield _of_ranks(plain, page, 2, 64, (9, 0, 63, 70)).with_changes(data="negative", merged_by_backend=own)
    yield _of_ranks(plain, page, 4, 1, (_LONG, 2, 33)).with_changes(data=CODES)
    for heads in _other_heads(declared, small):
        other = plain.with_changes(**heads)
        yield _of_ranks(other, page, 2, page, (2 * page - 1, 0, 1, 70)).with_changes(data="gauss")
    indexer = declared.sparse.indexer if declared.sparse else None
    if indexer and indexer.replicated:
        # The tokens of a step are on several ranks, and each rank has the index keys of all.
        yield with_indexer(declared, _of_ranks(plain, page, 3, 2, (_LONG, 70, 1)).with_changes(data="gauss"))
    yield with_options(declared, _of_ranks(small, page, 3, page, (_LONG, 70, 1)), 60).with_changes(
        kv_dtype=kv_dtypes[0], data="gauss", merged_by_backend=own
    )


def _selected(declared: Capabilities) -> dict[str, object]:
    """Fields of cases whose rows select several keys, if layers select keys, in the forms that no indexer gives."""
    sparse = declared.sparse
    if sparse is None:
        return {}
    topk = min(sparse.topk, key=lambda each: (each == 1, each))
    forms = {"holes": sparse.holes, "empty_rows": sparse.empty_rows}
    return {"selection": Selection.of(sparse, topk, **forms), "indexer": None}


def _around(page: int, ranks: int, interleave: int) -> tuple[int, ...]:
    """Lengths at the borders of ranks, and a request without a prefix."""
    turn = ranks * interleave
    return (turn - 1, 0, interleave, ranks * page, 1, turn + interleave)


def _of_ranks(small: Case, page: int, ranks: int, interleave: int, prefixes: tuple[int, ...]) -> Case:
    """``small`` with other requests, of which every second has all its rows."""
    rows = small.rows.counted([small.width if index % 2 == 0 else 1 for index in range(len(prefixes))])
    # Ranks share no prefixes.
    layout = "shuffled" if small.layout == "shared" else small.layout
    return small.with_changes(layout=layout).of_requests(
        prefixes, padded=1, rows=rows, page_size=page, kv_splits=f"ranks{ranks}by{interleave}", padding="prod"
    )


def _other_heads(declared: Capabilities, small: Case) -> Iterator[dict[str, object]]:
    """Fields of cases with MLA, and with an odd number of query heads, if ``small`` has neither."""
    groups = sorted(declared.heads.gqa_ratios - {1})
    if not small.heads.layout.values_in_keys and latent(declared) and declared.heads.mla_rope_dims:
        few = max([group for group in groups if group <= 4], default=1)
        yield {"heads": latent_heads(declared, few), "rope_dim": min(declared.heads.mla_rope_dims)}
    odd = [group for group in groups if group % 2]
    if not small.heads.layout.values_in_keys and "gqa" in declared.heads.families and odd:
        yield {"heads": Heads("gqa", 3 * odd[0], 3)}
