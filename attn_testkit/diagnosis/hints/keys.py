"""Which KV tokens a wrong row attended to: too few, too many, or somebody else's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from ...cases.case import Case
from ...cases.data import make_layers, new_kv
from ...cases.parts import parts_of
from ...checks.describe import index_ranges
from ..attended_keys import AttendedKeys, ranges
from .assumed_keys import without_windows
from .evidence import SMALLEST_TILE, Evidence, Supposed
from .hint import Level, hint
from .missing import missing_keys
from .rows import row_tile


@hint(Level.CAUSE)
def stored_elsewhere(e: Evidence) -> str:
    """Every wrong request has KV tokens whose slots do not hold what they should."""
    spoilt, attended = _spoilt(e), e.attended
    if attended is not None and _not_read(attended):
        return ""  # what is missing was not read, whatever lies there
    if not e.wrong or any(not spoilt.get(request) for request in e.wrong):
        return ""
    request = e.wrong[0]
    tokens = spoilt[request]
    verb = "does" if len(tokens) == 1 else "do"
    return (
        "the KV pool does not hold what it should, and wrong numbers follow from that, so fix writes-own-kv first: "
        f"KV token{'s' if len(tokens) > 1 else ''} {index_ranges(tokens)} of request {request} {verb} not lie in the "
        "pool as stored"
    )


def _not_read(attended: AttendedKeys) -> bool:
    """Whether KV tokens are missing without whom the weights sum to 1: of some that hold nothing the rest would not."""
    missing = attended.wanted - attended.used
    if not missing or attended.total is None or not attended.normalised:
        return False
    return 1 - attended.total < len(missing) / len(attended.wanted) / 2


def _spoilt(e: Evidence) -> dict[int, list[int]]:
    """Request -> its KV tokens that were not stored, were stored wrongly, or were overwritten."""
    pool = e.observed.copies.group("pool")
    if "slots" not in pool or e.step.stored:
        return {}
    slots, rows = pool["slots"], pool["rows"]
    due, want = new_kv(e.expected.data)
    held = {int(slot): rows[:, :, at] for at, slot in enumerate(slots)}
    new = {int(slot): want[:, :, at].view(rows.dtype) for at, slot in enumerate(due)}
    wrong = {slot for slot, row in new.items() if slot not in held or not torch.equal(held[slot], row)}
    wrong |= set(held) - set(new)
    return {
        index: [token for token, slot in enumerate(request.slots.tolist()) if slot in wrong]
        for index, request in enumerate(e.step.requests)
    }


@hint(Level.SHOWN)
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
                "layer.sliding_window_size does not reach the kernel, or not for the KV tokens of the prefix, or is "
                f"another layer's: the row attended to what it sees without a window, or with one of {window}, which "
                f"another layer has, and its own layer has {own}"
            )
        return (
            "the window of another layer is used, take layer.sliding_window_size of each layer: the row attended to "
            f"what a window of {window} lets it see, which another layer has, and its own layer has {own}"
        )
    return ""


@hint(Level.SHOWN)
def beyond_a_slot(e: Evidence) -> str:
    """KV tokens are missing by where they lie in the pool, and not by their order."""
    attended = e.attended
    if attended is None or e.swapped or attended.heads or attended.used - attended.wanted:
        return ""
    wanted, missing = sorted(attended.wanted), sorted(attended.wanted - attended.used)
    at_one_end = missing in (wanted[: len(missing)], wanted[len(wanted) - len(missing) :])
    if min(len(missing), len(attended.used)) < _FEW or at_one_end:
        return ""
    slots, page = e.step.requests[attended.request].slots, e.schedule.case.page_size
    read, not_read = max(int(slots[key]) for key in attended.used), min(int(slots[key]) for key in missing)
    if read > not_read:
        return ""
    pages = f", pages from {not_read // page} on" if page > 1 else ""
    return (
        f"a page number, slot or byte offset is cut off, or addresses are bounded: KV tokens in slots up to {read} "
        f"are read, and none from slot {not_read} on{pages}, in whatever order they come"
    )


_FEW = 2


@hint(Level.PLACE)
def masked_too_late(e: Evidence) -> str:
    """Foreign slots spoil the result without having any weight."""
    attended = e.attended
    if not e.reads_foreign or attended is None or not attended.right:
        return ""
    if not e.right_with_zeros:
        return (
            "keys are read elsewhere (a page table, an offset or a stride of K alone), or other rows are: values of "
            "this row are read where they should be, and with zeros the result is still wrong"
        )
    return (
        "the kernel multiplies foreign slots by weight 0, but 0 * NaN is NaN: mask V when it is loaded (tl.load(..., "
        "mask=, other=0), or a select), not by a zero weight or an added mask"
    )


@hint(Level.PLACE)
def weighs_a_little(e: Evidence) -> str:
    """KV tokens that are masked keep a part of the weight that others have."""
    if e.attended is None or not e.attended.faint:
        return ""
    part = f"masked KV tokens have weight, {max(e.attended.faint.values()):.2g} of what the others have"
    if e.schedule.case.logit_cap:
        return (
            f"{part}: the soft cap probably comes after the mask, and has to come before it (capped after it, minus "
            "infinity is -logit_cap)"
        )
    return f"{part}: probably a mask that adds a number, or uses one for minus infinity, which is not low enough"


@hint(Level.PLACE)
def pool_layout(e: Evidence) -> str:
    """Wrong keys in a pool that is not laid out as most cases have it."""
    layout, attended = e.schedule.case.kv_layout, e.attended
    if layout == "nhd" or attended is None or attended.right or e.in_graph or e.swapped:
        return ""
    # A wrong offset or stride loses KV tokens. One that is counted twice, or that should not be visible, was found.
    if attended.wanted <= attended.used and not attended.elsewhere:
        return ""
    return (
        f"the KV pool of this case has layout {layout}, and if cases of other layouts pass, its layout is probably "
        "misread: look at the offset of the layer, at the strides of pages, slots and heads, and at which half is K"
    )


@hint(Level.PLACE)
def elsewhere(e: Evidence) -> str:
    """Weight that went to slots which are not the request's own."""
    attended = e.attended
    if attended is None or not attended.elsewhere or e.swapped:
        return ""
    place = max(attended.elsewhere, key=lambda name: attended.elsewhere[name])
    whole = "" if e.schedule.case.page_size == 1 else ", or a last page that counts as full"
    if place == "tail" and attended.used & attended.wanted and e.step.requests[attended.request].draft is not None:
        return (
            "slots of its draft's pages are read that hold no KV token of this branch: probably a page that is "
            f"another branch's or was never filled{whole}"
        )
    if place == "tail" and attended.used & attended.wanted:
        return (
            "slots behind the last KV token are read: probably the last page counts as full, or a length is too large"
        )
    if not attended.used & attended.wanted and attended.elsewhere.get("page0", 0.0) < _ALL_OF_IT:
        return (
            "none of its own KV tokens is read: probably a wrong page or slot, the request row, the table's stride, "
            "or the offset of its query rows"
        )
    if attended.wanted <= attended.used and place != "page0":
        return f"all of its own KV tokens are read, and slots behind them: probably a length that is too large{whole}"
    return {
        "others": "KV tokens of other requests are read: probably a length too large, a wrong page or slot, or a "
        "stale table entry",
        "page0": "page 0 is read, which is for padding: probably entries of the page table that were never filled, or "
        "an id of 0",
        "unowned": "unowned slots are read: probably a wrong page or slot, or a stale tail of the page table",
    }[place]


