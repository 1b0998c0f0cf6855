"""The wrong rows are right for other KV tokens than their own: attention is computed again with what a mistake sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...cases.data import StepData, make_layers
from ...cases.ways import way_of
from .evidence import Evidence, places_of
from .suspects import SAME_RESULTS

__all__ = [
    "entered_at_query_offsets",
    "last_rows_right",
    "positions_of_another_request",
    "rows_counted_by_heads",
    "rows_of_a_later_tile",
    "rows_without_prefix",
    "window_of_another_layer",
    "window_on_new_rows_alone",
]


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
    if _branches(e):
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


def rows_counted_by_heads(e: Evidence) -> str:
    """Row i of a request sees what row i // G should, G the query heads of a KV head: a bound of packed rows."""
    attended, shapes = e.attended, e.wrong_shapes
    groups = {shape.num_qo_heads // shape.num_kv_heads for shape in shapes}
    if attended is None or attended.right or e.swapped or len(groups) != 1 or not e.can_be_asked:
        return ""
    group = groups.pop()
    if not 1 < group < max(r.new for r in e.step.requests):
        return ""  # all rows that see what the first one does are no matter of heads
    if _branches(e):
        return ""
    data = e.expected.data
    row = torch.arange(data.visible.shape[1]) // group
    seen = replace(data, visible=data.visible[:, row], query_positions=data.query_positions[:, row])
    if not e.right_for(seen, right_too=True):
        return ""
    return (
        f"right where row i sees what row i // {group} should: the {group} query heads of a KV head are packed with "
        f"rows, and a row that is no packed one is divided by {group} where its keys end"
    )


def positions_of_another_request(e: Evidence) -> str:
    """Rows see what they should if their positions were counted from the prefix or the length of another request."""
    case, requests, attended = e.schedule.case, e.step.requests, e.attended
    if attended is None or attended.right or e.swapped or not way_of(case).causal or not e.can_be_asked:
        return ""
    if _branches(e):
        return ""
    windows = any(layer.sliding_window_size >= 0 for layer in make_layers(case))
    if windows and e.right_for(replace(e.expected.data, query_positions=e.expected.data.key_positions[:, :1].clone())):
        return ""  # no window at all is not a matter of where it begins
    own = torch.arange(e.expected.data.visible.shape[-1]) < torch.tensor(e.lens)[:, None, None]
    if e.right_for(replace(e.expected.data, visible=own.expand_as(e.expected.data.visible)), right_too=True):
        return ""  # nor is no causality one of positions
    for start, names in _starts(e).items():
        # Rows that see no prefix are named by ``key_range``, which knows what a capture leaves, and where a request has
        # one row, another position is another length.
        whole = names != [_NO_PREFIX] and max(r.new for r in requests) > 1
        for whose, seen in _seen_from(e, torch.tensor(start), windows, whole=whole):
            if e.right_for(seen, right_too=True):
                return (
                    f"right where {whose} are counted from {' or '.join(names)} in every request: a row's position is "
                    "its request's own prefix and its place among the new rows"
                )
    if windows and max(r.new for r in requests) > 1:
        last = torch.tensor([r.prefix + r.new - 1 for r in requests])[:, None].expand_as(
            e.expected.data.query_positions
        )
        if e.right_for(replace(e.expected.data, query_positions=last), right_too=True):
            return (
                "right where the windows of all rows of a request begin where its last row's does: a window begins "
                "behind each row's own position"
            )
    return ""


def rows_without_prefix(e: Evidence) -> str:
    """Wrong rows see the KV tokens up to their own number among the new rows."""
    attended = e.attended
    if attended is None or attended.right or attended.elsewhere or attended.used != set(range(attended.row + 1)):
        return ""
    places = places_of([request.new for request in e.step.requests])
    if not any(places[row][1] for row in e.rows) or not way_of(e.schedule.case).causal or not e.can_be_asked:
        return ""
    if _branches(e):
        return ""
    _, seen = next(_seen_from(e, torch.zeros(e.step.bs, dtype=torch.int64), windows=False, whole=True))
    if not e.right_for(seen):
        return ""
    return (
        "right where row i attends to KV tokens 0..i, as if there were no prefix: a causal mask that is aligned to the "
        "first KV token and not to the last, or positions that begin at 0"
    )


_NO_PREFIX = "0, as if there were no prefix"


def _starts(e: Evidence) -> dict[tuple[int, ...], list[str]]:
    """Positions of the requests' first new rows by mistake, and what each mistake counts from."""
    prefixes, longest = [r.prefix for r in e.step.requests], max(e.lens)
    found: dict[tuple[int, ...], list[str]] = {}
    for start, name in (
        ([prefixes[0]] * len(prefixes), "the prefix of request 0"),
        ([prefixes[-1]] * len(prefixes), f"the prefix of request {len(prefixes) - 1}"),
        ([max(prefixes)] * len(prefixes), "the longest prefix"),
        ([longest - r.new for r in e.step.requests], "the end of the longest request"),
        ([0] * len(prefixes), _NO_PREFIX),
    ):
        if start != prefixes:
            found.setdefault(tuple(start), []).append(name)
    return found


def _seen_from(e: Evidence, start: torch.Tensor, windows: bool, *, whole: bool) -> Iterator[tuple[str, StepData]]:
    """``start`` [B]: the position of a request's first row. ``whole``: causality may go by it too."""
    data = e.expected.data
    positions = start[:, None] + torch.arange(data.query_positions.shape[1])
    own = torch.arange(data.visible.shape[-1]) < torch.tensor(e.lens)[:, None, None]
    visible = (data.key_positions[:, None] <= positions[:, :, None]) & own
    if whole:
        yield "positions", replace(data, query_positions=positions, visible=visible)
    if windows:
        yield "the positions by which windows begin", replace(data, query_positions=positions)


def _branches(e: Evidence) -> bool:
    """Who sees whom among the new rows is no matter of their order."""
    return any(r.draft or (r.tree is not None and r.tree.topk > 1) for r in e.step.requests)


def _can_be_asked(e: Evidence) -> bool:
    return e.schedule.case.data not in SAME_RESULTS and e.can_be_asked


def last_rows_right(e: Evidence) -> str:
    """Of each wrong request the last row alone is right, and what is wrong is no KV token that is left out."""
    attended, data = e.attended, e.expected.data
    if attended is None or attended.used != attended.wanted or attended.elsewhere or attended.heads or e.swapped:
        return ""
    if attended.faint or e.reads_foreign or not e.judgement.all_finite:
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


def window_on_new_rows_alone(e: Evidence) -> str:
    """Rows are right where windows narrow the KV tokens of this step, and not those of the prefix."""
    attended, data = e.attended, e.expected.data
    if attended is None or attended.right or e.swapped or not e.can_be_asked:
        return ""
    if all(layer.sliding_window_size < 0 for layer in make_layers(e.schedule.case)):
        return ""
    near = int(data.query_positions.max())
    prefixes = torch.tensor([request.prefix for request in e.step.requests])[:, None]
    before = torch.arange(data.key_positions.shape[1]) < prefixes
    if not e.right_for(replace(data, key_positions=data.key_positions.masked_fill(before, near)), right_too=True):
        return ""
    if e.right_for(replace(data, key_positions=torch.full_like(data.key_positions, near)), right_too=True):
        return ""  # nothing tells that from no window at all
    return (
        "right where the window narrows the KV tokens of this step, and all of the prefix is visible: one of two calls "
        "or loops lacks the window"
    )


def window_of_another_layer(e: Evidence) -> str:
    """The row of a layer attended to what a window lets it see that another layer has."""
    attended = e.attended
    if attended is None or attended.elsewhere or attended.doubled or attended.not_asked or e.swapped or e.in_graph:
        return ""
    windows = {layer.sliding_window_size for layer in make_layers(e.schedule.case)} - {attended.window, -1}
    data, request, row = e.expected.data, attended.request, attended.row
    everything = frozenset(data.visible[request, row].nonzero().flatten().tolist())
    for window in sorted(windows):
        near = data.key_positions[request] >= data.query_positions[request, row] - window
        seen = frozenset((data.visible[request, row] & near).nonzero().flatten().tolist())
        if attended.used != seen or seen == attended.wanted:
            continue
        own = "no window" if attended.window < 0 else f"one of {attended.window}"
        if seen == everything:
            return (
                f"it attends to what it sees without a window, or with one of {window}, which another layer has, and "
                f"its own has {own}: layer.sliding_window_size does not reach the kernel, or not for the KV tokens of "
                "the prefix, or is another layer's"
            )
        return (
            f"it attends to what a window of {window} lets it see, which another layer has, and its own has {own}: "
            "take layer.sliding_window_size of each layer"
        )
    return ""
