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
    if missing and missing == list(range((length - 1) // page * page, length)):
        return "the keys of the last page are missing"
    return ""


def _key_range(e: Evidence) -> str:
    print_ = e.footprint
    if print_ is None:
        return ""
    missing, extra = sorted(print_.wanted - print_.used), sorted(print_.used - print_.wanted)
    last = max(print_.wanted, default=-1)
    if print_.doubled:
        return "keys are counted more than once: new keys from the pool and from k, v as well, or splits that overlap"
    if missing and not extra:
        if missing[-1] == last and missing == list(range(missing[0], last + 1)):
            count = len(missing)
            return f"the last {_keys(count)} missing: seq_lens of this mode, or an end that is off by {count}"
        if missing[0] == min(print_.wanted):
            return f"the first {_keys(len(missing))} missing: the start of a window, or an offset into the table"
        return "keys in the middle are missing: a page or a split is skipped"
    if extra and not missing:
        if e.step.requests[print_.request].tree is not None and extra[0] >= e.step.requests[print_.request].prefix:
            return (
                "draft nodes that are no ancestors are visible: the tree mask is ignored, stale, or at another offset"
            )
        if extra[0] > last:
            return "later tokens are visible: causality, or seq_lens of this mode counted twice"
        return "keys before the window are visible"
    if missing and extra:
        return "other keys than the right ones: a mask, window or row offset of another request or layer"
    if print_.foreign >= 0.02:
        return "keys of others are read: a wrong page or slot, or a stale page table"
    return ""


def _keys(count: int) -> str:
    return "key is" if count == 1 else f"{count} keys are"


def _right_keys(e: Evidence) -> str:
    print_ = e.footprint
    if print_ is None or print_.used != print_.wanted or print_.doubled or print_.foreign >= 0.02:
        return ""
    case = e.schedule.case
    suspects = ["scale"]
    suspects += ["soft cap"] if case.logit_cap else []
    suspects += ["sinks"] if case.sinks else []
    suspects += ["FP8 scales"] if case.kv_dtype != "same" else []
    suspects += ["head mapping"] if case.heads.q_heads != case.heads.kv_heads else []
    suspects += ["row order"] if e.step.tokens > e.step.bs else []
    return f"the right keys with wrong weights or values: look at {', '.join(suspects)}"


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
    _key_range,
    _right_keys,
    _later_requests,
    _only_padded,
)


def hints(evidence: Evidence) -> list[str]:
    """Every pattern that fits, the most telling first."""
    return [text for pattern in _PATTERNS if (text := pattern(evidence))]
