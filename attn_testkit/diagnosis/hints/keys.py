"""Patterns of the KV tokens that a wrong row attended to: too few, too many, or KV tokens of other requests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from ...cases.case import Case
from ...cases.features.kv_splits import splits_of
from ...checks.describe import index_ranges
from ...steps.data import make_layers, new_kv
from ...steps.packed_rows import accepted
from ..attended_keys import AttendedKeys, ranges
from .assumed_keys import without_windows
from .evidence import SMALLEST_TILE, Evidence, Supposed
from .hint import Level, hint
from .missing import missing_keys
from .rows import row_tile


@hint(Level.CAUSE)
def stored_elsewhere(e: Evidence) -> str:
    """Every wrong request has KV tokens whose slots have wrong contents."""
    spoilt, attended = _spoilt(e), e.attended
    if attended is not None and _not_read(attended):
        return ""  # the missing tokens were not read, whatever their slots hold
    if not e.wrong or any(not spoilt.get(request) for request in e.wrong):
        return ""
    request = e.wrong[0]
    tokens = spoilt[request]
    verb = "does" if len(tokens) == 1 else "do"
    return (
        "the KV pool has wrong contents, and wrong numbers follow from that, so fix writes-own-kv first: "
        f"KV token{'s' if len(tokens) > 1 else ''} {index_ranges(tokens)} of request {request} {verb} not match "
        "what was stored"
    )


def _not_read(attended: AttendedKeys) -> bool:
    """True if KV tokens are missing and the weights of the others sum to 1; slots that were read without contents would
    lower the sum."""
    missing = attended.wanted - attended.used
    if not missing or attended.total is None or not attended.normalised:
        return False
    return 1 - attended.total < len(missing) / len(attended.wanted) / 2


def _spoilt(e: Evidence) -> dict[int, list[int]]:
    """Request -> its KV tokens that were not stored, were stored wrongly, or were overwritten."""
    pool, packed = e.observed.copies.group("pool"), e.expected.data.row_format
    if "slots" not in pool or e.step.stored:
        return {}
    slots, rows = pool["slots"], pool["rows"]
    due, want = new_kv(e.expected.data)
    held = {int(slot): rows[:, :, at] for at, slot in enumerate(slots)}
    new = {int(slot): want[:, :, at].view(rows.dtype) for at, slot in enumerate(due)}
    if packed:
        held |= {slot: accepted(packed, held[slot], row) for slot, row in new.items() if slot in held}
    wrong = {slot for slot, row in new.items() if slot not in held or not torch.equal(held[slot], row)}
    wrong |= set(held) - set(new)
    return {
        index: [token for token, slot in enumerate(request.slots.tolist()) if slot in wrong]
        for index, request in enumerate(e.step.requests)
    }


@hint(Level.SHOWN)
def window_of_another_layer(e: Evidence) -> str:
    """The row of a layer attended to what the window of another layer lets it see."""
    attended = e.attended
    if attended is None or attended.elsewhere or attended.doubled or attended.not_asked or e.misrouted or e.in_graph:
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
                "layer.sliding_window_size does not reach the kernel (perhaps only for KV tokens of the prefix), or "
                f"another layer's is used: the row attended to what it sees without a window, or with one of {window}, "
                f"which another layer has; its own layer has {own}"
            )
        return (
            "the window of another layer is used instead of layer.sliding_window_size: the row attended to what a "
            f"window of {window} lets it see, which another layer has; its own layer has {own}"
        )
    return ""


@hint(Level.SHOWN)
def beyond_a_slot(e: Evidence) -> str:
    """The missing KV tokens depend on their place in the pool, not on their order."""
    attended = e.attended
    if attended is None or e.misrouted or attended.heads or attended.used - attended.wanted:
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
        f"are read, and none from slot {not_read} on{pages}, whatever their order"
    )


_FEW = 2


@hint(Level.PLACE)
def masked_too_late(e: Evidence) -> str:
    """Foreign slots spoil the result without having any weight."""
    attended = e.attended
    # Slots with weight would change a result even if they held zeros.
    unexamined = attended is None and e.right_with_zeros
    if not e.reads_foreign or not (unexamined or (attended is not None and attended.right)):
        return ""
    if not e.right_with_zeros:
        return (
            "keys are read from wrong slots (a page table, an offset or a stride of only K), or keys of other rows are "
            "used: values of this row are read correctly, but with zeros the result is still wrong"
        )
    return (
        f"{_PROBABLY if unexamined else ''}the kernel multiplies foreign slots by weight 0, but 0 * NaN is NaN: mask V "
        "when it is loaded (tl.load(..., mask=, other=0), or a select), not by a zero weight or an added mask"
        f"{_OF_WHICH if unexamined else ''}"
    )


_PROBABLY = "probably "
_OF_WHICH = ". Such slots are those of masked keys, of a row without keys, and of pages that the table does not name"


@hint(Level.PLACE)
def weighs_a_little(e: Evidence) -> str:
    """Masked KV tokens keep a part of the weight of the others."""
    if e.attended is None or not e.attended.faint:
        return ""
    part = f"masked KV tokens have {max(e.attended.faint.values()):.2g} of the weight of the others"
    if e.schedule.case.logit_cap:
        return (
            f"{part}: the soft cap probably comes after the mask, but must come before it (a capped minus infinity "
            "is -logit_cap)"
        )
    return f"{part}: probably a mask that adds a number which is not low enough, or uses it for minus infinity"


@hint(Level.PLACE)
def pool_layout(e: Evidence) -> str:
    """The keys are wrong, and the layout of the pool is not the default."""
    layout, attended = e.schedule.case.kv_layout, e.attended
    if layout == "nhd" or e.in_graph or e.misrouted:
        return ""
    look = "look at the offset of the layer, at the strides of pages, slots and heads, and at which half is K"
    passes = f"layout {layout} of the KV pool is misread, since the case passes with layout nhd: {look}"
    if attended is None:
        # Probes name no KV tokens with ALiBi, so only another layout can show it.
        asked = e.changed if e.reads_foreign and not e.right_with_zeros else None
        return passes if asked is not None and asked.right_without("layout") else ""
    if attended.right:
        return ""
    # A wrong offset or stride loses KV tokens. A token that counts twice, or should not be visible, was found.
    if attended.wanted <= attended.used and not attended.elsewhere:
        return ""
    if e.changed is not None and e.changed.wrong_without("layout"):
        return ""
    if e.changed is not None and e.changed.right_without("layout"):
        return passes
    text = f"the KV pool of this case has layout {layout}"
    return f"{text}, which is probably misread if cases of other layouts pass: {look}"


@hint(Level.PLACE)
def elsewhere(e: Evidence) -> str:
    """Weight went to slots that the request does not own."""
    attended = e.attended
    if attended is None or not attended.elsewhere or e.misrouted:
        return ""
    place = max(attended.elsewhere, key=lambda name: attended.elsewhere[name])
    whole = "" if e.schedule.case.page_size == 1 else ", or a last page that counts as full"
    if place == "tail" and attended.used & attended.wanted and e.step.requests[attended.request].draft is not None:
        return (
            "slots that hold no KV token of this branch are read in pages of its draft: probably a page of another "
            f"branch, or one that was never filled{whole}"
        )
    if place == "tail" and attended.used & attended.wanted:
        return "slots after the last KV token are read: probably the last page counts as full, or a length is too large"
    if not attended.used & attended.wanted and attended.elsewhere.get("page0", 0.0) < _ALL_OF_IT:
        if _as_packed(e, attended):
            return (
                "the pool is read from its first slot on, as if the KV tokens of all requests were packed one after "
                "another: the weights fit the owners of those slots. Probably the page table or the slots do not reach "
                "the kernel"
            )
        other = ", or strides of K and V, whose rows differ in width" if attended.widths_differ else ""
        return (
            "none of its own KV tokens is read: probably a wrong page or slot, the request row, the table's stride, "
            f"or the offset of its query rows{other}"
        )
    if attended.wanted <= attended.used and place != "page0":
        return f"all of its own KV tokens are read, and slots after them: probably a length that is too large{whole}"
    return {
        "others": "KV tokens of other requests are read: probably a length too large, a wrong page or slot, or a "
        "stale table entry",
        "page0": "page 0 is read, which is reserved for padding: probably entries of the page table that were never "
        f"filled, {_ids_taken_for_slots(e, attended)}or an id of 0",
        "unowned": "unowned slots are read: probably a wrong page or slot, or a stale tail of the page table",
    }[place]


def _as_packed(e: Evidence, attended: AttendedKeys) -> bool:
    """True if the weights fit the owners of the slots that the row's KV tokens would have if all requests were packed
    from slot 0 on, and those slots have several owners."""
    start, page = sum(e.lens[: attended.request]), e.schedule.case.page_size
    others = {int(slot) for request in e.step.requests for slot in request.slots}
    own = set(e.step.requests[attended.request].slots.tolist())
    slots = [start + key for key in attended.wanted]
    if not slots or attended.not_asked or own.intersection(slots):
        return False
    shares = {
        "page0": sum(slot < page for slot in slots) / len(slots),
        "others": sum(slot in others for slot in slots) / len(slots),
    }
    shares["rest"] = 1 - sum(shares.values())
    found = {name: attended.elsewhere.get(name, 0.0) for name in ("page0", "others")}
    found["rest"] = sum(attended.elsewhere.values()) - sum(found.values())
    several = sum(share > _ROUNDED for share in shares.values()) > 1
    return several and all(abs(share - found[name]) <= _ROUNDED for name, share in shares.items())


_ROUNDED = 0.04
"""Difference of two parts of a weight that rounding may cause."""


def _ids_taken_for_slots(e: Evidence, attended: AttendedKeys) -> str:
    """Text that page ids may be used as slots. Empty unless the request reads none of its own keys, and each of its
    page ids is a slot of page 0."""
    size = e.schedule.case.page_size
    if attended.used & attended.wanted or int(e.step.requests[attended.request].slots.max()) // size >= size:
        return ""
    return f"a wrong page or slot, such as a page id that is not multiplied by page_size ({size}), "


_ALL_OF_IT = 0.9
"""Fraction of the weight that counts as all of it."""


@hint(Level.PLACE, silences=("elsewhere", "last_page", "later_requests"))
def pages_counted_as_larger(e: Evidence) -> str:
    """Requests read the first of every few pages, and other slots instead of the next ones."""
    attended, page = e.attended, e.schedule.case.page_size
    if attended is None or not attended.elsewhere or e.misrouted or attended.used == attended.wanted:
        return ""
    for larger in (2 * page, 4 * page, 8 * page, 16 * page):
        if attended.used == {key for key in attended.wanted if key % larger < page} and len(attended.used) > page:
            return (
                f"pages are probably counted as if they had {larger} slots, such as by a constant: of each {larger} KV "
                f"tokens the first {page} are read, which is a page, and then the slots after it"
            )
    return ""


@hint(Level.PLACE, silences=("beyond_a_slot",))
def read_twice(e: Evidence) -> str:
    """KV tokens count twice, and the same number are missing."""
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
    # Some slots of the next page hold no new token, so an unowned slot is read too.
    if e.reads_foreign and fresh > prefix and extra == {key - prefix + fresh for key in missing}:
        return (
            "new tokens are read from the start of the next page on, but begin after the last one of the prefix: "
            f"slot {prefix % page} of its page"
        )
    if e.step.requests[attended.request].draft is not None:
        return (
            "a branch attends to tokens of another one: probably branches share a row of the table, their slots are "
            "read in another order, or the partly filled page of the prefix is not read from the branch's own copy"
        )
    if e.step.requests[attended.request].new < 2 or layout == "contiguous":
        return ""
    return (
        "new tokens are mixed up with each other: probably their slots are assumed to increase, which they need not, "
        "or the mask is that of another request"
    )


@hint(Level.GUESS)
def key_range(e: Evidence) -> str:
    """KV tokens are missing or extra: a length, a window, causality, a tree mask."""
    attended = e.attended
    if attended is None or (attended.elsewhere and not attended.used & attended.wanted):
        return ""
    # All rows of a request share a length: if rows or heads are mixed up, wrong lengths follow from that.
    if e.misrouted or attended.heads or row_tile(e):
        return ""
    missing, extra = sorted(attended.wanted - attended.used), sorted(attended.used - attended.wanted)
    if missing and not {"others", "unowned", "page0"}.isdisjoint(attended.elsewhere):
        return ""  # others are in their places: a slot, not a length
    last = max(attended.wanted, default=-1)
    if attended.elsewhere and not missing:
        return ""  # slots after the end are read, which is not a mask
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
        if shifted := _shifted(e, attended):
            return shifted
        return (
            "other KV tokens than the right ones are attended to: probably a mask, window or row offset of another "
            "request or layer"
        )
    return ""


def _shifted(e: Evidence, attended: AttendedKeys) -> str:
    """All KV tokens are as far from the right ones as the last one is, except those that would be before the first."""
    shift = max(attended.used) - max(attended.wanted)
    if attended.used != {key + shift for key in attended.wanted if key + shift >= 0}:
        return ""
    new = e.step.requests[attended.request].new
    if shift == -new < -1:
        return (
            f"the last {new} KV tokens are missing, as many as the request has new rows, and the window begins as many "
            "too early: probably a length omits the new rows or subtracts them twice, so look at what seq_lens counts "
            "in this mode"
        )
    of_mask = ", or the row of a mask" if attended.row else ""
    return f"all KV tokens are shifted by {shift}: probably the length or position that they count from{of_mask} is off"


def _twice(e: Evidence, attended: AttendedKeys) -> str:
    """No KV token is missing, and some have more weight than others."""
    request, case = e.step.requests[attended.request], e.schedule.case
    if attended.weighed_otherwise:
        fp8 = "FP8 scales, " if case.kv_dtype != "same" else ""
        return (
            f"KV tokens {ranges(sorted(attended.doubled))} have more weight than others, and all of them sum to "
            f"{attended.total:.3g}: look at {fp8}differences between new rows and the prefix, tiles or splits"
        )
    if more := _parts_of(case, attended.wanted, attended.doubled, request.prefix):
        return (
            f"all KV tokens of {more} have more weight than those of other KV splits: look at the base of the "
            "log-sum-exps, and at how they are merged"
        )
    if request.draft is None and min(attended.doubled) < request.prefix:
        scales = ", or FP8 scales that are missing in their split" if case.kv_dtype != "same" else ""
        return (
            "KV tokens of the prefix are counted more than once: probably splits or tiles that overlap, or whose "
            f"lanes past the end are not masked{scales}"
        )
    return (
        "KV tokens are counted more than once: probably new ones both from the pool and from k, v, or splits that "
        "overlap"
    )


def _parts_of(case: Case, wanted: Collection[int], doubled: Collection[int], prefix: int) -> str:
    """The names of the KV splits whose tokens are exactly ``doubled``; else empty."""
    if not case.kv_splits:
        return ""
    of_parts = {
        str(part): {key for key in wanted if part.holds(torch.tensor(key), torch.tensor(prefix))}
        for part in splits_of(case)
    }
    found = {name: keys for name, keys in of_parts.items() if keys and keys <= set(doubled)}
    return " and ".join(found) if set().union(*found.values()) == set(doubled) else ""


def _no_window_at_all(e: Evidence) -> bool:
    """True if all wrong rows are right without a window, and a window that is one too wide does not explain them."""
    data = e.expected.data
    if not e.can_be_asked or not e.right_for(without_windows(e)):
        return False
    return not e.right_for(Supposed(data=replace(data, query_positions=data.query_positions - 1)))


def _before_the_window(e: Evidence, attended: AttendedKeys, extra: list[int]) -> str:
    first = min(attended.wanted)
    if extra == [first - 1] and not _no_window_at_all(e):
        return (
            "one KV token before the window is visible: probably a window that is one too wide (sliding_window_size "
            "counts the tokens before a row's own), or a row position that is one too low"
        )
    gap = list(range(extra[-1] + 1, first))
    if gap and (extra[-1] + 1) % SMALLEST_TILE == 0 and not set(gap) - attended.looked_at:
        return (
            "old results in the workspace, of splits or tiles before the window, are probably merged: KV tokens up to "
            f"{extra[-1]} have weight, but {ranges(gap)} between them and the window from {first} on have none"
        )
    if extra != list(range(first)) or attended.window < 0:
        return "KV tokens before the window are visible"
    where = " where the graph is captured" if e.in_graph else ""
    return (
        "KV tokens before the window are visible, all of them: probably sliding_window_size does not reach the "
        f"kernel{where}, perhaps only for the KV tokens of the prefix"
    )
