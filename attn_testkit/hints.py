"""Named patterns of failure. A hint is given when the evidence fits it, and never invented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .cases.schedule import Schedule, Step
from .checks.numeric import wrong_requests
from .checks.observation import Observation
from .contract import ForwardMode
from .footprint import Footprint
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
    reads_foreign: bool = False
    """With zeros instead of NaN in slots of nobody the result is finite."""

    @property
    def step(self) -> Step:
        """The wrong step."""
        return self.observed.step

    @property
    def wrong(self) -> list[int]:
        """Requests that are wrong."""
        return wrong_requests(self.observed, self.expected)

    @property
    def lens(self) -> list[int]:
        """Keys of each request."""
        return [r.prefix + r.new for r in self.step.requests]


def _uneven_offsets(e: Evidence) -> str:
    if e.schedule.case.mode is not ForwardMode.DRAFT_EXTEND or not e.in_graph:
        return ""
    uneven = len({r.new for r in e.step.requests}) > 1 or e.step.requests[0].new != e.schedule.case.width
    even_passed = any(len({r.new for r in o.step.requests}) == 1 for o in e.passed if o.replay)
    if not uneven or (0 in e.wrong and len(e.wrong) == e.step.bs and not even_passed):
        return ""
    counts = ", ".join(str(r.new) for r in e.step.requests)
    return (
        f"accepted counts are {counts} of {e.schedule.case.width}: rows are packed, so query offsets are their running "
        "sum. A uniform stride, or packed offsets for a kernel captured with a uniform stride, is right only when all "
        "requests accept all"
    )


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
    if e.footprint is None:
        return ""
    missing = sorted(e.footprint.wanted - e.footprint.used)
    length = e.lens[e.footprint.request]
    if e.footprint.used and missing and missing == list(range((length - 1) // page * page, length)):
        return "the keys of the last page are missing"
    return ""


def _elsewhere(e: Evidence) -> str:
    """Weight that went to slots which are not the request's own."""
    print_ = e.footprint
    if print_ is None or not print_.elsewhere:
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
    missing, extra = sorted(print_.wanted - print_.used), sorted(print_.used - print_.wanted)
    last = max(print_.wanted, default=-1)
    if print_.doubled and not missing:
        return "keys are counted more than once: new keys from the pool and from k, v as well, or splits that overlap"
    if missing and not extra:
        return _missing(e, print_, missing, last)
    if extra and not missing:
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
    if missing[-1] == last and missing == list(range(missing[0], last + 1)):
        return f"the last {_keys(count)} missing: seq_lens of this mode, or an end that is off by {count}"
    if missing[0] == min(print_.wanted):
        return f"the first {_keys(count)} missing: the start of a window, or an offset into the table"
    return "keys in the middle are missing: a page or a split is skipped"


def _keys(count: int) -> str:
    return "key is" if count == 1 else f"{count} keys are"


def _right_keys(e: Evidence) -> str:
    print_ = e.footprint
    if print_ is None or not print_.right or e.reads_foreign:
        return ""
    case = e.schedule.case
    if not print_.normalised:
        fp8 = "FP8 scales, " if case.kv_dtype != "same" else ""
        cap = " (a soft cap comes before the mask)" if case.logit_cap else ""
        return (
            f"weights of the right keys sum to {print_.total:.3g} instead of 1: look at {fp8}a denominator that counts "
            f"masked keys or misses some{cap}, saturation, or partial results that are combined wrongly"
        )
    suspects = ["scale"]
    suspects += ["soft cap"] if case.logit_cap else []
    suspects += ["sinks"] if case.sinks else []
    suspects += ["FP8 scales"] if case.kv_dtype != "same" else []
    suspects += ["head mapping"] if case.heads.q_heads != case.heads.kv_heads else []
    suspects += ["row order"] if e.step.tokens > e.step.bs else []
    suspects += _DATA_SUSPECTS.get(case.data, [])
    return f"the right keys with wrong weights or values: look at {', '.join(suspects)}"


_DATA_SUSPECTS = {
    "negative": ["a finite value that stands for minus infinity (all logits of this case are near -6e4)"],
    "peaked": ["overflow or saturation of large logits"],
}


def _later_requests(e: Evidence) -> str:
    if e.step.bs > 1 and e.wrong == list(range(1, e.step.bs)):
        return "request 0 is right and all others are wrong: it lies at offset 0 under any stride; look at the strides"
    return ""


def _only_padded(e: Evidence) -> str:
    replays = [o for o in e.passed if o.replay]
    if e.observed.padded and replays and all(o.padded == 0 for o in replays):
        return "only replays with padded rows are wrong"
    return ""


_PATTERNS: tuple[Callable[[Evidence], str], ...] = (
    _uneven_offsets,
    _length_threshold,
    _last_page,
    _masked_too_late,
    _elsewhere,
    _stand_ins,
    _own_rows_mixed,
    _key_range,
    _right_keys,
    _later_requests,
    _only_padded,
)


def hints(evidence: Evidence) -> list[str]:
    """Every pattern that fits, the most telling first."""
    return [text for pattern in _PATTERNS if (text := pattern(evidence))]
