"""What stands in the wrong rows: another layer's result, or nothing but zeros."""

from __future__ import annotations

from ...cases.data import make_layers
from ...checks.describe import row_name
from .batch import length_threshold
from .evidence import Evidence
from .hint import Level, hint
from .rows import row_tile

__all__ = ["with_a_window_alone"]


@hint(Level.SHOWN, silences=("later_requests", "elsewhere"))
def rows_of_other_layers(e: Evidence) -> str:
    """Wrong rows hold what a row of another layer should: results of layers lie in each other's memory."""
    if e.swapped or e.judgement.right or e.schedule.case.head_maps:
        return ""
    want, limit, wrong = e.expected.attention, e.expected.attention_limit, e.judgement.wrong.flatten(2).any(-1)
    found: list[str] = []
    for layer, row in wrong.nonzero().tolist()[:_MOST_ROWS]:
        near = ((e.judgement.out[layer, row].double() - want).abs() <= limit).flatten(2).all(-1)
        # Of codes the counts of KV tokens are wrong, and all numbers within their limits: those of the layer itself.
        own = bool(near[layer, row])
        near[layer] = False
        if own or not near.any():
            return ""
        of_layer, of_row = near.nonzero()[0].tolist()
        data, name = e.expected.data, e.judgement.name
        whose = f"the result of {row_name(data, of_row)} of {name(of_layer)}"
        found.append(f"{row_name(data, row)} of {name(layer)} holds {whose}")
    if not found:
        return ""
    more = " and so on" if len(found) > 1 else ""
    return f"outputs of layers lie in the same memory or overlap: {found[0]}{more}"


_MOST_ROWS = 12
"""Wrong rows that are compared."""


@hint(Level.PATTERN, silences=(Level.GUESS,))
def last_rows_right(e: Evidence) -> str:
    """Of each wrong request the last row alone is right, and what is wrong is no KV token that is left out."""
    attended, data = e.attended, e.expected.data
    if attended is None or attended.used != attended.wanted or attended.elsewhere or attended.heads or e.swapped:
        return ""
    if attended.faint or e.reads_foreign or not e.judgement.all_finite:
        return ""
    wrong, shown = set(e.rows), 0
    for request in range(e.step.bs):
        *before, last = (data.row_request == request).nonzero().flatten().tolist()
        if last in wrong or (request in e.wrong and not wrong.issuperset(before)):
            return ""
        shown += len(before) * (request in e.wrong)
    if shown < 2:
        return ""
    return (
        "rows of a request probably share what each needs for itself, such as the statistics of partial results, and "
        "the last row's are kept: of each wrong request the last row is right, and those before it are wrong with "
        "the right KV tokens"
    )


@hint(Level.PATTERN)
def one_row_each(e: Evidence) -> str:
    """As many rows are written as there are requests, and those are the first."""
    written = (~e.judgement.unwritten).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    if e.step.tokens <= e.step.bs or written != list(range(e.step.bs)):
        return ""
    rows = f"rows 0-{e.step.bs - 1} of the output are" if e.step.bs > 1 else "row 0 of the output is"
    return f"a plan or a grid probably has one row per request: only {rows} written, as many as there are requests"


@hint(Level.PATTERN, silences=("key_range",))
def nothing_computed(e: Evidence) -> str:
    """Wrong rows are zero throughout, which no attention over the values of a case gives."""
    wrong = e.judgement.wrong.flatten(2).any(-1)
    zero = (e.judgement.out == 0).flatten(2).all(-1)
    if not wrong.any() or not zero[wrong].all() or row_tile(e) or length_threshold(e):
        return ""
    if widths := with_a_window_alone(e):
        return (
            "the sliding window probably lies where the request has no KV token, as with positions, a length or a "
            f"prefix of another request: only the layers with a sliding window ({widths}) are wrong, and 0 throughout"
        )
    if len(wrong) > 1 and wrong[1:].any(1).all() and not wrong[0].any():
        return (
            "a counter, a semaphore or a work list is probably set by a plan and used up by the first layer: the "
            "result is 0 throughout in every layer but the first"
        )
    if e.before is not None:
        which = "the output is 0 throughout, in every layer" if zero.all() else "the wrong rows are 0 throughout"
        return (
            "a counter, a flag or a work list is left from before, or padded rows have an older batch's offsets: "
            f"{which}, and right without the steps before it, so nothing was computed, or 0 was written over it"
        )
    if e.schedule.case.parts:
        return (
            "the weights of the parts are lost, as when exp is taken of a log-sum-exp without subtracting the larger "
            "one, or nothing merges the parts: what merge_state made of them is 0 throughout"
        )
    if zero.all() and e.in_graph and e.observed.replay and not any(seen.replay for seen in e.passed):
        return (
            "nothing was computed, the output is 0 throughout, in every layer, and no replay of the case is right: "
            "probably a counter, a semaphore or a work list that a warm-up or an earlier launch leaves used up and no "
            "replay resets, or a grid or a number of tiles of the captured batch"
        )
    if zero.all() and e.passed:
        lone = ": here one new row, and no KV token before it" if e.lens == [1] else ""
        return (
            "nothing was computed, the output is 0 throughout, in every layer, and other steps of the case are "
            "right: what is chosen by the number of requests, rows or KV tokens may have nothing for these, or the "
            f"kernel returns early{lone}"
        )
    if zero.all():
        return (
            "nothing was computed, the output is 0 throughout, in every layer: what chooses a kernel by head dim, "
            "page size, dtype, group or rows may have none for this case, or the kernel returns early or reads no KV"
        )
    if e.in_graph:
        return (
            "nothing computed the wrong rows, which are 0 throughout: the graph probably still uses a grid, a number "
            "of tiles or a work list of the captured batch"
        )
    return (
        "nothing computed the wrong rows, which are 0 throughout: probably a grid or a number of tiles that is too "
        "small, an early exit, a loop over KV tokens that ends before it begins, or a counter that is not 0 when a "
        "kernel begins"
    )


def with_a_window_alone(e: Evidence) -> str:
    """The windows of the wrong layers, where these are all that have one and some have none; else empty."""
    windows = [layer.sliding_window_size for layer in make_layers(e.schedule.case)]
    if all(e.wrong_layers) or e.wrong_layers != [window >= 0 for window in windows]:
        return ""
    return ", ".join(str(window) for window in sorted(set(windows)) if window >= 0)
