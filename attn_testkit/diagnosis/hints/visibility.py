"""The wrong rows are right for other KV tokens than their own: attention is computed again with what a mistake sees."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...cases.data import make_layers
from .evidence import Evidence
from .suspects import SAME_RESULTS

__all__ = ["entered_at_query_offsets", "last_rows_right", "rows_of_a_later_tile", "window_of_another_layer"]

_LONGEST = 8192
"""KV tokens of a request up to which it is asked: each mistake costs an answer of the oracle."""


def entered_at_query_offsets(e: Evidence) -> str:
    """Rows are right for KV tokens from their query offset on, in one list of all requests' KV tokens."""
    data = e.expected.data
    if not (e.swapped or (e.attended is not None and "others" in e.attended.elsewhere)) or not _can_be_asked(e):
        return ""
    if len(set(e.lens)) == 1 and e.step.tokens == sum(e.lens):
        return ""
    starts = torch.tensor([0, *(request.new for request in e.step.requests)]).cumsum(0).tolist()
    keys = _entered_at(data.stored_keys, e.lens, starts)
    values = None if data.stored_values is None else _entered_at(data.stored_values, e.lens, starts)
    if not e.right_for(replace(data, stored_keys=keys, stored_values=values)):
        return ""
    return (
        "right for KV tokens that are looked up from the offset of a request's query rows on: a list of the KV tokens "
        "of all requests is entered at the running sum of their lengths (kv_indptr), not at cu_seqlens_q"
    )


def _entered_at(stored: torch.Tensor, lens: list[int], starts: list[int]) -> torch.Tensor:
    """[L, B, S, ...]: of the requests' KV tokens one behind the other, those from each start on."""
    flat = torch.cat([stored[:, request, :length] for request, length in enumerate(lens)], 1)
    found = stored.clone()
    for request, (length, start) in enumerate(zip(lens, starts, strict=False)):
        part = flat[:, start : start + length]
        found[:, request, : part.shape[1]] = part
    return found


def rows_of_a_later_tile(e: Evidence) -> str:
    """Row i of a request sees what row i % n should: a tile of n rows counts from its own first one."""
    most = max((request.new for request in e.step.requests), default=1)
    attended = e.attended
    if most < 2 or not _can_be_asked(e) or attended is None or attended.right or e.swapped:
        return ""
    if any(r.draft or (r.tree is not None and r.tree.topk > 1) for r in e.step.requests):
        return ""
    data = e.expected.data
    for tile in (1 << n for n in range((most - 1).bit_length())):
        first = torch.arange(data.visible.shape[1]) % tile
        seen = replace(data, visible=data.visible[:, first], query_positions=data.query_positions[:, first])
        if e.right_for(seen):
            what = "every row of a request sees what its first one" if tile == 1 else f"row i sees what row i % {tile}"
            return (
                f"right where {what} should: a tile has {tile} row{'s' if tile > 1 else ''} of a request, and the rows "
                "of a later tile are counted from its own first one"
            )
    return ""


def _can_be_asked(e: Evidence) -> bool:
    case, judgement = e.schedule.case, e.judgement
    asked = not case.head_maps and case.data not in SAME_RESULTS and max(e.lens, default=0) <= _LONGEST
    return asked and judgement.all_finite and not judgement.right and judgement.worst is not None and not e.in_graph


def last_rows_right(e: Evidence) -> str:
    """Of each wrong request the last row alone is right, and what is wrong is no KV token that is left out."""
    attended, data = e.attended, e.expected.data
    if attended is None or attended.used != attended.wanted or attended.elsewhere or attended.heads or e.swapped:
        return ""
    if e.reads_foreign or not e.judgement.all_finite:
        return ""
    wrong, shown = set(e.rows), 0
    for request in range(e.step.bs):
        *before, last = (data.row_request == request).nonzero().flatten().tolist()
        if last in wrong or (request in e.wrong and not wrong.issuperset(before)):
            return ""
        shown += len(before) * (request in e.wrong)
    if shown < 2:
        return ""
    return (
        "of each wrong request the last row is right, and those before it are wrong with the right KV tokens: rows of "
        "a request share what each should have of its own, such as the statistics of partial results, and the last "
        "one's stand there"
    )


def window_of_another_layer(e: Evidence) -> str:
    """The row of a layer attended to what a window lets it see that another layer has."""
    attended = e.attended
    if attended is None or attended.elsewhere or attended.doubled or attended.not_asked or e.swapped or e.in_graph:
        return ""
    windows = {layer.sliding_window_size for layer in make_layers(e.schedule.case)} - {attended.window, -1}
    data, request, row = e.expected.data, attended.request, attended.row
    for window in sorted(windows):
        near = data.key_positions[request] >= data.query_positions[request, row] - window
        seen = frozenset((data.visible[request, row] & near).nonzero().flatten().tolist())
        if attended.used == seen != attended.wanted:
            own = "no window" if attended.window < 0 else f"one of {attended.window}"
            return (
                f"it attends to what a window of {window} lets it see, which another layer has, and its own has {own}: "
                "take layer.sliding_window_size of each layer"
            )
    return ""
