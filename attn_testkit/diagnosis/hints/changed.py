"""Features that a bug needs: the same case is right without one of them, and wrong with it, whatever its values."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...cases.features.server.table import variant_of
from ...steps.kv_groups import group_of_place, pages_in_pool
from ..changed_case import ChangedCases, most_rows
from .assumed_keys import only_last_pages_missing
from .evidence import Evidence, Supposed
from .hint import Level, hint
from .numbers import DATA_SUSPECTS, RESCALING
from .values import rows_before_the_last, with_a_window_alone

_NOT_SMALL = 5.0
"""Error, in limits, up to which rounding may be the reason, so that other values may be right."""


@hint(Level.CAUSE)
def beyond_32_bits(e: Evidence) -> str:
    """The case is right with a small pool."""
    if e.changed is None or not e.changed.right_without("big pool"):
        return ""
    pages = pages_in_pool(e.schedule)
    narrow = ", or a page number is kept in 16 bits" if pages >> 16 else ""
    if pages * e.schedule.case.page_size >> 24:
        narrow += ", or a slot in 24 bits or in float32"
    return (
        "an address overflows 32 bits, since a slot or a page times a stride needs 64 (.to(tl.int64), "
        f"int64_t){narrow}: the case passes with a small KV pool and fails if the pool has elements beyond 2^31"
    )


@hint(Level.CAUSE)
def across_4_gib(e: Evidence) -> str:
    """The step is right with a pool at another address."""
    if e.changed is None or not e.changed.right_elsewhere(e.comparison.observed.step):
        return ""
    return (
        "an address of the pool is computed with 32 bits (an offset added to its lower word, a sign that is extended, "
        "a bound of lower words): the step is right with the pool elsewhere, and wrong if the pool crosses a multiple "
        "of 4 GiB"
    )


@hint(Level.SHOWN, silences=("some_heads", "elsewhere", "read_twice", "later_requests", "last_page"))
def right_with_other_layers(e: Evidence) -> str:
    """The case is right if layers do not differ in heads, KV group or window, whatever was attended to."""
    if e.changed is None or e.in_graph or e.comparison.right:
        return ""
    layers = e.schedule.case.layers
    if layers.shapes and e.changed.right_without("shapes"):
        return (
            "a workspace, buffer, stride, plan, group or scale of another layer is used: the case passes if all "
            "layers have the same heads, and fails if they differ"
        )
    if layers.groups and e.changed.right_without("groups"):
        return (
            "page tables, slots or the pool are not those of the layer's own KV group: the case passes if all layers "
            f"share one KV group, and fails with two{_groups_alone(e)}"
        )
    widths = with_a_window_alone(e)
    if widths and (e.reads_foreign or (e.attended and e.attended.elsewhere)) and e.changed.right_without("window"):
        return (
            "the table, slots or range of layers with a sliding window is wrong: the case passes without a sliding "
            f"window; with one, only the layers that have it ({widths}) are wrong"
        )
    return ""


@hint(Level.SHOWN, silences=("pool_layout", "elsewhere", "last_page", "later_requests"))
def right_with_one_page_size(e: Evidence) -> str:
    """A row reads none of its own KV tokens, as far as is known, and the case is right with only one page size."""
    attended = e.attended
    if attended is None:
        elsewhere = e.reads_foreign and not e.right_with_zeros
    else:
        elsewhere = bool(attended.elsewhere) and not attended.used & attended.wanted
    if e.changed is None or e.in_graph or e.misrouted or not elsewhere or not (page := e.changed.only_right_page):
        return ""
    if page == 1:
        return (
            "pages are confused with slots, such as a page id that is used as a slot, or the number of a page as a "
            "column of a table of slots: the case passes with pages of one slot, and fails with those of "
            f"{e.schedule.case.page_size} and of other sizes"
        )
    return (
        f"a page size of {page} is used in place of context.page_size, as the number of KV tokens or of slots of a "
        f"page: the case passes with pages of {page} slots, and fails with those of {e.schedule.case.page_size} and of "
        "other sizes"
    )


def _groups_alone(e: Evidence) -> str:
    """Name the KV group if only its layers are wrong."""
    groups = {group_of_place(e.schedule, place) for place, bad in enumerate(e.wrong_layers) if bad}
    return f", only in layers of KV group {groups.pop()}" if len(groups) == 1 else ""


@hint(Level.GUESS, silences=("right_with_fewer_requests", "later_tiles", "key_range", "right_keys"))
def right_without(e: Evidence) -> str:
    """The case is right without one of its features."""
    asked = _asked(e)
    if asked is None:
        return ""
    names = ("cap", "sinks", "fp8", "window", "data", "layers") if _right_keys(e) else ("far", "counts")
    return "; ".join(_WITHOUT[name](e) for name in names if asked.right_without(name))


def _asked(e: Evidence) -> ChangedCases | None:
    """Other cases, if a value is clearly wrong: with the right KV tokens, or without some of the last ones."""
    if e.changed is None or e.in_graph or e.misrouted or not e.comparison.all_finite or e.comparison.worst is None:
        return None
    if _right_keys(e):
        return e.changed if e.comparison.margin >= _NOT_SMALL and not e.reads_foreign else None
    return e.changed if _cut_off(e) else None


def _right_keys(e: Evidence) -> bool:
    return e.attended is not None and e.attended.right


def _cut_off(e: Evidence) -> bool:
    """True if some of the last KV tokens have no weight, and the others are right."""
    attended = e.attended
    if attended is None or attended.heads or attended.elsewhere or attended.doubled:
        return False
    missing = attended.wanted - attended.used
    return bool(missing) and attended.used < attended.wanted and min(missing) > max(attended.used, default=-1)


def _of_data(e: Evidence) -> str:
    data = e.step.data
    text = f"the case passes with other values in q, k and v, and fails with those of {data} data"
    return f"{text}: look at {', '.join(DATA_SUSPECTS[data])}" if data in DATA_SUSPECTS else text


def _of_far(e: Evidence) -> str:
    return (
        "the case passes with a max_context_len that fits the requests, and fails with one of "
        f"{variant_of(e.schedule.case).context_len:,}: look at sizes and splits that depend on max_context_len, such "
        f"as "
        "more splits than are merged"
    )


def _of_counts(e: Evidence) -> str:
    case = e.schedule.case
    counts = ", ".join(str(request.new) for request in e.step.requests)
    return (
        "rows or lengths are computed as if all requests had as many rows as the largest: the case passes if every "
        "request has "
        f"{most_rows(case)} new rows, and fails with {counts}"
    )


def _of_sinks(e: Evidence) -> str:
    text = (
        "the case passes without sinks (layer.sinks), and fails with them: look at how a sink joins the denominator, "
        "and which "
        "maximum it uses"
    )
    if not rows_before_the_last(e):
        return text
    return f"{text}. Only the last row of each wrong request is right: it may use the maximum or the sum of another row"


_WITHOUT = {
    "cap": lambda e: (
        "the soft cap probably comes after the mask, where minus infinity becomes -logit_cap and masked KV tokens "
        "have weight: the case passes without the soft cap (layer.logit_cap), and fails with it"
    ),
    "sinks": _of_sinks,
    "fp8": lambda e: (
        "the case passes with a KV pool of the model's dtype, and fails with this FP8 pool: look at k_scale and "
        "v_scale, and "
        "at roundings to FP8"
    ),
    "window": lambda e: (
        "the case passes without a sliding window, and fails with one: look at results of tiles and splits before the "
        "window"
    ),
    "data": _of_data,
    "layers": lambda e: (
        "state that each layer needs for itself is kept for only two layers, or alternates: the case passes with two "
        f"layers, and fails with {e.schedule.case.layers.count}"
    ),
    "far": _of_far,
    "counts": _of_counts,
}
"""Feature -> hint if the case is right without it."""


@hint(Level.GUESS, silences=("key_range", "right_keys"))
def right_with_fewer_requests(e: Evidence) -> str:
    """The batch is right without its last request, although another one is like it."""
    asked = _asked(e)
    if asked is None or not asked.right_with_fewer:
        return ""
    bs = e.schedule.case.bs
    return (
        "the kernel choice and the plan probably change at different numbers of requests: the case passes with "
        f"{bs - 1} requests, and fails with {bs}, although the last request is like others"
    )


@hint(Level.GUESS, silences=("key_range", "right_keys"))
def later_tiles(e: Evidence) -> str:
    """The case is right with requests cut to some number of KV tokens, and wrong with one more."""
    asked = _asked(e)
    if asked is None:
        return ""
    most = asked.right_up_to
    known = f"the case passes if requests are cut to {most} KV tokens, and fails from {most + 1} on"
    if not most and _right_keys(e) and (most := asked.right_up_to_without_sinks):
        return (
            f"without sinks the case passes if requests are cut to {most} KV tokens, and fails from {most + 1} on; "
            "with sinks "
            "always wrong: look at the log-sum-exps of splits or tiles of keys, which are used to merge them and "
            "sinks"
        )
    if not most:
        return ""
    if _right_keys(e):
        suspects = ", ".join(DATA_SUSPECTS.get(e.step.data, [RESCALING]))
        return f"{known}: look at {suspects}, and at how splits are merged by their log-sum-exps"
    left_out = "later splits or tiles of keys that are left out, such as partial results that are not merged"
    data = e.expected.data
    if e.right_for(Supposed(data=replace(data, visible=data.visible & (torch.arange(data.visible.shape[-1]) < most)))):
        why = f"a fixed capacity of {most}{_last_page(e, most)}, or {left_out}"
        return f"KV tokens from {most} on are missing: {why} ({known})"
    if only_last_pages_missing(e):
        return ""
    return f"{known}: probably not a wrong length, but {left_out}"


def _last_page(e: Evidence, first: int) -> str:
    """Name the last page if it begins at KV token ``first`` in every wrong request."""
    page = e.schedule.case.page_size
    if page == 1 or any((e.lens[request] - 1) // page * page != first for request in e.wrong):
        return ""
    return ", a partly filled last page that is dropped (it begins there in every wrong request)"
