"""Some heads of a row are wrong: nothing computed them, or they hold what another place should."""

from __future__ import annotations

from ...checks.describe import index_ranges, row_name
from .evidence import Evidence
from .suspects import SAME_RESULTS

__all__ = ["heads_not_computed", "results_of_other_heads"]

_MOST_PLACES = 48
"""Wrong heads of rows that are compared."""


def heads_not_computed(e: Evidence) -> str:
    """Exactly some heads are wrong, and these are zero throughout in every row."""
    if e.schedule.case.head_maps or not e.judgement.all_finite:
        return ""
    wrong = e.judgement.wrong.any(-1)
    zero = (e.judgement.out == 0).all(-1)
    heads = wrong.flatten(0, 1).any(0).nonzero().flatten().tolist()
    count = wrong.shape[-1]
    if not heads or len(heads) == count or not zero[wrong].all() or not zero[..., heads].all():
        return ""
    which = f"head{'s' if len(heads) > 1 else ''} {index_ranges(heads)} of {count}"
    return (
        f"{which} {'are' if len(heads) > 1 else 'is'} 0 throughout, in every row: nothing computed "
        f"{'them' if len(heads) > 1 else 'it'}. A grid or a loop over heads that is too small, such as a number of "
        "tiles of heads that is rounded down"
    )


def results_of_other_heads(e: Evidence) -> str:
    """Every wrong head of a row that was written holds what another head of another row should."""
    if e.swapped or e.schedule.case.head_maps or e.schedule.case.data in SAME_RESULTS or e.reads_foreign:
        return ""
    judgement, want, limit = e.judgement, e.expected.attention, e.expected.attention_limit
    places = (judgement.wrong.any(-1) & ~judgement.unwritten.any(-1)).nonzero().tolist()[:_MOST_PLACES]
    found: list[tuple[int, int, int, int, int]] = []
    for layer, row, head in places:
        near = ((judgement.out[layer, row, head].double() - want[layer]).abs() <= limit[layer]).all(-1)
        if not near.any() or near[row, head]:
            return ""
        of_row, of_head = near.nonzero()[0].tolist()
        found.append((layer, row, head, of_row, of_head))
    if len(found) < 2 or all(row == of_row for _, row, _, of_row, _ in found):
        return ""
    data = e.expected.data
    layer, row, head, of_row, of_head = next(each for each in found if each[1] != each[3])
    return (
        f"{row_name(data, row)} head {head} holds the result of {row_name(data, of_row)} head {of_head} and so on: the "
        "output is written with another stride of rows or heads than it has, such as a number of heads that is not its "
        "own"
    )
