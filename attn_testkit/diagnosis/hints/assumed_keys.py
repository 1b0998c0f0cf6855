"""The wrong rows are right for the wrong KV tokens: attention is computed again with the tokens that a mistake would
read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ...cases.features.server.table import variant_of
from ...steps.data import StepData, make_layers
from .evidence import LONGEST, SAME_RESULTS, SMALLEST_TILE, Evidence, Supposed, places_of
from .hint import Level, assumption, hint


def _other_keys(e: Evidence) -> bool:
    """True if a row attended to wrong KV tokens, of its own request as far as is known."""
    return e.attended is not None and not e.attended.right and not e.misrouted and e.can_be_asked


def _rows_in_order(e: Evidence) -> bool:
    """True if, in addition, later rows see more."""
    return _other_keys(e) and not e.branches


def _from_positions(e: Evidence) -> bool:
    """True if, in addition, visibility follows from positions."""
    return _rows_in_order(e) and variant_of(e.schedule.case).causal


def _first_keys(e: Evidence) -> bool:
    """True if a row attended to KV tokens 0..i, where i is its index among the new rows, even if it equals another
    row."""
    a = e.attended
    first = a is not None and not a.right and not a.elsewhere and a.used == set(range(a.row + 1))
    return first and e.can_be_asked and not e.branches and variant_of(e.schedule.case).causal


def _with_windows(e: Evidence) -> bool:
    return any(layer.sliding_window_size >= 0 for layer in make_layers(e.schedule.case))


def without_windows(e: Evidence) -> Supposed:
    """Answer if every row sees all keys that it would see without a window."""
    data = e.expected.data
    rows, keys = torch.zeros_like(data.query_positions), torch.zeros_like(data.key_positions)
    return Supposed(data=replace(data, query_positions=rows, key_positions=keys))


def _misrouted(e: Evidence) -> bool:
    """True if KV tokens of another request were attended to."""
    others = e.misrouted or (e.attended is not None and "others" in e.attended.elsewhere)
    return bool(others) and e.step.data not in SAME_RESULTS and e.can_be_asked


@assumption(_misrouted, silences=("rows_of_others", "uneven_offsets", "later_requests", "elsewhere"))
def entered_at_query_offsets(e: Evidence) -> Iterator[Supposed]:
    """Rows are right for KV tokens from their query offset on, in one list of all requests' KV tokens."""
    data = e.expected.data
    if len(set(e.lens)) == 1 and e.step.tokens == sum(e.lens):
        return
    starts = torch.tensor([0, *(request.new for request in e.step.requests)]).cumsum(0).tolist()

    def entered(stored: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([stored[:, request, :length] for request, length in enumerate(e.lens)], 1)
        found = stored.clone()
        for request, (length, start) in enumerate(zip(e.lens, starts, strict=False)):
            part = flat[:, start : start + length]
            found[:, request, : part.shape[1]] = part
        return found

    values = None if data.stored_values is None else entered(data.stored_values)
    yield Supposed(
        "the list of all requests' KV tokens is indexed by cu_seqlens_q instead of the running sum of KV lengths "
        "(kv_indptr): the result is right for KV tokens from the offset of a request's query rows "
        "on",
        replace(data, stored_keys=entered(data.stored_keys), stored_values=values),
    )


def _seen_by(e: Evidence, rows: torch.Tensor) -> StepData:
    """Data in which row i of each request sees what its row ``rows[i]`` should."""
    data = e.expected.data
    return replace(data, visible=data.visible[:, rows], query_positions=data.query_positions[:, rows])


@assumption(_rows_in_order)
def rows_counted_by_heads(e: Evidence) -> Iterator[Supposed]:
    """Row i of a request sees what row i // G should, where G is the number of query heads per KV head: a bound of
    packed rows."""
    groups = {shape.num_qo_heads // shape.num_kv_heads for shape in e.wrong_shapes}
    group = groups.pop() if len(groups) == 1 else 1
    if not 1 < group < max(r.new for r in e.step.requests):
        return  # if all rows see what the first one does, heads are not the reason
    yield Supposed(
        f"the end of a row's KV tokens is computed from row // {group}, as if its {group} query heads per KV head "
        f"were packed into rows: the result is right if row i sees what row i // {group} should",
        _seen_by(e, torch.arange(e.expected.data.visible.shape[1]) // group),
        every_row=True,
    )


@assumption(_rows_in_order)
def rows_of_a_later_tile(e: Evidence) -> Iterator[Supposed]:
    """Row i of a request sees what row i % n should: a tile of n rows counts rows from its own first row."""
    most = max((request.new for request in e.step.requests), default=1)
    if e.step.data in SAME_RESULTS:
        return
    for tile in (1 << n for n in range((most - 1).bit_length())):
        what = "every row of a request sees what its first one" if tile == 1 else f"row i sees what row i % {tile}"
        yield Supposed(
            f"a later tile counts rows from its own first one, not from the first row of the request (tiles of {tile} "
            f"row{'s' if tile > 1 else ''}): the result is right if {what} should",
            _seen_by(e, torch.arange(e.expected.data.visible.shape[1]) % tile),
        )


@hint(Level.CAUSE, when=_first_keys)
def rows_without_prefix(e: Evidence) -> Iterator[Supposed]:
    """Wrong rows see the KV tokens up to their own number among the new rows."""
    places = places_of([request.new for request in e.step.requests])
    if any(places[row][1] for row in e.rows):
        yield Supposed(
            "the causal mask is aligned to the first KV token instead of the last, or positions begin at 0: the "
            "result is right if row i attends to KV tokens 0..i, as if there were no prefix",
            _from_start(e, [0] * e.step.bs),
        )


_NO_PREFIX = "0, as if there were no prefix"


@assumption(_from_positions, silences=("uneven_offsets", "nothing_computed", "later_requests", "last_page", "row_tile"))
def positions_of_another_request(e: Evidence) -> Iterator[Supposed]:
    """Rows see what they should if their positions were counted from the prefix or the length of another request."""
    requests, data, windows = e.step.requests, e.expected.data, _with_windows(e)
    own = torch.arange(data.visible.shape[-1]) < torch.tensor(e.lens)[:, None, None]
    if windows and e.right_for(without_windows(e)):
        return  # if there is no window at all, its start is not the reason
    if e.right_for(Supposed(data=replace(data, visible=own.expand_as(data.visible)), every_row=True)):
        return  # without causality, positions are not the reason
    prefixes = [request.prefix for request in requests]
    starts: dict[tuple[int, ...], list[str]] = {}
    for first, name in (
        ([prefixes[0]] * len(prefixes), "the prefix of request 0"),
        ([prefixes[-1]] * len(prefixes), f"the prefix of request {len(prefixes) - 1}"),
        ([max(prefixes)] * len(prefixes), "the longest prefix"),
        ([max(e.lens) - request.new for request in requests], "the end of the longest request"),
        ([0] * len(prefixes), _NO_PREFIX),
    ):
        if first != prefixes:
            starts.setdefault(tuple(first), []).append(name)
    several = max(request.new for request in requests) > 1
    for start, names in starts.items():
        seen = _from_start(e, start)
        text = (
            "a row's position is not its own request's prefix plus its index among the new rows: the result is right "
            f"if {{}} are counted from {' or '.join(names)} in every request"
        )
        # ``key_range`` names rows that see no prefix, because it knows what a capture leaves. If a request has one row,
        # another position is another length.
        if several and names != [_NO_PREFIX]:
            yield Supposed(text.format("positions"), seen, every_row=True)
        if windows:
            by_windows = replace(data, query_positions=seen.query_positions)
            yield Supposed(text.format("the positions by which windows begin"), by_windows, every_row=True)
    if windows and several:
        last = torch.tensor([request.prefix + request.new - 1 for request in requests])[:, None]
        yield Supposed(
            "all rows of a request use the window of its last row, but each has its own: the result is right if "
            "the windows of all rows of a request begin where its last row's does",
            replace(data, query_positions=last.expand_as(data.query_positions)),
            every_row=True,
        )


def _from_start(e: Evidence, start: Sequence[int]) -> StepData:
    """Data in which each request's rows have positions from ``start`` on, and see the tokens before them."""
    data = e.expected.data
    positions = torch.tensor(start)[:, None] + torch.arange(data.query_positions.shape[1])
    own = torch.arange(data.visible.shape[-1]) < torch.tensor(e.lens)[:, None, None]
    visible = (data.key_positions[:, None] <= positions[:, :, None]) & own
    return replace(data, query_positions=positions, visible=visible)


@assumption(lambda e: _other_keys(e) and _with_windows(e), silences=("window_of_another_layer",))
def window_on_new_rows_alone(e: Evidence) -> Iterator[Supposed]:
    """Rows are right if windows narrow only the KV tokens of this step, and not KV tokens of the prefix."""
    data = e.expected.data
    near = int(data.query_positions.max())
    prefixes = torch.tensor([request.prefix for request in e.step.requests])[:, None]
    before = torch.arange(data.key_positions.shape[1]) < prefixes
    everywhere = replace(data, key_positions=torch.full_like(data.key_positions, near))
    if e.right_for(Supposed(data=everywhere, every_row=True)):
        return  # this cannot be distinguished from no window at all
    yield Supposed(
        "the call or loop over the prefix lacks the window: the result is right if the window narrows the KV tokens "
        "of this step, and all of the prefix is visible",
        replace(data, key_positions=data.key_positions.masked_fill(before, near)),
        every_row=True,
    )


@hint(Level.PLACE, when=_rows_in_order, silences=("last_page",))
def last_pages_missing(e: Evidence) -> str:
    """Wrong rows are right without the KV tokens of a partly filled last page, and so are all others."""
    if not only_last_pages_missing(e):
        return ""
    return (
        "a partly filled last page is probably dropped: in every wrong request its KV tokens are missing, and the "
        "result is right without them"
    )


def only_last_pages_missing(e: Evidence) -> bool:
    """True if every row is right without the KV tokens of its request's last page, if that is partly filled, with or
    without those of an only page; and if an end that is off by as many in all requests does not explain it."""
    page, lens = e.schedule.case.page_size, torch.tensor(e.lens)
    if page == 1 or not _rows_in_order(e):
        return False
    whole = lens // page * page
    if _right_up_to(e, lens - (lens - whole)[e.wrong].min()):
        return False
    return any(_right_up_to(e, ends) for ends in (torch.where(whole > 0, whole, lens), whole))


def may_end_at(e: Evidence, end: int) -> bool:
    """False if it is known that rows are not what they are without all KV tokens from ``end`` on in every request."""
    return not e.can_be_asked or _right_up_to(e, torch.full((e.step.bs,), end))


def _right_up_to(e: Evidence, ends: torch.Tensor) -> bool:
    """True if every row is right if its request has only the KV tokens before its entry of ``ends`` [B]."""
    data = e.expected.data
    before = torch.arange(data.visible.shape[-1]) < ends[:, None, None]
    return e.right_for(Supposed(data=replace(data, visible=data.visible & before), every_row=True))


def _lengths_can_be_asked(e: Evidence) -> bool:
    case, comparison = e.schedule.case, e.comparison
    if case.head_maps or max(e.lens, default=0) > LONGEST or e.misrouted or e.branches or not variant_of(case).causal:
        return False
    own = e.attended is None or not (e.attended.right or e.attended.elsewhere or e.attended.heads)
    return own and comparison.all_finite and not comparison.right and comparison.worst is not None


@assumption(
    _lengths_can_be_asked,
    silences=("uneven_offsets", "length_threshold", "later_requests", "last_page", "row_tile"),
)
def lengths_of_others(e: Evidence) -> str:
    """Every wrong request is right with the length of another one."""
    lens, new = e.lens, [request.new for request in e.step.requests]
    found: dict[int, set[int]] = {request: set() for request in e.wrong}
    for length in sorted(set(lens))[:_MOST_LENGTHS]:
        longer = [i for i in e.wrong if lens[i] > max(length, new[i])]
        if longer:
            # No request has fewer than its new rows, and the last row sees the last KV token.
            cut = [min(own, max(length, rows)) - rows for own, rows in zip(lens, new, strict=True)]
            right = e.near(Supposed(data=_from_start(e, cut))).all(-1) | ~e.comparison.wrong.flatten(2).any(-1)
            for i in longer:
                if right[:, e.expected.data.row_request == i].all():
                    found[i].add(length)
    if any(not lengths for lengths in found.values()) or len(found) < _FEW:
        return ""
    # If all are cut to their new rows, the prefix is missing; if all lack equally many, an end is off.
    reported = [(request, length) for request, lengths in found.items() for length in lengths if length > new[request]]
    if not reported or len({lens[request] - max(length, new[request]) for request, length in reported}) == 1 < len(
        reported
    ):
        return ""
    if same := set.intersection(*found.values()):
        length = min(same)
        # If exactly the longer ones are wrong, it may be a capacity.
        if e.wrong == [i for i, own in enumerate(lens) if own > length] and length % SMALLEST_TILE == 0:
            return ""
        return (
            "a list of lengths belongs to other requests, or is read at the wrong index: every wrong request is "
            f"right with the length of request {lens.index(length)}, {length} (or its new rows, if they are more)"
        )
    named = ", ".join(f"request {i} with that of request {lens.index(length)}, {length}" for i, length in reported[:2])
    more = " and so on" if len(found) > _FEW else ""
    return (
        "the list of lengths is read at the wrong index: the result is right with lengths of other requests, "
        f"{named}{more}"
    )


_MOST_LENGTHS = 24
"""Number of lengths that are tried."""
_FEW = 2
"""Fewest wrong requests that prove the length of another request."""
