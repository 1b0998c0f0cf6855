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
    return f"{found[0]}{more}: outputs of layers lie in the same memory or overlap"


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
        "of each wrong request the last row is right, and those before it are wrong with the right KV tokens: rows of "
        "a request share what each should have of its own, such as the statistics of partial results, and the last "
        "one's stand there"
    )


@hint(Level.PATTERN)
def one_row_each(e: Evidence) -> str:
    """As many rows are written as there are requests, and those are the first."""
    written = (~e.judgement.unwritten).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    if e.step.tokens <= e.step.bs or written != list(range(e.step.bs)):
        return ""
    rows = f"rows 0-{e.step.bs - 1} of the output are" if e.step.bs > 1 else "row 0 of the output is"
    return f"only {rows} written, as many as there are requests: a plan or a grid of one row a request"


@hint(Level.PATTERN, silences=("key_range",))
def nothing_computed(e: Evidence) -> str:
    """Wrong rows are zero throughout, which no attention over the values of a case gives."""
    wrong = e.judgement.wrong.flatten(2).any(-1)
    zero = (e.judgement.out == 0).flatten(2).all(-1)
    if not wrong.any() or not zero[wrong].all() or row_tile(e) or length_threshold(e):
        return ""
    if widths := with_a_window_alone(e):
        return (
            f"the layers with a sliding window ({widths}) are 0 throughout where they are wrong, and no others: "
            "it lies where the request has no KV token, as by positions, a length or a prefix of another request"
        )
    if len(wrong) > 1 and wrong[1:].any(1).all() and not wrong[0].any():
        return (
            "0 throughout in every layer but the first: a counter, a semaphore or a list of work that a plan sets and "
            "the first layer uses up"
        )
    if e.before is not None:
        which = "the output is 0 throughout, in every layer" if zero.all() else "the wrong rows are 0 throughout"
        return (
            f"{which}, and right without the steps before it: nothing was computed, or 0 was written over it. A "
            "counter, a flag or a list of work is left from before, or padded rows have an older batch's offsets"
        )
    if e.schedule.case.parts:
        return (
            "what merge_state made of the parts is 0 throughout where it is wrong: their weights are lost, as where "
            "exp is taken of a log-sum-exp without the larger one, or nothing merges them"
        )
    if zero.all() and e.passed:
        lone = ": here one new row, and no KV token before it" if e.lens == [1] else ""
        return (
            "the output is 0 throughout, in every layer, and other steps of the case are right: nothing was computed. "
            "What is chosen by the number of requests, rows or KV tokens may have nothing for these, or the kernel "
            f"returns early{lone}"
        )
    if zero.all():
        return (
            "the output is 0 throughout, in every layer: nothing was computed. What chooses a kernel by head dim, "
            "page size, dtype, group or rows may have none for this case, or the kernel returns early or reads no KV"
        )
    if e.in_graph:
        return (
            "the wrong rows are 0 throughout: nothing computed them. A grid, a number of tiles or a list of work of "
            "the capture-time batch is still in force"
        )
    return (
        "the wrong rows are 0 throughout: nothing computed them. A grid or a number of tiles that is too small, an "
        "early exit, a loop over KV tokens that ends before it begins, or a counter that is not 0 when a kernel begins"
    )


def with_a_window_alone(e: Evidence) -> str:
    """The windows of the wrong layers, where these are all that have one and some have none; else empty."""
    windows = [layer.sliding_window_size for layer in make_layers(e.schedule.case)]
    if all(e.wrong_layers) or e.wrong_layers != [window >= 0 for window in windows]:
        return ""
    return ", ".join(str(window) for window in sorted(set(windows)) if window >= 0)
