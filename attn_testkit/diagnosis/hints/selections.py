"""Sparse attention: selected KV tokens that a row lost, and others that it attended to."""

from __future__ import annotations

import torch

from ...families.sparse.family import with_selection
from ..attended_keys import ranges
from .evidence import Evidence
from .hint import Level, hint


def _other_selection(e: Evidence) -> bool:
    """True if the row that was examined attended to other KV tokens than the selected ones."""
    return e.attended is not None and not e.attended.right


@hint(Level.PATTERN, when=_other_selection, silences=(Level.PLACE,), family="sparse")
def other_index_space(e: Evidence) -> str:
    """A row reads none of its selected KV tokens, as if their indices had another meaning."""
    a, selection = e.attended, e.schedule.case.selection
    assert a is not None
    assert selection is not None
    if a.used & a.wanted or not a.wanted or e.schedule.case.indexer is not None:
        return ""
    if selection.slots:
        return (
            "no selected KV token is read. Indices of this case are slots of the pool: probably they are taken for "
            "positions, and looked up in the request table or compared with the length"
        )
    if a.elsewhere and selection.block == 1:
        return (
            "no selected KV token is read, and other slots are. Indices of this case are positions in the request: "
            "probably they are taken for slots of the pool, and not looked up in the request table"
        )
    return ""


@hint(Level.PLACE, when=_other_selection, family="sparse")
def lost_selected_keys(e: Evidence) -> str:
    """Selected KV tokens have no weight in a row."""
    a = e.attended
    assert a is not None
    lost, extra = a.wanted - a.used, a.used - a.wanted
    columns = _columns(e, lost)
    if not lost or extra or a.elsewhere or not columns:
        return ""
    return (
        f"a row loses {len(lost)} of its {len(a.wanted)} selected KV tokens, which are in columns {ranges(columns)} of "
        "its row of `selected`"
    )


def _columns(e: Evidence, keys: frozenset[int]) -> list[int]:
    """Columns of ``selected`` that hold these KV tokens of the row that was examined, ascending."""
    a, data = e.attended, with_selection(e.schedule, e.expected.data)
    selection = e.schedule.case.selection
    if a is None or data.selected is None or selection is None or selection.slots or selection.block > 1:
        return []
    mine = (data.row_request == a.request) & (data.row_offset == a.row)
    wrong = e.comparison.wrong.flatten(2).any(-1) & mine
    layer, row = wrong.nonzero()[0].tolist() if bool(wrong.any()) else (0, int(mine.nonzero()[0]))
    listed = data.selected[layer, row].long()
    return [int(at) for at in torch.isin(listed, torch.tensor(sorted(keys))).nonzero()[:, 0]]


@hint(Level.PLACE, when=_other_selection, family="sparse")
def keys_that_were_not_selected(e: Evidence) -> str:
    """KV tokens have weight in a row that did not select them."""
    a = e.attended
    assert a is not None
    extra, lost = a.used - a.wanted, a.wanted - a.used
    if not extra or a.elsewhere:
        return ""
    if lost:
        return (
            f"a row attends to KV tokens {ranges(sorted(extra))}, which it did not select, and loses "
            f"{ranges(sorted(lost))}: probably indices of another row, layer or step, or of another index space"
        )
    if extra == {0}:
        return (
            "a row attends to KV token 0, which it did not select: probably an entry of -1 that is loaded as key 0 and "
            "not masked"
        )
    return (
        f"a row attends to KV tokens {ranges(sorted(extra))}, which it did not select, in addition to all that it did: "
        "probably entries after its last index, or a mask that lets more through than the selection"
    )
