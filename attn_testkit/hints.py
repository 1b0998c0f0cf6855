"""Named patterns of failure. A hint is given when the evidence fits it, and never invented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from .cases.schedule import Schedule, Step
from .checks.describe import index_ranges
from .checks.numeric import margin, stacked, wrong_requests, wrong_values
from .checks.observation import Observation
from .contract import ForwardMode
from .footprint import Footprint
from .mixups import Mixup
from .oracle.expect import Expected

__all__ = ["Evidence", "hints"]


@dataclass(frozen=True)
class Evidence:
    """What is known about one wrong step."""

    schedule: Schedule
    observed: Observation
    expected: Expected
    footprint: Footprint | None
    passed: list[Observation]
    """Steps of the same case-run that were right."""
    in_graph: bool
    """The eager run of the step is right."""
    mixups: tuple[Mixup, ...] = ()
    """Wrong rows that hold what others should."""
    reads_foreign: bool = False
    """With zeros instead of NaN in slots of nobody the result is finite."""

    @property
    def step(self) -> Step:
        """The wrong step."""
        return self.observed.step

    @cached_property
    def wrong(self) -> list[int]:
        """Requests that are wrong."""
        return wrong_requests(self.observed, self.expected)

    @cached_property
    def values(self) -> torch.Tensor:
        """[L, T, Hq, Dv] bool: values that are wrong."""
        return wrong_values(self.observed, self.expected)

    @cached_property
    def rows(self) -> list[int]:
        """Flat rows that are wrong."""
        return [int(row) for row in self.values.any(0).flatten(1).any(-1).nonzero().flatten()]

    @property
    def finite(self) -> bool:
        """No NaN and no Inf."""
        return bool(stacked(self.observed, self.expected).isfinite().all())

    @property
    def before(self) -> Step | None:
        """In eager, the step that the same instance ran before this one."""
        return self.schedule.steps[0] if self.observed.among == "steps" else None

    @property
    def lens(self) -> list[int]:
        """Keys of each request."""
        return [r.prefix + r.new for r in self.step.requests]


def _rows_of_others(e: Evidence) -> str:
    """Wrong rows hold what others should: the numbers are right, and lie in the wrong place."""
    if not e.mixups:
        return ""
    told = ", ".join(mixup.text for mixup in e.mixups[:2]) + (" and so on" if len(e.mixups) > 2 else "")
    alike = sorted({request for mixup in e.mixups for request in (mixup.request, mixup.of_request)})
    if all(mixup.copied for mixup in e.mixups) and max(r.new for r in e.step.requests) == 1:
        told = f"requests {index_ranges(alike)} hold the same values as each other"
    return f"{told}: {_mixup_cause(e)}"


def _mixup_cause(e: Evidence) -> str:
    several = max(r.new for r in e.step.requests) > 1
    if any(mixup.copied for mixup in e.mixups):
        return "offsets of query rows (cu_seqlens_q), or the index of a request"
    if all(mixup.of_row is not None for mixup in e.mixups):
        if all(mixup.request == mixup.of_request for mixup in e.mixups):
            return "the order of rows in a request"
        if not several:
            return "results go back in another order than the requests came in, or offsets of query rows"
        return "offsets of query rows (cu_seqlens_q), or an order of requests that is not undone"
    # Some rows of a request, or rows one behind the other, are taken for another's: their offsets. All: its table row.
    partly = any(
        {m.row for m in e.mixups if m.request == i} != set(range(r.new))
        for i, r in enumerate(e.step.requests)
        if any(m.request == i for m in e.mixups)
    )
    as_own = all(m.keys == e.step.requests[m.request].prefix + m.row + 1 for m in e.mixups)
    as_theirs = all(m.keys == e.lens[m.of_request] for m in e.mixups)
    if partly or not (as_own or as_theirs or several) or _uneven_offsets(e):
        return "offsets of query rows (cu_seqlens_q)"
    return "the request row (req_pool_indices), the table's stride, or offsets of query rows"


def _uneven_offsets(e: Evidence) -> str:
    if e.schedule.case.mode is not ForwardMode.DRAFT_EXTEND:
        return ""
    if not e.in_graph:
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
    return f"accepted counts are {', '.join(str(r.new) for r in e.step.requests)} of {e.schedule.case.width}"


def _uneven_in_eager(e: Evidence) -> str:
    """The wrong rows are exactly those that a uniform stride gets wrong."""
    counts = [r.new for r in e.step.requests]
    if len(set(counts)) == 1 and counts[0] == e.schedule.case.width:
        return ""
    strides = dict.fromkeys((e.schedule.case.width, counts[0], sum(counts) // len(counts), max(counts)))
    stride = next((n for n in strides if e.rows in _wrong_under(n, counts)), None)
    if stride is None or len(counts) == 1:
        return ""
    return (
        f"{_accepted_counts(e)}, and the wrong rows are those that a uniform stride of {stride} gets wrong: rows are "
        "packed, so query offsets are the running sum of the counts"
    )


def _wrong_under(stride: int, counts: list[int]) -> list[list[int]]:
    """Flat rows that differ with a uniform stride, lengths counted from the end of the keys, and from the start."""
    place = [(b, i, n) for b, n in enumerate(counts) for i in range(n)]
    from_end = [t for t, (b, i, n) in enumerate(place) if (t // stride, t % stride - stride) != (b, i - n)]
    from_start = [t for t, (b, i, _) in enumerate(place) if (t // stride, t % stride) != (b, i)]
    return [rows for rows in (from_end, from_start) if rows]


def _kept_from_before(e: Evidence) -> str:
    """What the step before has in common with the wrong one, or has less of."""
    before = e.before
    if before is None or not e.wrong:
        return ""
    lens = [r.prefix + r.new for r in before.requests]
    if e.step is before:
        return "the same step was right the first time: look at what planning or forward leaves on self"
    if sorted(lens) == sorted(e.lens):
        return (
            "the step before has the same lengths and other requests: a plan, a page table or a mask that is kept "
            "while lengths look the same"
        )
    if min(e.lens[i] for i in e.wrong) > max(lens):
        return (
            f"the step before had up to {max(lens)} keys, and only requests with more are wrong: a table, buffer or "
            "grid that was made for it"
        )
    if min(e.wrong) >= before.bs:
        return f"only requests from {before.bs} on are wrong, and the step before had {before.bs}: sizes made for it"
    return ""


def _part_of_a_head(e: Evidence) -> str:
    """NaN or Inf beside numbers in one row of one head: nothing that is read as a key or value does that."""
    bad = ~stacked(e.observed, e.expected).isfinite()
    # An overflow gives Inf and NaN by the signs of the values.
    large = e.schedule.case.data in ("peaked", "negative", "cliff")
    if not (bad.any(-1) & ~bad.all(-1)).any() or e.reads_foreign or large:
        return ""
    return (
        "only a part of a head's values is NaN or Inf: written over after they were computed, or never: the layout of "
        "a scratch for partial results, or a head dim that is padded"
    )


def _some_heads(e: Evidence) -> str:
    """Lengths and pages are a row's; heads of one row differ by how heads are packed."""
    heads = list(e.footprint.heads) if e.footprint else []
    if not heads:
        return ""
    case = e.schedule.case
    count, group = case.heads.q_heads, case.heads.q_heads // case.heads.kv_heads
    told = f"only head{'s' if len(heads) > 1 else ''} {index_ranges(heads)} of {count} used other keys than they should"
    if group > 1 and {head // group for head in heads} != set(range(case.heads.kv_heads)) and len(heads) % group == 0:
        cause = "an offset or stride of KV heads, or the head mapping"
    elif group > 1:
        cause = "packing of grouped heads (rows x heads of a KV head as one tile), their head mapping, or their masks"
    else:
        cause = "an offset or stride of heads, or a parameter by head"
    return f"{told}: {cause} (all heads of a row have one length and one page table)"


def _row_tile(e: Evidence) -> str:
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
    group = e.schedule.case.heads.q_heads // e.schedule.case.heads.kv_heads
    packed = f", or of {start * group} rows with the {group} heads of a KV head packed" if group > 1 else ""
    return f"rows from {start} on are wrong, those before are right: the second tile of rows (tiles of {start}{packed})"


def _some_dims(e: Evidence) -> str:
    """A run of dims to the last, and the others right. One-hot values make a key of a dim, so there it says nothing."""
    dims = [int(dim) for dim in e.values.flatten(0, 2).any(0).nonzero().flatten()]
    size = e.values.shape[-1]
    if e.schedule.case.data == "footprint" or not dims or dims[0] % 16 or dims[0] == 0 or _part_of_a_head(e):
        return ""
    if len(dims) < 8 or size - dims[0] > len(dims) * 3 / 2:
        return ""
    return f"only dims from {dims[0]} on are wrong: a head dim of {size} that is padded, or computed a tile at a time"


def _length_threshold(e: Evidence) -> str:
    right = [n for i, n in enumerate(e.lens) if i not in e.wrong]
    right += [r.prefix + r.new for o in e.passed if o.replay for r in o.step.requests]
    wrong = [e.lens[i] for i in e.wrong]
    if not e.in_graph or not right or not wrong or max(right) >= min(wrong):
        return ""
    return (
        f"requests of up to {max(right)} keys are right, of {min(wrong)} and more are wrong: a maximum length, a grid "
        "or a number of splits of the capture-time batch is still in force"
    )


def _last_page(e: Evidence) -> str:
    page = e.schedule.case.page_size
    if page == 1 or not e.wrong:
        return ""
    partly = [i for i, n in enumerate(e.lens) if n % page]
    if e.wrong == partly and len(partly) < e.step.bs:
        return "only requests with a partly filled last page differ"
    return ""


def _elsewhere(e: Evidence) -> str:
    """Weight that went to slots which are not the request's own."""
    print_ = e.footprint
    if print_ is None or not print_.elsewhere or e.mixups:
        return ""
    place = max(print_.elsewhere, key=lambda name: print_.elsewhere[name])
    if place == "tail":
        return "slots behind the last key are read: the last page counts as full, or a length is too large"
    if not print_.used & print_.wanted:
        return (
            "none of its own keys is used: a page or slot computed wrongly, the request row, the table's stride, or "
            "the offset of its query rows"
        )
    return {
        "others": "keys of other requests are read: a length too large, a wrong page or slot, a stale table entry",
        "page0": "page 0 is read, where padding lives: entries of the page table that were never filled, or an id of 0",
        "nobody": "slots of nobody are read: a page or slot computed wrongly, or a stale tail of the page table",
    }[place]


def _masked_too_late(e: Evidence) -> str:
    """Foreign slots spoil the result without having any weight."""
    print_ = e.footprint
    if not e.reads_foreign or print_ is None or not print_.right:
        return ""
    return (
        "foreign slots have no weight, and still spoil the sum: 0 * NaN is NaN. Keep them out by a select or a masked "
        "load, not by a zero weight or an added mask"
    )


def _stand_ins(e: Evidence) -> str:
    """As many keys count twice as are missing."""
    print_ = e.footprint
    if print_ is None or not print_.doubled or len(print_.doubled) != len(print_.wanted - print_.used):
        return ""
    return "some keys stand in for others: a page or tile is looked up twice and another one never"


def _own_rows_mixed(e: Evidence) -> str:
    """The new tokens of a step are confused with each other."""
    print_ = e.footprint
    if print_ is None:
        return ""
    prefix, layout = e.step.requests[print_.request].prefix, e.schedule.case.layout
    missing, extra = print_.wanted - print_.used, print_.used - print_.wanted
    mixed = len(missing) == len(extra) > 0 and min(missing | extra) >= prefix
    if not mixed or e.step.requests[print_.request].new < 2 or layout == "contiguous":
        return ""
    return "new tokens are mixed up with each other: their slots need not increase (or the mask is another request's)"


def _key_range(e: Evidence) -> str:
    print_ = e.footprint
    if print_ is None or (print_.elsewhere and not print_.used & print_.wanted):
        return ""
    # A length is a row's, and all rows of a request have one: where rows or heads are mixed up, keys follow from that.
    if e.mixups or print_.heads or _row_tile(e):
        return ""
    missing, extra = sorted(print_.wanted - print_.used), sorted(print_.used - print_.wanted)
    last = max(print_.wanted, default=-1)
    if print_.doubled and not missing:
        return "keys are counted more than once: new keys from the pool and from k, v as well, or splits that overlap"
    if missing and not extra:
        return _missing(e, print_, missing, last)
    if extra and not missing:
        if e.expected.data.visible[print_.request, print_.row, extra].all():
            return "keys before the window are visible"
        if e.step.requests[print_.request].tree is not None and extra[0] >= e.step.requests[print_.request].prefix:
            return (
                "draft nodes that are no ancestors are visible: the tree mask is ignored, stale, or at another offset"
            )
        if extra[0] > last:
            return "later tokens are visible: causality, or seq_lens of this mode counted twice"
        return "keys before the window are visible"
    if missing and extra:
        shift = min(print_.used) - min(print_.wanted)
        if print_.used == {key + shift for key in print_.wanted}:
            return f"all keys are shifted by {shift}: the length or position that they are counted from is off by that"
        return "other keys than the right ones: a mask, window or row offset of another request or layer"
    return ""


def _missing(e: Evidence, print_: Footprint, missing: list[int], last: int) -> str:
    count, prefix = len(missing), e.step.requests[print_.request].prefix
    tree = e.step.requests[print_.request].tree
    if tree is not None and tree.topk > 1 and missing[0] >= prefix and e.step.requests[print_.request].new > 1:
        return "draft nodes that should be visible are not: the tree mask is stale, at another offset, or cut off"
    if not print_.used and _uneven_offsets(e):
        return ""
    if not print_.used and print_.length > 1:
        return (
            "all keys are missing, none is used: a length of zero or below, an early exit, a row that nothing "
            "computes, a window that is nowhere in the request, or KV that is not read"
        )
    if missing == sorted(key for key in print_.wanted if key >= missing[0]):
        return _cut_off(e, print_, missing, last)
    if missing == sorted(key for key in print_.wanted if key <= missing[-1]):
        return f"the first {_keys(count)} missing: the start of a window, or an offset into the table"
    return "keys in the middle are missing: a page or a split is skipped"


def _cut_off(e: Evidence, print_: Footprint, missing: list[int], last: int) -> str:
    """All keys from one on are missing."""
    first, count, page = missing[0], last + 1 - missing[0], e.schedule.case.page_size
    before = max(print_.used, default=-1)
    if _length_threshold(e):
        return ""
    if first - 1 > before and print_.not_asked:
        return (
            f"keys are missing from somewhere between {before + 1} and {first} on: a fixed capacity, or a page table "
            "or grid that is too small for this length"
        )
    if (first >= _ROUND and first & (first - 1) == 0) or (first >= 1024 and first % 1024 == 0):
        return f"keys from {first} on are missing: a fixed capacity of {first} keys, or of so many tiles or splits"
    if page > 1 and first == last // page * page:
        if count == 1:
            return (
                "the last key is missing, which is alone in the last page: seq_lens of this mode, an end that is off "
                "by 1, or a partly filled page that is dropped"
            )
        return "the keys of the last page are missing"
    return f"the last {_keys(count)} missing: seq_lens of this mode, or an end that is off by {count}"


_ROUND = 256
"""A power of two from here on is a number that somebody chose."""


def _keys(count: int) -> str:
    return "key is" if count == 1 else f"{count} keys are"


def _right_keys(e: Evidence) -> str:
    print_ = e.footprint
    if print_ is None or not print_.right or e.reads_foreign or e.mixups:
        return ""
    case = e.schedule.case
    if _cannot_tell(e, print_):
        large = not e.observed.replay and ", ".join(_DATA_SUSPECTS.get(case.data, []))
        return f"a NaN where logits are large: look at {large}" if large else ""
    if not print_.normalised:
        fp8 = "FP8 scales, " if case.kv_dtype != "same" else ""
        cap = " (a soft cap comes before the mask)" if case.logit_cap else ""
        return (
            f"weights of the right keys sum to {print_.total:.3g} instead of 1: look at {fp8}a denominator that counts "
            f"masked keys or misses some{cap}, saturation, or partial results that are combined wrongly"
        )
    few = margin(e.observed, e.expected)
    if few < _SMALL_ERROR and case.data != "negative":
        return (
            f"the right keys, and an error of only {few:.2g} times the limit: precision, such as q, logits, weights or "
            "partial sums rounded to the model's dtype"
        )
    suspects = [_rescaling(e)] if _rescaling(e) and case.data != "cliff" else []
    suspects += _DATA_SUSPECTS["cliff"] if case.data == "cliff" else []
    suspects += ["scale"]
    suspects += ["soft cap"] if case.logit_cap else []
    suspects += ["sinks"] if case.sinks else []
    suspects += ["FP8 scales"] if case.kv_dtype != "same" else []
    suspects += ["head mapping"] if case.heads.q_heads != case.heads.kv_heads else []
    suspects += ["the split of a row into latent and rope part"] if case.heads.family == "mla" else []
    suspects += ["row order"] if e.step.tokens > e.step.bs else []
    suspects += _DATA_SUSPECTS.get(case.data, [])
    return f"the right keys with wrong weights or values: look at {', '.join(dict.fromkeys(suspects))}"


_SMALL_ERROR = 5.0
"""Errors up to so many limits are what one rounding too many gives."""
_TILE = 16
"""No kernel's tile of keys is smaller."""
_RESCALING = "rescaling of what was summed when a later tile of keys has a larger maximum"


def _cannot_tell(e: Evidence, print_: Footprint) -> bool:
    """The keys that were asked about need not be all: behind a window others hide, and so does a NaN of a replay."""
    seen = len(print_.wanted)
    hidden = print_.window >= 0 and seen < e.lens[print_.request] - len(print_.not_asked)
    return not e.finite and (e.observed.replay or hidden)


def _rescaling(e: Evidence) -> str:
    """Only rows of several tiles of keys are wrong."""
    data, wrong = e.expected.data, set(e.rows)
    keys = [int(n) for n in data.visible[data.row_request, data.row_offset].sum(-1)]
    right = [n for row, n in enumerate(keys) if row not in wrong]
    lowest = min((keys[row] for row in wrong), default=0)
    if not right or lowest <= max(right) or lowest <= _TILE:
        return ""
    return f"{_RESCALING} or splits are merged (rows of up to {max(right)} keys are right, of {lowest} and more wrong)"


_DATA_SUSPECTS = {
    "negative": [
        "a finite value that stands for minus infinity (all logits of this case are near -6e4)",
        "overflow of q k before it is scaled",
    ],
    "peaked": ["overflow or saturation of large logits"],
    "cliff": [
        f"{_RESCALING} (logits of this case climb and fall by hundreds along the keys)",
        "overflow or saturation of large logits",
    ],
}


def _later_requests(e: Evidence) -> str:
    # Two requests say little, and where request 0 is the longest, what is wrong may be all that are shorter.
    shorter = e.lens[0] < max(e.lens)
    if e.step.bs > 2 and shorter and e.wrong == list(range(1, e.step.bs)):
        return "request 0 is right and all others are wrong: it lies at offset 0 under any stride; look at the strides"
    return ""


def _later_by_number(e: Evidence) -> str:
    """Requests from some number on are wrong, which is not their length."""
    first = min(e.wrong, default=0)
    if first < 8 or e.wrong != list(range(first, e.step.bs)):
        return ""
    return (
        f"requests from {first} on are wrong, all before are right: offsets, schedules or flags that are made for a "
        "warp or a block of requests at a time"
    )


def _only_padded(e: Evidence) -> str:
    replays = [o for o in e.passed if o.replay]
    if e.observed.padded and replays and all(o.padded == 0 for o in replays):
        return "only replays with padded rows are wrong"
    return ""


_PATTERNS: tuple[Callable[[Evidence], str], ...] = (
    _rows_of_others,
    _uneven_offsets,
    _kept_from_before,
    _length_threshold,
    _part_of_a_head,
    _some_heads,
    _row_tile,
    _some_dims,
    _last_page,
    _masked_too_late,
    _later_requests,
    _later_by_number,
    _elsewhere,
    _stand_ins,
    _own_rows_mixed,
    _key_range,
    _right_keys,
    _only_padded,
)


def hints(evidence: Evidence) -> list[str]:
    """Every pattern that fits, the most telling first."""
    return [text for pattern in _PATTERNS if (text := pattern(evidence))]
