"""What stands in the wrong rows: another layer's result, nothing but zeros, NaN."""

from __future__ import annotations

from ...cases.data import make_layers
from ...checks.describe import row_name
from .evidence import Evidence
from .rows import length_threshold, part_of_a_head, row_tile

__all__ = ["computed_nan", "nothing_computed", "one_row_each", "rows_of_other_layers"]

_MOST_ROWS = 12
"""Wrong rows that are compared."""
_LARGE_LOGITS = ("peaked", "negative", "cliff")
"""Data of which ``right_keys`` says what makes NaN."""


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


def one_row_each(e: Evidence) -> str:
    """As many rows are written as there are requests, and those are the first."""
    written = (~e.judgement.unwritten).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    if e.step.tokens <= e.step.bs or written != list(range(e.step.bs)):
        return ""
    rows = f"rows 0-{e.step.bs - 1} of the output are" if e.step.bs > 1 else "row 0 of the output is"
    return f"only {rows} written, as many as there are requests: a plan or a grid of one row a request"


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


def computed_nan(e: Evidence) -> str:
    """NaN out of a request's own KV tokens."""
    if not e.computes_nan or part_of_a_head(e):
        return ""
    if e.attended is not None and e.attended.right and e.schedule.case.data in _LARGE_LOGITS:
        return ""
    text = "nothing foreign is read. 0 / 0, or -inf minus -inf: a split, a tile or a row that sees no KV token"
    if e.schedule.case.parts:
        return f"{text}, or a part: in this case KV tokens come in parts, and some requests have none in one"
    widest = max(layer.sliding_window_size for layer in make_layers(e.schedule.case))
    if widest >= 0 and e.wrong and all(e.lens[request] > widest + 1 for request in e.wrong):
        return f"{text}, as where a window leaves out the first ones: only requests longer than it are wrong"
    return f"{text}; or an overflow"
