"""Which keys a wrong row used: too few, too many, or somebody else's."""

from __future__ import annotations

from ..attended_keys import Footprint
from .evidence import Evidence
from .rows import length_threshold, row_tile, uneven_offsets

__all__ = ["elsewhere", "key_range", "masked_too_late", "own_rows_mixed", "stand_ins"]


def elsewhere(e: Evidence) -> str:
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
        "unowned": "unowned slots are read: a page or slot computed wrongly, or a stale tail of the page table",
    }[place]


def masked_too_late(e: Evidence) -> str:
    """Foreign slots spoil the result without having any weight."""
    print_ = e.footprint
    if not e.reads_foreign or print_ is None or not print_.right:
        return ""
    return (
        "foreign slots have no weight, and still spoil the sum: 0 * NaN is NaN. Keep them out by a select or a masked "
        "load, not by a zero weight or an added mask"
    )


def stand_ins(e: Evidence) -> str:
    """As many keys count twice as are missing."""
    print_ = e.footprint
    if print_ is None or not print_.doubled or len(print_.doubled) != len(print_.wanted - print_.used):
        return ""
    return "some keys stand in for others: a page or tile is looked up twice and another one never"


def own_rows_mixed(e: Evidence) -> str:
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


def key_range(e: Evidence) -> str:
    print_ = e.footprint
    if print_ is None or (print_.elsewhere and not print_.used & print_.wanted):
        return ""
    # A length is a row's, and all rows of a request have one: where rows or heads are mixed up, keys follow from that.
    if e.mixups or print_.heads or row_tile(e):
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
    if not print_.used and uneven_offsets(e):
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
    if length_threshold(e):
        return ""
    if first - 1 > before and print_.not_asked:
        narrow = ", or a length or position that is kept in 16 bits" if last >> 16 else ""
        return (
            f"keys are missing from somewhere between {before + 1} and {first} on: a fixed capacity, a page table or "
            f"grid that is too small for this length{narrow}"
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