_ALL_OF_IT = 0.9
"""A part of the weight from which on nothing else was read."""


@hint(Level.PLACE, silences=("beyond_a_slot",))
def read_twice(e: Evidence) -> str:
    """As many KV tokens count twice as are missing."""
    attended = e.attended
    if attended is None or not attended.doubled or len(attended.doubled) != len(attended.wanted - attended.used):
        return ""
    return "some KV tokens are read twice, others never: probably a page or tile is looked up instead of another"


@hint(Level.PLACE, silences=("key_range",))
def own_rows_mixed(e: Evidence) -> str:
    """The new tokens of a step are confused with each other."""
    attended = e.attended
    if attended is None:
        return ""
    prefix, layout = e.step.requests[attended.request].prefix, e.step.layout
    missing, extra = attended.wanted - attended.used, attended.used - attended.wanted
    mixed = len(missing) == len(extra) > 0 and min(missing | extra) >= prefix
    if not mixed:
        return ""
    page = e.schedule.case.page_size
    fresh = -(-prefix // page) * page
    # Some of what stands in the next page is no new token, so a slot of nobody is read too.
    if e.reads_foreign and fresh > prefix and extra == {key - prefix + fresh for key in missing}:
        return (
            "new tokens are looked up from the start of the next page on, and lie behind the last one of the prefix: "
            f"slot {prefix % page} of its page"
        )
    if e.step.requests[attended.request].draft is not None:
        return (
            "a branch attends to what another one drafted: probably branches share a row of the table, their slots "
            "are taken in another order, or the page that the prefix fills in part is not read from the branch's own "
            "copy"
        )
    if e.step.requests[attended.request].new < 2 or layout == "contiguous":
        return ""
    return (
        "new tokens are mixed up with each other: probably their slots are taken to increase, which they need not, "
        "or the mask is another request's"
    )


@hint(Level.GUESS)
def key_range(e: Evidence) -> str:
    """What is missing, and what is there too much: a length, a window, causality, a tree mask."""
    attended = e.attended
    if attended is None or (attended.elsewhere and not attended.used & attended.wanted):
        return ""
    # A length is a row's, and all rows of a request have one: where rows or heads are mixed up, that follows.
    if e.swapped or attended.heads or row_tile(e):
        return ""
    missing, extra = sorted(attended.wanted - attended.used), sorted(attended.used - attended.wanted)
    if missing and not {"others", "unowned", "page0"}.isdisjoint(attended.elsewhere):
        return ""  # others stand in their places: a slot, and no length
    last = max(attended.wanted, default=-1)
    if attended.elsewhere and not missing:
        return ""  # what lies behind the end is read, and what follows from that is no mask
    if attended.doubled and not missing:
        return _twice(e, attended)
    if missing and not extra:
        return missing_keys(e, attended, missing)
    if extra and not missing:
        if e.expected.data.visible[attended.request, attended.row, extra].all():
            return _before_the_window(e, attended, extra)
        if e.step.requests[attended.request].tree is not None and extra[0] >= e.step.requests[attended.request].prefix:
            return (
                "draft nodes that are not ancestors are visible: probably the tree mask is ignored, stale, or at "
                "another offset"
            )
        if extra[0] > last:
            return (
                "later tokens are visible: probably the causal mask, or seq_lens of this mode counts the new tokens "
                "twice"
            )
        return _before_the_window(e, attended, extra)
    if missing and extra:
        shift = min(attended.used) - min(attended.wanted)
        if attended.used == {key + shift for key in attended.wanted}:
            of_mask = ", or the row of a mask" if attended.row else ""
            return (
                f"all KV tokens are shifted by {shift}: probably the length or position that they count from{of_mask} "
                "is off"
            )
        return (
            "other KV tokens than the right ones are attended to: probably a mask, window or row offset of another "
            "request or layer"
        )
    return ""


def _twice(e: Evidence, attended: AttendedKeys) -> str:
    """Nothing is missing, and some KV tokens have more weight than others."""
    request, case = e.step.requests[attended.request], e.schedule.case
    if attended.weighed_otherwise:
        fp8 = "FP8 scales, " if case.kv_dtype != "same" else ""
        return (
            f"KV tokens {ranges(sorted(attended.doubled))} have more weight than others, and all of them sum to "
            f"{attended.total:.3g}: look at {fp8}what differs between new rows and the prefix, tiles or splits"
        )
    if more := _parts_of(case, attended.wanted, attended.doubled, request.prefix):
        return (
            f"all KV tokens of {more} have more weight than those of other parts: look at the log-sum-exps of parts "
            "(their base), and at how they are merged"
        )
    if request.draft is None and min(attended.doubled) < request.prefix:
        scales = ", or FP8 scales that their part lacks" if case.kv_dtype != "same" else ""
        return (
            "KV tokens of the prefix are counted more than once: probably splits or tiles that overlap, or whose "
            f"lanes past the end are not masked{scales}"
        )
    return (
        "KV tokens are counted more than once: probably new ones from the pool and from k, v as well, or splits that "
        "overlap"
    )


def _parts_of(case: Case, wanted: Collection[int], doubled: Collection[int], prefix: int) -> str:
    """The names of the parts whose KV tokens ``doubled`` are, all of theirs and no others; else empty."""
    if not case.parts:
        return ""
    of_parts = {
        str(part): {key for key in wanted if part.holds(torch.tensor(key), torch.tensor(prefix))}
        for part in parts_of(case)
    }
    found = {name: keys for name, keys in of_parts.items() if keys and keys <= set(doubled)}
    return " and ".join(found) if set().union(*found.values()) == set(doubled) else ""


def _no_window_at_all(e: Evidence) -> bool:
    """All wrong rows are right without a window, and one that is one too wide does not explain them."""
    data = e.expected.data
    if not e.can_be_asked or not e.right_for(without_windows(e)):
        return False
    return not e.right_for(Supposed(data=replace(data, query_positions=data.query_positions - 1)))


def _before_the_window(e: Evidence, attended: AttendedKeys, extra: list[int]) -> str:
    first = min(attended.wanted)
    if extra == [first - 1] and not _no_window_at_all(e):
        return (
            "one KV token before the window is visible: probably a window that is one too wide (sliding_window_size "
            "counts those before a row's own), or a row that is counted one too low"
        )
    gap = list(range(extra[-1] + 1, first))
    if gap and (extra[-1] + 1) % SMALLEST_TILE == 0 and not set(gap) - attended.looked_at:
        return (
            "results of splits or tiles before the window are probably merged, which an earlier layer or step left "
            f"in the workspace: KV tokens up to {extra[-1]} have weight, and {ranges(gap)} have none, which lie "
            f"between them and the window from {first} on"
        )
    if extra != list(range(first)) or attended.window < 0:
        return "KV tokens before the window are visible"
    where = " where the graph is captured" if e.in_graph else ""
    return (
        "KV tokens before the window are visible, all of them: probably sliding_window_size does not reach the "
        f"kernel{where}, or not for the KV tokens of the prefix"
    )
