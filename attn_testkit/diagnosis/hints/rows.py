"""Which requests, rows, heads and dims are wrong, and what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ...checks.describe import index_ranges
from ...contract import ForwardMode
from ..attended_keys import AttendedKeys
from .evidence import Evidence, places_of

__all__ = [
    "kept_from_before",
    "last_page",
    "later_by_number",
    "later_requests",
    "length_threshold",
    "only_padded",
    "other_shape",
    "part_of_a_head",
    "row_tile",
    "rows_of_others",
    "some_dims",
    "some_heads",
    "uneven_offsets",
]


def rows_of_others(e: Evidence) -> str:
    """Wrong rows hold what others should: the numbers are right, and lie in the wrong place."""
    if not e.swapped:
        return ""
    text = ", ".join(row.text for row in e.swapped[:2]) + (" and so on" if len(e.swapped) > 2 else "")
    alike = sorted({request for row in e.swapped for request in (row.request, row.of_request)})
    if all(row.copied for row in e.swapped) and max(r.new for r in e.step.requests) == 1:
        text = f"requests {index_ranges(alike)} hold the same values as each other"
    return f"{text}: {_swap_cause(e)}"


def _swap_cause(e: Evidence) -> str:
    several = max(r.new for r in e.step.requests) > 1
    if any(row.queried for row in e.swapped):
        return "the stride or the offset of query rows (q may be a view: take its strides)"
    if any(row.copied for row in e.swapped):
        return "offsets of query rows (cu_seqlens_q), or the index of a request"
    if all(row.of_row is not None for row in e.swapped):
        if times := _times_its_row(e):
            return (
                f"row {times}n holds what row n should, counted over all requests: output rows are written by the "
                "strides of another tensor, such as q, which may be a view"
            )
        if all(row.request == row.of_request for row in e.swapped):
            return "the order of rows in a request"
        if not several:
            return "results go back in another order than the requests came in, or offsets of query rows"
        return "offsets of query rows (cu_seqlens_q), or an order of requests that is not undone"
    starts = list(accumulate((request.new for request in e.step.requests), initial=0))
    flat = [(starts[m.request] + m.row, m.of_request) for m in e.swapped]
    by_row = [of_request == row for row, of_request in flat if row < e.step.bs]
    if several and len(by_row) > 1 and all(by_row):
        return "what a request has, such as its page table, is looked up by query row: row j has that of request j"
    # Some rows of a request, or rows one behind the other, are taken for another's: their offsets. All: its table row.
    partly = any(
        {m.row for m in e.swapped if m.request == i} != set(range(r.new))
        for i, r in enumerate(e.step.requests)
        if any(m.request == i for m in e.swapped)
    )
    as_own = all(m.keys == e.step.requests[m.request].prefix + m.row + 1 for m in e.swapped)
    as_theirs = all(m.keys == e.lens[m.of_request] for m in e.swapped)
    if partly or not (as_own or as_theirs or several) or uneven_offsets(e):
        return "offsets of query rows (cu_seqlens_q)"
    return "the request row (req_pool_indices), the table's stride, or offsets of query rows"


def _times_its_row(e: Evidence) -> int:
    """The number that each swapped row is a multiple by of the row whose result it holds; else 0."""
    starts = list(accumulate((request.new for request in e.step.requests), initial=0))
    pairs = [(starts[m.request] + m.row, starts[m.of_request] + (m.of_row or 0)) for m in e.swapped]
    times = {row / of_row if of_row else 0.0 for row, of_row in pairs}
    several = len(pairs) > 1 and len(times) == 1
    return int(min(times)) if several and min(times) > 1 and min(times).is_integer() else 0


def uneven_offsets(e: Evidence) -> str:
    """Ragged rows, and offsets that suit equal counts alone."""
    # Offsets that suit other counts lead a row to the KV tokens of another.
    if not e.schedule.case.mode.is_ragged() or (e.attended is not None and e.attended.right):
        return ""
    if not e.in_graph or e.schedule.case.mode is ForwardMode.EXTEND:
        return _uneven_in_eager(e)
    uneven = len({r.new for r in e.step.requests}) > 1 or e.step.requests[0].new != e.schedule.case.width
    even_passed = any(len({r.new for r in o.step.requests}) == 1 for o in e.passed if o.replay)
    if not uneven or (0 in e.wrong and len(e.wrong) == e.step.bs and not even_passed):
        return ""
    return (
        f"{_accepted_counts(e)}: rows are packed, so query offsets are their running "
        "sum. A uniform stride, or packed offsets for a kernel captured with a uniform stride, is right only when all "
        "requests accept all"
    )


def _accepted_counts(e: Evidence) -> str:
    counts, case = ", ".join(str(r.new) for r in e.step.requests), e.schedule.case
    return f"accepted counts are {counts} of {case.width}" if case.mode.is_speculative() else f"new rows are {counts}"


def _uneven_in_eager(e: Evidence) -> str:
    """The wrong rows are exactly those that a uniform stride gets wrong."""
    counts = [r.new for r in e.step.requests]
    strides = dict.fromkeys((e.schedule.case.width, counts[0], sum(counts) // len(counts), max(counts)))
    stride = next((n for n in strides if e.rows in _wrong_under(n, counts)), None)
    # Where all rows are wrong, that they are says nothing of a stride: what one of them attended to has to.
    attended = e.attended
    if e.computes_nan and e.rows == [row for row, (of, *_) in enumerate(places_of(counts)) if of in e.wrong]:
        # No foreign key is read, and whole requests are wrong: that needs no stride.
        return ""
    astray = attended is not None and "others" in attended.elsewhere and not attended.used & attended.wanted
    told = len(e.rows) < sum(counts) or astray
    if stride is None or len(counts) == 1 or not told:
        return ""
    if attended is not None and attended.own and not _as_under(stride, e, attended):
        return ""
    # What lies under the stride is a row of the request itself, and it read another's.
    if attended is not None and astray and _place_under(stride, e, attended)[0] == attended.request:
        return ""
    return (
        f"{_accepted_counts(e)}, and the wrong rows are those that a uniform stride of {stride} gets wrong: rows are "
        "packed, so query offsets are the running sum of the counts"
    )


def _as_under(stride: int, e: Evidence, attended: AttendedKeys) -> bool:
    """Whether a row that read its own request's KV tokens alone read as many as a uniform stride leads it to."""
    requests = e.step.requests
    request, place = _place_under(stride, e, attended)
    if request != attended.request:
        return False
    ends = {requests[request].prefix + place + 1, attended.length - stride + place + 1}
    return max(attended.used) + 1 in {min(end, attended.length) for end in ends}


