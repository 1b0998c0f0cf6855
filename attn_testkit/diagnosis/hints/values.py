"""Patterns of the contents of wrong rows: results of another layer, or only zeros."""

from __future__ import annotations

from ...checks.describe import row_name
from ...steps.data import make_layers
from .batch import length_threshold
from .evidence import Evidence
from .hint import Level, hint
from .rows import row_tile


@hint(Level.SHOWN, silences=("later_requests", "elsewhere"))
def rows_of_other_layers(e: Evidence) -> str:
    """Wrong rows hold the result of a row of another layer: outputs of layers overlap."""
    if e.misrouted or e.comparison.right or e.schedule.case.head_maps:
        return ""
    want, limit, wrong = e.expected.attention, e.expected.attention_limit, e.comparison.wrong.flatten(2).any(-1)
    found: list[str] = []
    for layer, row in wrong.nonzero().tolist()[:_MOST_ROWS]:
        near = ((e.comparison.out[layer, row].double() - want).abs() <= limit).flatten(2).all(-1)
        # With codes only counts of KV tokens may be wrong, and all numbers within limits: those of the layer itself.
        own = bool(near[layer, row])
        near[layer] = False
        if own or not near.any():
            return ""
        of_layer, of_row = near.nonzero()[0].tolist()
        data, name = e.expected.data, e.comparison.name
        whose = f"the result of {row_name(data, of_row)} of {name(of_layer)}"
        found.append(f"{row_name(data, row)} of {name(layer)} holds {whose}")
    if not found:
        return ""
    more = " and so on" if len(found) > 1 else ""
    return f"outputs of layers share memory or overlap: {found[0]}{more}"


_MOST_ROWS = 12
"""Number of wrong rows that are compared."""


@hint(Level.PATTERN, silences=(Level.GUESS,))
def last_rows_right(e: Evidence) -> str:
    """Only the last row of each wrong request is right, and no KV token is left out."""
    attended = e.attended
    if attended is None or attended.used != attended.wanted or attended.elsewhere or attended.heads or e.misrouted:
        return ""
    if attended.faint or e.reads_foreign or not e.comparison.all_finite or rows_before_the_last(e) < 2:
        return ""
    return (
        "rows of a request probably share state that each needs for itself, such as statistics of partial results: "
        "of each wrong request only the last row is right, and those before it are wrong with the right KV tokens"
    )


def rows_before_the_last(e: Evidence) -> int:
    """Number of wrong rows, if they are all rows but the last one of each wrong request; 0 if they are not."""
    data, wrong, shown = e.expected.data, set(e.rows), 0
    for request in range(e.step.bs):
        rows = (data.row_request == request).nonzero().flatten().tolist()
        if not rows:
            continue  # a request of an extend may have no new row
        *before, last = rows
        if last in wrong or (request in e.wrong and not wrong.issuperset(before)):
            return 0
        shown += len(before) * (request in e.wrong)
    return shown


@hint(Level.PATTERN)
def one_row_each(e: Evidence) -> str:
    """Exactly the first rows are written, one per request."""
    written = (~e.comparison.unwritten).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    if e.step.tokens <= e.step.bs or written != list(range(e.step.bs)):
        return ""
    rows = f"rows 0-{e.step.bs - 1} of the output are" if e.step.bs > 1 else "row 0 of the output is"
    return f"a plan or a grid probably has one row per request: only {rows} written, as many as there are requests"


