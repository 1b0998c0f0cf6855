"""Patterns of wrong requests in a batch, by number, length or place, or by comparison with the step before."""

from __future__ import annotations

import torch

from ...cases.features.kv_splits import splits_of
from ...contract import KVSplit
from ...families.softmax.attention import windowed
from ...steps.data import make_layers
from .evidence import Evidence
from .hint import Level, hint


@hint(Level.SHOWN, silences=("nothing_computed",))
def kept_from_before(e: Evidence) -> str:
    """The step before has equal lengths, or was smaller."""
    before = e.before
    if before is None or not before.requests or not e.wrong:
        return ""
    lens = before.lens
    if e.step is before:
        return "planning or forward leaves state on self: the same step was right the first time"
    if sorted(lens) == sorted(e.lens):
        return (
            "a plan, page table, mask or partial results are reused because lengths look the same: the step before "
            "has the same lengths and other requests"
        )
    if min(e.lens[i] for i in e.wrong) > max(lens):
        return (
            f"a table, buffer or grid was sized for the step before: it had up to {max(lens)} KV tokens, and only "
            "longer requests are wrong"
        )
    if min(e.wrong) >= before.bs:
        return (
            f"a buffer or grid was sized for the step before: only requests from {before.bs} on are wrong, and that "
            f"step had {before.bs}"
        )
    return ""


@hint(Level.SHOWN, silences=("later_requests", "last_page", "elsewhere"))
def only_empty_splits(e: Evidence) -> str:
    """Exactly the requests without a KV token in some KV split are wrong, or those after them."""
    requests = range(e.step.bs)
    for part in splits_of(e.schedule.case):
        empty = [_empty(e, part, request) for request in requests]
        if not any(empty) or all(empty):
            continue
        if e.wrong == [request for request in requests if empty[request]]:
            return (
                "a KV split without tokens is attended to anyway, or gets weight in the merge: only requests "
                f"without a KV token in {part} are wrong"
            )
        if e.wrong == [request for request in requests[1:] if empty[request - 1] and not empty[request]]:
            return (
                "a list of requests or lengths leaves out requests without a KV token in a split: only requests "
                f"after one without a KV token in {part} are wrong"
            )
    return ""


def _empty(e: Evidence, part: KVSplit, request: int) -> bool:
    """True if no row of the request sees a KV token of the split, in any wrong layer."""
    data, held = e.expected.data, e.step.requests[request]
    of_part = part.holds(torch.arange(data.visible.shape[-1]), torch.tensor(held.prefix))
    layers = zip(make_layers(e.schedule.case), e.wrong_layers, strict=True)
    seen = [windowed(data.visible, data, layer)[request, : held.new] for layer, bad in layers if bad]
    return not any(bool((each & of_part).any()) for each in seen)


@hint(Level.SHOWN)
def last_request_not_written(e: Evidence) -> str:
    """All of the last request is unwritten, and all others are right."""
    rows, last = e.expected.data.row_request, e.step.bs - 1
    if e.wrong != [last] or last == 0 or e.schedule.case.head_maps or e.may_be_nan:
        return ""
    if not e.comparison.unwritten[:, rows == last].all():
        return ""
    return (
        "offsets of requests (cu_seqlens_q, indptr) lack an entry, or a grid or loop covers one request too few: no "
        f"row of request {last}, the last one, is written, and all others are right"
    )


@hint(Level.PATTERN)
def only_empty_prefixes(e: Evidence) -> str:
    """Exactly the requests without a prefix are wrong, in a draft; servers have no such requests."""
    if e.schedule.case.draft is None or not e.wrong:
        return ""
    empty = [i for i, request in enumerate(e.step.requests) if request.prefix == 0]
    if e.wrong != empty or len(empty) == e.step.bs:
        return ""
    return (
        "only requests without a prefix are wrong. Servers never draft without one; if your planning relies on that, "
        "declare server=ServerConventions(drafts_without_prefix=False)"
    )


@hint(Level.PLACE)
def length_threshold(e: Evidence) -> str:
    """Longer requests are wrong and shorter ones right, under a graph."""
    right = [n for i, n in enumerate(e.lens) if i not in e.wrong]
    right += [n for o in e.passed if o.replay for n in o.step.lens]
    wrong = [e.lens[i] for i in e.wrong]
    if not e.in_graph or not right or not wrong or max(right) >= min(wrong):
        return ""
    # A short capacity reads too little. Weight in unowned slots points to a table.
    if e.attended is not None and not {"page0", "unowned"}.isdisjoint(e.attended.elsewhere):
        return ""
    if e.attended is not None and e.attended.wanted < e.attended.used:
        return ""  # it reads all that it should and more
    if max(right) == 1 and e.attended is not None and e.attended.used == {0}:
        return ""  # the length of a capture, which ``key_range`` names
    whose = "of the captured batch" if e.of_capture else "that does not follow the batch"
    return (
        f"the graph probably still uses a maximum length, a grid or a number of splits {whose}: "
        f"requests of up to {max(right)} KV tokens are right, but requests of {min(wrong)} or more are wrong"
    )


@hint(Level.PLACE)
def last_page(e: Evidence) -> str:
    """Exactly the requests whose last page is partly filled are wrong."""
    page = e.schedule.case.page_size
    if page == 1 or not e.wrong:
        return ""
    if e.attended is not None and not e.attended.used:
        return ""  # a row that reads none of its own KV tokens has another reason
    partly = [i for i, n in enumerate(e.lens) if n % page]
    if e.wrong == partly and len(partly) < e.step.bs:
        return "only requests with a partly filled last page are wrong"
    return ""


@hint(Level.PLACE)
def later_requests(e: Evidence) -> str:
    """Request 0 is right, and all others are wrong."""
    # Two requests prove little, and if request 0 is the longest, length may be the reason. A wrong stride leads to KV
    # tokens of other requests.
    shorter, own = e.lens[0] < max(e.lens), e.attended is not None and e.attended.own
    if e.step.bs > 2 and shorter and not own and e.wrong == list(range(1, e.step.bs)):
        if e.comparison.unwritten.flatten(2).any(-1).any(0)[e.rows].all() and not e.reads_foreign:
            return "a work list, a grid or a number of tiles probably ends early: request 0 is computed and no other is"
        return (
            "a stride is probably wrong: request 0 is right and all others are wrong, and request 0 is at offset 0 "
            "with any stride"
        )
    return ""


@hint(Level.PLACE, silences=(Level.GUESS,))
def later_by_number(e: Evidence) -> str:
    """Requests from some number on are wrong, and not because of their length."""
    first = min(e.wrong, default=0)
    if first < 8 or e.wrong != list(range(first, e.step.bs)):
        return ""
    return (
        f"offsets, schedules or flags are probably computed per warp or block of requests: requests from {first} on "
        "are wrong, all requests before are right"
    )