def _place_under(stride: int, e: Evidence, attended: AttendedKeys) -> tuple[int, int]:
    """The request, and the row inside it, that a uniform stride takes a row for."""
    return divmod(sum(r.new for r in e.step.requests[: attended.request]) + attended.row, stride)


def _wrong_under(stride: int, counts: list[int]) -> list[list[int]]:
    """Flat rows that differ with a uniform stride, lengths counted from the end of the keys, and from the start."""
    place = places_of(counts)
    from_end = [t for t, (b, i, n) in enumerate(place) if (t // stride, t % stride - stride) != (b, i - n)]
    from_start = [t for t, (b, i, _) in enumerate(place) if (t // stride, t % stride) != (b, i)]
    return [rows for rows in (from_end, from_start) if rows]


def kept_from_before(e: Evidence) -> str:
    """What the step before has in common with the wrong one, or has less of."""
    before = e.before
    if before is None or not before.requests or not e.wrong:
        return ""
    lens = before.lens
    if e.step is before:
        return "the same step was right the first time: look at what planning or forward leaves on self"
    if sorted(lens) == sorted(e.lens):
        return (
            "the step before has the same lengths and other requests: a plan, a page table, a mask or partial results "
            "that are kept while lengths look the same"
        )
    if min(e.lens[i] for i in e.wrong) > max(lens):
        return (
            f"the step before had up to {max(lens)} KV tokens, and only requests with more are wrong: a table, buffer "
            "or grid that was made for it"
        )
    if min(e.wrong) >= before.bs:
        return f"only requests from {before.bs} on are wrong, and the step before had {before.bs}: sizes made for it"
    return ""


def part_of_a_head(e: Evidence) -> str:
    """NaN or Inf beside numbers in one row of one head: nothing that is read as a key or value does that."""
    bad = ~e.judgement.finite
    # An overflow gives Inf and NaN by the signs of the values.
    large = e.schedule.case.data in ("peaked", "negative", "cliff")
    if not (bad.any(-1) & (~bad & e.judgement.exists).any(-1)).any() or e.reads_foreign or large:
        return ""
    return (
        "only a part of a head's values is NaN or Inf: written over after they were computed, or never: the layout of "
        "a scratch for partial results, or a head dim that is padded"
    )


def some_heads(e: Evidence) -> str:
    """Lengths and pages are a row's; heads of one row differ by how heads are packed."""
    heads = list(e.attended.heads) if e.attended else []
    if not heads:
        return ""
    count, kv_heads, _ = (e.attended and e.attended.shape) or e.schedule.case.head_shape
    group = count // kv_heads
    which = f"only head{'s' if len(heads) > 1 else ''} {index_ranges(heads)} of {count}"
    if e.attended and e.attended.elsewhere.get("others", 0.0) >= _ALL_OF_IT:
        cause = f"rows lie {count} heads apart, and with another stride, such as a padded one, they are another row's"
    elif _lacks_a_part(e):
        cause = (
            "their part of the prefix is lost in the merge with the new tokens: a log-sum-exp or partial result that "
            "is another head's or row's, such as [T, H] read as [H, T]"
        )
    elif group > 1 and {head // group for head in heads} != set(range(kv_heads)) and len(heads) % group == 0:
        cause = "an offset or stride of KV heads, or the head mapping"
    elif group > 1:
        cause = "packing of grouped heads (rows x heads of a KV head as one tile), their head mapping, or their masks"
    else:
        cause = "an offset or stride of heads, or a parameter by head"
    return (
        f"{which} attended to other KV tokens than they should: {cause} (all heads of a row have one length and one "
        "page table)"
    )


_ALL_OF_IT = 0.9
"""A part of the weight from which on nothing else was read."""


def _lacks_a_part(e: Evidence) -> bool:
    """The whole prefix is missing and all new KV tokens are there, or the other way round."""
    attended = e.attended
    if attended is None or not attended.used or attended.used - attended.wanted:
        return False
    prefix = e.step.requests[attended.request].prefix
    missing = attended.wanted - attended.used
    sides = ({key for key in attended.wanted if key < prefix}, {key for key in attended.wanted if key >= prefix})
    return missing in sides and min(len(side) for side in sides) > 0


def row_tile(e: Evidence) -> str:
    """Rows from a multiple of 8 on are wrong."""
    if any(request.tree is not None and request.tree.topk > 1 for request in e.step.requests):
        return ""  # a mask of so many bits says the same
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
    return f"rows from {start} on are wrong, those before are right: the second tile of rows (tiles of {start}{packed})"


def other_shape(e: Evidence) -> str:
    """Wrong are the layers whose heads are not those of the first, and no others."""
    maps, found = e.schedule.case.head_maps, e.wrong_shapes
    if not maps or found != [maps[1].layer]:
        return ""
    (heads, kv_heads, dim), (of_first, kv_of_first, dim_of_first) = found[0], maps[0].layer
    return (
        f"only layers of {heads} query and {kv_heads} KV heads of {dim} are wrong, and the first layer has {of_first} "
        f"and {kv_of_first} of {dim_of_first}: if cases whose layers have the same heads pass, a workspace, buffer, "
        "plan, stride, group or scale is that of the first layer"
    )


def some_dims(e: Evidence) -> str:
    """A run of dims, and the others right. One-hot values make a key of a dim, so there it says nothing."""
    dims = [int(dim) for dim in e.judgement.wrong.flatten(0, 2).any(0).nonzero().flatten()]
    widths = {shape.head_dim - e.schedule.case.rope_dim for shape in e.wrong_shapes}
    if len(widths) != 1 or e.schedule.case.data == "footprint" or not dims or part_of_a_head(e):
        return ""
    size = widths.pop()
    if len(dims) < 8:
        return _few_dims(dims, size)
    if dims[0] and dims[0] % 16 == 0 and size - dims[0] <= len(dims) * 3 / 2:
        return (
            f"only dims from {dims[0]} on are wrong: a head dim of {size} that is padded, or computed a tile at a time"
        )
    first, end = dims[0] // 16 * 16, -(-(dims[-1] + 1) // 16) * 16
    if end - first >= size or end - first > len(dims) * 3 / 2:
        return ""
    return f"only dims {first}..{end - 1} of {size} are wrong{_dims_they_hold(e, first, end)}"


def _few_dims(dims: Sequence[int], size: int) -> str:
    """What one lane loads or stores at once, in every head and row (onnxruntime #29593)."""
    first, end = dims[0], dims[-1] + 1
    if end - first != len(dims) or first % 4 or end % 4 or end - first == size:
        return ""
    return f"only dims {first}..{end - 1} of {size} are wrong: what one thread loads or stores of a head at once"


def _dims_they_hold(e: Evidence, first: int, end: int) -> str:
    """Whose values stand in the wrong dims, if those of as many others do."""
    want, limit, count = e.expected.attention, e.expected.attention_limit, end - first
    wrong = e.judgement.wrong.any(-1)
    held = e.judgement.out[..., first:end].double()[wrong]
    for start in range(0, want.shape[-1] - count + 1, 16):
        theirs = slice(start, start + count)
        if bool(((held - want[..., theirs][wrong]).abs() <= limit[..., theirs][wrong]).all()):
            return (
                f", and hold what dims {start}..{start + count - 1} should: a tile of the head dim is loaded or stored "
                "in place of another"
            )
    return ": a tile of the head dim, of V where it is loaded or of the output where it is stored"


def length_threshold(e: Evidence) -> str:
    """Longer requests are wrong and shorter ones right, under a graph."""
    right = [n for i, n in enumerate(e.lens) if i not in e.wrong]
    right += [n for o in e.passed if o.replay for n in o.step.lens]
    wrong = [e.lens[i] for i in e.wrong]
    if not e.in_graph or not right or not wrong or max(right) >= min(wrong):
        return ""
    # What is too short reads too little. Weight that went to slots of nobody went by a table.
    if e.attended is not None and not {"page0", "unowned"}.isdisjoint(e.attended.elsewhere):
        return ""
    if e.attended is not None and e.attended.wanted < e.attended.used:
        return ""  # it reads all that it should, and more
    return (
        f"requests of up to {max(right)} KV tokens are right, of {min(wrong)} and more are wrong: a maximum length, a "
        "grid or a number of splits of the capture-time batch is still in force"
    )


def last_page(e: Evidence) -> str:
    """Wrong are exactly the requests whose last page is partly filled."""
    page = e.schedule.case.page_size
    if page == 1 or not e.wrong:
        return ""
    partly = [i for i, n in enumerate(e.lens) if n % page]
    if e.wrong == partly and len(partly) < e.step.bs:
        return "only requests with a partly filled last page differ"
    return ""


def later_requests(e: Evidence) -> str:
    """Request 0 is right, and all others are wrong."""
    # Two requests say little, and where request 0 is the longest, what is wrong may be all that are shorter. A stride
    # leads to others' KV tokens.
    shorter, own = e.lens[0] < max(e.lens), e.attended is not None and e.attended.own
    if e.step.bs > 2 and shorter and not own and e.wrong == list(range(1, e.step.bs)):
        if e.judgement.unwritten.flatten(2).any(-1).any(0)[e.rows].all() and not e.reads_foreign:
            return "request 0 is computed and no other is: a work list, a grid or a number of tiles that ends early"
        return "request 0 is right and all others are wrong: it lies at offset 0 under any stride; look at the strides"
    return ""


def later_by_number(e: Evidence) -> str:
    """Requests from some number on are wrong, which is not their length."""
    first = min(e.wrong, default=0)
    if first < 8 or e.wrong != list(range(first, e.step.bs)):
        return ""
    return (
        f"requests from {first} on are wrong, all before are right: offsets, schedules or flags that are made for a "
        "warp or a block of requests at a time"
    )


def only_padded(e: Evidence) -> str:
    """Replays without padding are right, and so is the step in eager."""
    replays = [o for o in e.passed if o.replay]
    if e.in_graph and e.observed.padded and replays and all(o.padded == 0 for o in replays):
        return "only replays with padded rows are wrong"
    return ""