@hint(Level.PATTERN, silences=("key_range",))
def nothing_computed(e: Evidence) -> str:
    """Wrong rows are all zeros, which attention over the values of a case never gives."""
    wrong = e.comparison.wrong.flatten(2).any(-1)
    zero = (e.comparison.out == 0).flatten(2).all(-1)
    if not wrong.any() or not zero[wrong].all() or row_tile(e) or length_threshold(e) or _computed_with_nan(e):
        return ""
    if in_spans := _rows_of_spans(e):
        return in_spans
    widths = with_a_window_alone(e)
    if widths and not (e.changed is not None and e.changed.wrong_without("window")):
        return (
            "the sliding window probably covers no KV token of the request, as with positions, a length or a prefix "
            f"of another request: only the layers with a sliding window ({widths}) are wrong, and all zeros"
        )
    if e.step.data == "negative" and e.changed is not None and e.changed.right_without("data"):
        return (
            "a finite value is probably used as minus infinity, above all logits of this case (near -6e4): the wrong "
            "rows are all zeros, as if they saw no KV token, and right with other values in q, k and v"
        )
    if len(wrong) > 1 and wrong[1:].any(1).all() and not wrong[0].any():
        return (
            "a counter, a semaphore or a work list is probably set by a plan and used up by the first layer: the "
            "result is all zeros in every layer but the first"
        )
    if e.before is not None:
        which = "the output is all zeros, in every layer" if zero.all() else "the wrong rows are all zeros"
        return (
            "a counter, flag or work list is left from before, or padded rows have offsets of an older batch: "
            f"{which}, and right without the steps before it: nothing was computed, or zeros overwrote the result"
        )
    if e.schedule.case.kv_splits:
        return (
            "the weights of the KV splits are lost, as in exp of a log-sum-exp without subtracting the larger one, or "
            "nothing merges the splits: the result of merge_state is all zeros"
        )
    whose = "of the captured batch" if e.of_capture else "that does not follow the batch"
    if zero.all() and e.in_graph and e.observed.replay and not any(seen.replay for seen in e.passed):
        captured = f", or a grid or a number of tiles {whose}"
        return (
            "nothing was computed, the output is all zeros, in every layer, and no replay of the case is right: "
            "probably a counter, a semaphore or a work list that a warm-up or an earlier launch leaves used up and no "
            f"replay resets{captured}{_or_nan(e)}"
        )
    size = e.schedule.case.page_size
    dropped = f"drops a last page that is not full: no request fills one of {size}" if max(e.lens) < size else ""
    if zero.all() and e.passed:
        lone = ": here one new row, and no KV token before it" if e.lens == [1] else ""
        if dropped and not lone and any(max(seen.step.lens) >= size for seen in e.passed):
            return (
                f"the output is all zeros, in every layer: the backend probably {dropped}, and in other steps, which "
                f"are right, one does{_or_nan(e)}"
            )
        return (
            "nothing was computed, the output is all zeros, in every layer, and other steps of the case are "
            "right: a choice by the number of requests, rows or KV tokens may find no kernel for these, or the kernel "
            f"returns early{lone}{_or_nan(e)}"
        )
    if zero.all():
        return (
            "nothing was computed, the output is all zeros, in every layer: a choice by head dim, page size, dtype, "
            "group or rows may find no kernel for this case, or the kernel returns early or reads no KV"
            f"{dropped and f', or {dropped}'}{_or_nan(e)}"
        )
    if e.in_graph:
        return (
            "the wrong rows were never computed (they are all zeros): the graph probably still uses a grid, a number "
            f"of tiles or a work list {whose}"
        )
    return (
        "the wrong rows were never computed (they are all zeros): probably a grid or a number of tiles that is too "
        "small, an early exit, a loop over KV tokens that ends before it begins, or a counter that is not 0 when a "
        "kernel begins"
    )


def _rows_of_spans(e: Evidence) -> str:
    """Text if the wrong rows of zeros are those of spans, in every wrong layer, and no other row is wrong."""
    layers = make_layers(e.schedule.case)
    if not any(request.spans for request in e.step.requests):
        return ""
    if e.wrong_layers != [layer.bidirectional_spans for layer in layers] and not all(e.wrong_layers):
        return ""
    data = e.expected.data
    begun, whole = set[int](), set[int]()
    for row, (request, place) in enumerate(zip(data.row_request.tolist(), data.row_offset.tolist(), strict=True)):
        own, at = e.step.requests[request], int(data.query_positions[request, place])
        for first, last in own.spans:
            if first < last and first <= at <= last:
                (begun if first < own.prefix else whole).add(row)
    wrong = set(e.rows)
    if wrong and wrong == begun:
        return (
            "rows of a span that begins in the prefix were never computed (they are all zeros, and exactly these are): "
            "cut a span to the rows of the step, since its first position may be before them"
        )
    return "rows of spans were never computed: exactly these are all zeros" if wrong and wrong == begun | whole else ""


def _or_nan(e: Evidence) -> str:
    """The second possible reason for zeros everywhere, unless a probe showed that no slot of another owner is read."""
    if e.attended is not None and not e.attended.elsewhere:
        return ""
    return (
        "; or a wrong row of the request table is read, so that NaN of slots that are not the request's becomes 0 in a "
        "comparison such as sum > 0"
    )


def _computed_with_nan(e: Evidence) -> bool:
    """True if a row gives weight to slots that hold NaN: its zeros then do not prove that nothing was computed."""
    return e.attended is not None and not {"others"}.issuperset(e.attended.elsewhere) and e.before is None


@hint(Level.REMARK)
def nan_became_zero(e: Evidence) -> str:
    """Wrong rows are all zeros, and have weights once foreign slots hold no NaN."""
    wrong = e.comparison.wrong.flatten(2).any(-1)
    zero = (e.comparison.out == 0).flatten(2).all(-1)
    if not wrong.any() or not zero[wrong].all() or not _computed_with_nan(e):
        return ""
    return (
        "the zeros come from a NaN that was read: with zeros instead of NaN in foreign slots these rows are not zero. "
        "Probably a comparison such as sum > 0, which is false for NaN, selects 0"
    )


def with_a_window_alone(e: Evidence) -> str:
    """The windows of the wrong layers, if exactly the layers with a window are wrong and others have none; else
    empty."""
    windows = [layer.sliding_window_size for layer in make_layers(e.schedule.case)]
    if all(e.wrong_layers) or e.wrong_layers != [window >= 0 for window in windows]:
        return ""
    return ", ".join(str(window) for window in sorted(set(windows)) if window >= 0)
