"""Causes of missing KV tokens, if a row attends to no wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...cases.features.server.table import variant_of
from ...steps.data import make_layers
from ...steps.schedule import Request
from ..attended_keys import AttendedKeys, ranges
from .assumed_keys import may_end_at, only_last_pages_missing
from .batch import length_threshold
from .evidence import SMALLEST_TILE, Evidence
from .rows import counted_as_widest, uneven_offsets


@dataclass(frozen=True)
class _Missing:
    e: Evidence
    attended: AttendedKeys
    keys: list[int]
    """Missing KV tokens, ascending."""

    @property
    def request(self) -> Request:
        return self.e.step.requests[self.attended.request]

    @property
    def page(self) -> int:
        return self.e.schedule.case.page_size

    @property
    def last(self) -> int:
        """The last KV token that the row should see."""
        return max(self.attended.wanted, default=-1)

    @property
    def read_from_the_first_on(self) -> bool:
        """True if KV tokens 0, 1, 2 and so on are read."""
        return self.attended.used == set(range(len(self.attended.used)))


def missing_keys(e: Evidence, attended: AttendedKeys, missing: list[int]) -> str:
    """The first of the known causes that fits."""
    known = (cause(_Missing(e, attended, missing)) for cause in _CAUSES)
    found = next((text for text in known if text is not None), None)
    return "KV tokens in the middle are missing: probably a page or a split is skipped" if found is None else found


def _fills_the_context(m: _Missing) -> str | None:
    most, lens = m.e.schedule.max_context_len, m.e.lens
    if m.keys != [most - 1] or m.e.wrong != [request for request, n in enumerate(lens) if n == most]:
        return None
    if len(m.e.wrong) == len(lens):
        return None  # the last KV token of every request may be missing then
    return (
        f"the KV token that fills the context is missing: only requests of max_context_len ({most}) KV tokens are "
        "wrong, so positions are probably compared with max_context_len - 1"
    )


def _in_a_tree(m: _Missing) -> str | None:
    tree, prefix = m.request.tree, m.request.prefix
    if tree is None or tree.topk < 2:
        return None
    if m.attended.row == 0 and m.keys == [prefix]:
        return (
            "a draft node does not see its own KV token: probably an ancestor mask without the diagonal, or lengths "
            "without the draft, so that it overlaps the end of the prefix"
        )
    if m.keys[0] >= prefix and m.request.new > 1:
        return (
            "draft nodes that should be visible are masked: probably the tree mask is stale, at another offset, or "
            "cut off"
        )
    return None


def _later_ones(m: _Missing) -> str | None:
    later = [key for key in sorted(m.attended.wanted) if key > m.request.prefix + m.attended.row]
    if m.keys != later or variant_of(m.e.schedule.case).causal:
        return None
    return (
        "the mask is causal, but the layers of this case are not (layer.causal is False): KV tokens after the row's "
        "own position are missing"
    )


def _none_is_read(m: _Missing) -> str | None:
    if m.attended.used:
        return None
    if uneven_offsets(m.e):
        return ""
    if m.attended.length < 2:
        return None
    return (
        "all KV tokens are missing, none is read: probably a length of zero or below, an early exit, a row that "
        "nothing computes, a window outside the request, or KV that is not read"
    )


def _not_stored_yet(m: _Missing) -> str | None:
    if not m.e.reads_foreign or m.keys[0] < m.request.prefix or m.attended.elsewhere:
        return None
    return "attention runs before the store, or does not wait for it: new KV tokens are read before they are stored"


def _as_captured(m: _Missing) -> str | None:
    if m.attended.used != {0} or m.request.new != 1 or not m.e.observed.replay or m.e.of_capture is False:
        return None
    return (
        "only KV token 0 is attended to, as if the length were 1, as at capture: probably a replay does not update "
        "lengths, or positions begin at 0"
    )


def _without_prefix(m: _Missing) -> str | None:
    row = m.attended.row
    if m.attended.used != set(range(row + 1)) or row + 1 >= m.request.prefix or m.attended.elsewhere:
        return None
    in_pages = row == 0 and 1 in _pages(m) and not m.e.in_graph
    return (
        f"row {row} attends to KV tokens 0..{row}, as if there were no prefix: probably a causal mask that is aligned "
        "to the first KV token instead of the last, or positions that begin at 0"
        + (", or a length that is counted in pages" if in_pages else "")
    )


def _counted_in_pages(m: _Missing) -> str | None:
    # If as many are missing as the request has new ones, pages are not the reason.
    others = {1, m.last + 1, m.last + 1 - m.request.new}
    if len(m.attended.used) not in _pages(m) - others or not m.read_from_the_first_on:
        return None
    return (
        f"only KV tokens 0..{len(m.attended.used) - 1} are attended to, as many as the request has pages: probably a "
        "length that is counted in pages"
    )


def _pages(m: _Missing) -> set[int]:
    return {-(-length // m.page) for length in (m.attended.length, m.last + 1)}


def _shared_prefix(m: _Missing) -> str | None:
    shared = m.request.shared
    if not shared or m.keys != sorted(key for key in m.attended.wanted if key < shared):
        return None
    return (
        f"the {shared} KV tokens that the request shares with others are missing, but its own are read: probably the "
        "plan for a shared prefix (a cascade), or the merge of the two"
    )


def _whole_prefix(m: _Missing) -> str | None:
    if m.keys != sorted(key for key in m.attended.wanted if key < m.request.prefix):
        return None
    lone = ", or the last KV token of each tile is used for all" if m.attended.used == {m.last} else ""
    return (
        "the whole prefix is missing, only new tokens are attended to: probably a path for requests without a "
        f"prefix, or a prefix length of 0{lone}{_same_keys(m)}"
    )


def _same_keys(m: _Missing) -> str:
    """Other reasons for which the row attends to the same KV tokens: a window, or the end of a span."""
    used = m.attended.used
    if not used or used != set(range(min(used), m.last + 1)):
        return ""
    first, others = min(used), []
    width = m.last - first
    if m.attended.window >= 0 and width in {0, *_windows(m)} - {m.attended.window}:
        others.append(f"a window of {width} instead of {m.attended.window}")
    spans = [span for span in m.request.spans if first in (span[0], span[1] + 1)]
    if spans:
        where = "begins" if spans[0][0] == first else "ends"
        others.append(f"a mask of the span {spans[0][0]}..{spans[0][1]}, which {where} there")
    return f"; or {' or '.join(others)}, since this row attends to the same KV tokens then" if others else ""


def _windows(m: _Missing) -> set[int]:
    """Windows of the layers of the case; -1 for those without one."""
    return {layer.sliding_window_size for layer in make_layers(m.e.schedule.case)}


def _end_of_the_prefix(m: _Missing) -> str | None:
    first, count = m.keys[0], len(m.keys)
    if not m.attended.used or min(m.attended.used) >= first or m.keys != list(range(first, m.request.prefix)):
        return None
    twice = ", as many as it has new rows: probably a length omits or subtracts them twice"
    return (
        f"of the prefix, the last {_are(count)} missing, but new ones are read{twice if count == m.request.new else ''}"
    )


def _pages_of_a_branch(m: _Missing) -> str | None:
    first_own = m.request.prefix // m.page * m.page
    if m.request.draft is None or m.keys[0] < first_own or m.keys[-1] - m.keys[0] < len(m.keys):
        return None
    return (
        f"KV tokens {ranges(m.keys)} are missing, which a branch has in its own pages: probably its table row has "
        "entries of another branch, or entries that were never filled"
    )


def _cut_off(m: _Missing) -> str | None:
    """All KV tokens from one on are missing."""
    if m.keys != sorted(key for key in m.attended.wanted if key >= m.keys[0]):
        return None
    e, attended, last, first, page = m.e, m.attended, m.last, m.keys[0], m.page
    count = last + 1 - first
    before = max(attended.used, default=-1)
    if length_threshold(e) or (counted_as_widest(e) and uneven_offsets(e)):
        return ""
    if count % (1 << 16) == 0:
        return f"the last {_are(count)} missing: probably a length or position that is kept in 16 bits"
    if first - 1 > before and attended.not_asked:
        narrow = ", or a length or position that is kept in 16 bits" if last >> 16 else ""
        return (
            f"KV tokens are missing from somewhere between {before + 1} and {first} on: probably a fixed capacity, a "
            f"page table or grid that is too small for this length{narrow}"
        )
    if page > 1 and first == last // page * page:
        of_all = may_end_at(e, first)
        if not of_all and only_last_pages_missing(e):
            return ""
        capacity = f", or a fixed capacity of {first}" if of_all and _may_be_a_capacity(first, SMALLEST_TILE) else ""
        if count == 1:
            return (
                "the last KV token is missing, the only one in the last page: probably seq_lens of this mode, an "
                f"end that is off by 1, or a partly filled page that is dropped{capacity}"
            )
        return f"the KV tokens of the last page are missing{capacity}"
    if _may_be_a_capacity(first, _ROUND):
        return (
            f"KV tokens from {first} on are missing: probably a fixed capacity of {first}, or of a number of tiles or "
            "splits"
        )
    if SMALLEST_TILE <= first < page and first & (first - 1) == 0:
        return (
            f"KV tokens from {first} on are missing, and a page has {page}: probably tiles of {first} whose offset in "
            f"the page is ignored, so that all read the first one, or a capacity of {first}"
        )
    if e.in_graph:
        since = "was fixed when it was captured" if e.of_capture else "does not follow the batch"
        return (
            f"the last {_are(count)} missing, only in the graph: probably a length, a maximum length or a grid that "
            f"{since}"
        )
    text = f"the last {_are(count)} missing: probably seq_lens of this mode, or an end that is off by {count}"
    alike = [i for i, length in enumerate(e.lens) if i != attended.request and -(-length // page) * page == first]
    if page > 1 and alike and count > page:
        return (
            f"{text}. The pages of request {alike[0]} have room for {first} KV tokens, so its length or its part of a "
            "schedule is probably used"
        )
    return text


_ROUND = 256
"""Least power of two that is probably a constant in code, if nothing else ends there."""


def _may_be_a_capacity(count: int, least: int) -> bool:
    """True for a power of two from ``least`` on, and for a multiple of 1024."""
    return (count >= least and count & (count - 1) == 0) or (count >= 1024 and count % 1024 == 0)


def _are(count: int) -> str:
    return "KV token is" if count == 1 else f"{count} KV tokens are"


def _first_ones(m: _Missing) -> str | None:
    if m.keys != sorted(key for key in m.attended.wanted if key <= m.keys[-1]):
        return None
    same = _same_keys(m)
    return f"the first {_are(len(m.keys))} missing: probably the start of a window, or an offset into the table{same}"


_CAUSES: tuple[Callable[[_Missing], str | None], ...] = (
    _fills_the_context,
    _in_a_tree,
    _later_ones,
    _none_is_read,
    _not_stored_yet,
    _as_captured,
    _without_prefix,
    _counted_in_pages,
    _shared_prefix,
    _whole_prefix,
    _end_of_the_prefix,
    _pages_of_a_branch,
    _cut_off,
    _first_ones,
)
"""Functions that return None if they do not fit, and an empty text if another hint covers it."""
