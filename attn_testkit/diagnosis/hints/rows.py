"""Patterns of wrong rows: results of other rows that they hold, and properties that they share."""

from __future__ import annotations

from itertools import accumulate

from ...checks.describe import index_ranges
from ...contract import ForwardMode
from ..attended_keys import AttendedKeys
from .evidence import Evidence, places_of
from .hint import Level, hint


@hint(Level.SHOWN)
def rows_of_others(e: Evidence) -> str:
    """Wrong rows hold results of others: the values are right, but in the wrong place."""
    if not e.misrouted:
        return ""
    text = ", ".join(row.text for row in e.misrouted[:2]) + (" and so on" if len(e.misrouted) > 2 else "")
    alike = sorted({request for row in e.misrouted for request in (row.request, row.of_request)})
    if all(row.copied for row in e.misrouted) and max(r.new for r in e.step.requests) == 1:
        text = f"requests {index_ranges(alike)} hold the same values as each other"
    cause = _swap_cause(e)
    requests = e.step.requests
    v2 = e.schedule.case.mode is ForwardMode.DRAFT_EXTEND_V2 and any(r.accepted != r.new for r in requests)
    if v2 and _as_packed(e):
        cause = "offsets of query rows (cu_seqlens_q) are wrong"
    if tiles := _in_tiles(e):
        return f"{tiles}: {text}"
    if v2 and "cu_seqlens_q" in cause:
        rows = f"in this mode each request has {requests[0].new} rows"
        # Two equal rows may both be wrong.
        others = any(row.of_request != row.request and not row.copied for row in e.misrouted)
        if not others or _as_packed(e):
            cause += f", probably the running sum of accepted counts, though {rows}"
    return f"{cause}: {text}"


_PAIRS = (16, 32, 64, 128)
"""Numbers of (token, query head) pairs in a tile of rows, in kernels that pack the query heads of a KV head."""


def _in_tiles(e: Evidence) -> str:
    """The cause, if each misrouted row belongs to the request that offsets in whole tiles of rows give."""
    counts = {request.new for request in e.step.requests}
    groups = {shape.num_qo_heads // shape.num_kv_heads for shape in e.wrong_shapes}
    told = [row for row in e.misrouted if not row.copied]
    # If all results are those of request 0, any wide stride fits.
    if len(counts) != 1 or len(groups) != 1 or len(told) < _TELLING_ROWS or not any(row.of_request for row in told):
        return ""
    (count,), (group,) = counts, groups
    for pairs in _PAIRS:
        stride = -(-count * group // pairs) * pairs // group
        if stride > count and all((m.request * count + m.row) // stride == m.of_request for m in told):
            return (
                f"offsets of query rows are counted in tiles of {pairs} pairs of token and head, {stride} rows for "
                f"each request, though rows are packed and each request has {count}"
            )
    return ""


_TELLING_ROWS = 3
"""Fewest rows with the result of another that prove wrong offsets instead of a single wrong row."""


def _as_packed(e: Evidence) -> bool:
    """True if each wrong row has the result of the request that offsets by accepted counts give."""
    requests = e.step.requests
    starts = list(accumulate((request.new for request in requests), initial=0))
    ends = list(accumulate(request.accepted for request in requests))
    rows = [(starts[m.request] + m.row, m.of_request) for m in e.misrouted if m.of_request != m.request]
    return bool(rows) and all(of == sum(row >= end for end in ends[:-1]) for row, of in rows)


def _swap_cause(e: Evidence) -> str:
    several = max(r.new for r in e.step.requests) > 1
    if any(row.queried for row in e.misrouted):
        return "the stride or the offset of query rows is wrong (q may be a view: use its strides)"
    if any(row.copied for row in e.misrouted):
        return "offsets of query rows (cu_seqlens_q), or the index of a request, are wrong"
    if all(row.of_row is not None for row in e.misrouted):
        if times := _times_its_row(e):
            return (
                "output rows are written by the strides of another tensor, such as q, which may be a view (row "
                f"{times}n holds what row n should, counted over all requests)"
            )
        if all(row.request == row.of_request for row in e.misrouted):
            return "the order of rows in a request is wrong"
        if not several:
            return "results are returned in another order than the requests, or offsets of query rows are wrong"
        return "offsets of query rows (cu_seqlens_q) are wrong, or a reordering of requests is not undone"
    starts = list(accumulate((request.new for request in e.step.requests), initial=0))
    flat = [(starts[m.request] + m.row, m.of_request) for m in e.misrouted]
    by_row = [of_request == row for row, of_request in flat if row < e.step.bs]
    if several and len(by_row) > 1 and all(by_row):
        return "the page table (or other per-request data) is indexed by query row: row j uses the entry of request j"
    # If some rows of a request, or adjacent rows, are taken for another's, offsets are wrong; if all, its table row.
    partly = any(
        {m.row for m in e.misrouted if m.request == i} != set(range(r.new))
        for i, r in enumerate(e.step.requests)
        if any(m.request == i for m in e.misrouted)
    )
    as_own = all(m.keys == e.step.requests[m.request].prefix + m.row + 1 for m in e.misrouted)
    as_theirs = all(m.keys == e.lens[m.of_request] for m in e.misrouted)
    if partly or not (as_own or as_theirs or several) or uneven_offsets(e):
        return "offsets of query rows (cu_seqlens_q) are wrong"
    return "the request row (req_pool_indices), the table's stride, or offsets of query rows are wrong"


def _times_its_row(e: Evidence) -> int:
    """Factor between the index of each swapped row and the index of the row whose result it holds; 0 if it varies."""
    starts = list(accumulate((request.new for request in e.step.requests), initial=0))
    pairs = [(starts[m.request] + m.row, starts[m.of_request] + (m.of_row or 0)) for m in e.misrouted]
    times = {row / of_row if of_row else 0.0 for row, of_row in pairs}
    several = len(pairs) > 1 and len(times) == 1
    return int(min(times)) if several and min(times) > 1 and min(times).is_integer() else 0


@hint(Level.PATTERN)
def uneven_offsets(e: Evidence) -> str:
    """Rows are ragged, and offsets fit only equal counts."""
    # Offsets for other counts lead a row to the KV tokens of another.
    if not e.schedule.case.mode.is_ragged() or (e.attended is not None and e.attended.right):
        return ""
    if not e.in_graph or e.schedule.case.mode is ForwardMode.EXTEND:
        return _uneven_in_eager(e)
    uneven = len({r.new for r in e.step.requests}) > 1 or e.step.requests[0].new != e.schedule.case.width
    even_passed = any(len({r.new for r in o.step.requests}) == 1 for o in e.passed if o.replay)
    if not uneven or (0 in e.wrong and len(e.wrong) == e.step.bs and not even_passed):
        return ""
    starts = list(accumulate((r.new for r in e.step.requests), initial=0))[:-1]
    return (
        f"query offsets are probably not the running sum of the counts: {_accepted_counts(e)}, so rows are packed at "
        f"{', '.join(map(str, starts))}. A kernel that assumes a fixed stride, or was captured with one, is right "
        "only if every request accepts every token"
    )


def _accepted_counts(e: Evidence) -> str:
    counts, case = ", ".join(str(r.new) for r in e.step.requests), e.schedule.case
    return f"accepted counts are {counts} of {case.width}" if case.mode.is_speculative() else f"new rows are {counts}"


def _uneven_in_eager(e: Evidence) -> str:
    """The wrong rows are exactly those that a uniform stride gets wrong."""
    counts = [r.new for r in e.step.requests]
    strides = dict.fromkeys((e.schedule.case.width, counts[0], sum(counts) // len(counts), max(counts)))
    stride = next((n for n in strides if n and e.rows in _wrong_under(n, counts)), None)
    # If all rows are wrong, that does not prove a stride; the tokens that one of them attended to must.
    attended = e.attended
    if e.computes_nan and e.rows == [row for row, (of, *_) in enumerate(places_of(counts)) if of in e.wrong]:
        # No foreign key is read, and whole requests are wrong: a stride need not be the reason.
        return ""
    misrouted = attended is not None and "others" in attended.elsewhere and not attended.used & attended.wanted
    reported = len(e.rows) < sum(counts) or misrouted
    if stride is None or len(counts) == 1 or not reported:
        return ""
    if attended is not None:
        if attended.own and not _as_under(stride, e, attended):
            return ""
        to_itself = _place_under(stride, e, attended)[0] == attended.request
        unshared = bool(attended.used & attended.wanted) and e.schedule.case.layout != "shared"
        # The stride would make the row read the tokens of one request, and the row read those of another one.
        if "others" in attended.elsewhere if to_itself else unshared:
            return ""
    if e.changed is not None and e.changed.wrong_without("counts"):
        return ""  # with as many rows in every request a uniform stride is right
    if counted_as_widest(e) == stride:
        return (
            f"the causal bound, or the number of new rows, is that of {stride} rows for every request: "
            f"{_accepted_counts(e)}, and only requests with fewer new tokens are wrong; their offset is right in both "
            "cases"
        )
    return (
        f"query offsets have a uniform stride of {stride}, but must be the running sum of the counts, since rows are "
        f"packed: {_accepted_counts(e)}, and the wrong rows are those that a uniform stride of {stride} gets wrong"
    )


def counted_as_widest(e: Evidence) -> int:
    """Rows of the widest request, if the wrong requests have fewer rows and all requests before them have that many, so
    that a uniform stride gives the right offset; else 0."""
    counts = [request.new for request in e.step.requests]
    place, most = places_of(counts), max(counts, default=0)
    wrong = sorted({place[row][0] for row in e.rows})
    fewer = all(counts[request] < most for request in wrong)
    return most if wrong and fewer and all(count == most for count in counts[: wrong[-1]]) else 0


def _as_under(stride: int, e: Evidence, attended: AttendedKeys) -> bool:
    """True if a row that read only its own request's KV tokens read as many as with a uniform stride."""
    requests = e.step.requests
    request, place = _place_under(stride, e, attended)
    if request != attended.request:
        return False
    ends = {requests[request].prefix + place + 1, attended.length - stride + place + 1}
    return max(attended.used) + 1 in {min(end, attended.length) for end in ends}


def _place_under(stride: int, e: Evidence, attended: AttendedKeys) -> tuple[int, int]:
    """The request, and the row inside it, to which a uniform stride assigns a row."""
    return divmod(sum(r.new for r in e.step.requests[: attended.request]) + attended.row, stride)


def _wrong_under(stride: int, counts: list[int]) -> list[list[int]]:
    """Flat rows that a uniform stride makes wrong, with lengths counted from the end and from the start of the keys."""
    place = places_of(counts)
    from_end = [t for t, (b, i, n) in enumerate(place) if (t // stride, t % stride - stride) != (b, i - n)]
    from_start = [t for t, (b, i, _) in enumerate(place) if (t // stride, t % stride) != (b, i)]
    return [rows for rows in (from_end, from_start) if rows]


@hint(Level.PATTERN)
def row_tile(e: Evidence) -> str:
    """Rows from a multiple of 8 on are wrong."""
    if any(request.tree is not None and request.tree.topk > 1 for request in e.step.requests):
        return ""  # a mask of so many bits would look the same
    data, starts = e.expected.data, set()
    for request in e.wrong:
        mine = data.row_request == request
        wrong = [int(data.row_offset[row]) for row in e.rows if int(data.row_request[row]) == request]
        if len(wrong) < 2 or wrong != list(range(wrong[0], int(mine.sum()))):
            return ""
        starts.add(wrong[0])
    start = min(starts, default=0)
    if len(starts) != 1 or start == 0 or start % 8:
        return ""
    groups = {shape.num_qo_heads // shape.num_kv_heads for shape in e.wrong_shapes}
    group = groups.pop() if len(groups) == 1 else 1
    packed = f", or of {start * group} rows with the {group} heads of a KV head packed" if group > 1 else ""
    return (
        f"the second tile of rows is wrong (tiles of {start}{packed}): rows from {start} on are wrong, those before "
        "them are right"
    )


@hint(Level.REMARK)
def only_padded(e: Evidence) -> str:
    """Replays without padding are right, and so is the step in eager mode."""
    replays = [o for o in e.passed if o.replay]
    if e.in_graph and e.observed.padded and replays and all(o.padded == 0 for o in replays):
        return "only replays with padded rows are wrong"
    return ""
