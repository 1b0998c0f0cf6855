"""Some heads of a row, or some values of a head, are wrong: they were not computed, or they hold the results of
others."""

from __future__ import annotations

import torch

from ...checks.describe import index_ranges, row_name
from .evidence import SAME_RESULTS, Evidence
from .hint import Level, hint


@hint(Level.SHOWN, silences=("some_heads",))
def heads_not_computed(e: Evidence) -> str:
    """Exactly some heads are wrong, and these are all zeros in every row."""
    if e.schedule.case.head_maps or not e.comparison.all_finite:
        return ""
    wrong = e.comparison.wrong.any(-1)
    zero = (e.comparison.out == 0).all(-1)
    heads = wrong.flatten(0, 1).any(0).nonzero().flatten().tolist()
    count = wrong.shape[-1]
    if not heads or len(heads) == count or not zero[wrong].all() or not zero[..., heads].all():
        return ""
    which = f"head{'s' if len(heads) > 1 else ''} {index_ranges(heads)} of {count}"
    return (
        f"a grid or loop over heads is too small, e.g. a number of head tiles that is rounded down: {which} "
        f"{'are' if len(heads) > 1 else 'is'} all zeros, in every row"
    )


@hint(Level.SHOWN, silences=("some_heads", "one_row_each", "later_requests"))
def results_of_other_heads(e: Evidence) -> str:
    """Every wrong head of a row that was written holds what another head of another row should."""
    if e.misrouted or e.schedule.case.head_maps or e.step.data in SAME_RESULTS or e.reads_foreign:
        return ""
    comparison, want, limit = e.comparison, e.expected.attention, e.expected.attention_limit
    places = (comparison.wrong.any(-1) & ~comparison.unwritten.any(-1)).nonzero().tolist()[:_MOST_PLACES]
    found: list[tuple[int, int, int, int, int]] = []
    for layer, row, head in places:
        near = ((comparison.out[layer, row, head].double() - want[layer]).abs() <= limit[layer]).all(-1)
        if not near.any() or near[row, head]:
            return ""
        of_row, of_head = near.nonzero()[0].tolist()
        found.append((layer, row, head, of_row, of_head))
    if len(found) < 2 or all(row == of_row for _, row, _, of_row, _ in found):
        return ""
    data = e.expected.data
    layer, row, head, of_row, of_head = next(each for each in found if each[1] != each[3])
    return (
        "the output is written with a wrong stride of rows or heads, e.g. another number of heads: "
        f"{row_name(data, row)} head {head} holds the result of {row_name(data, of_row)} head {of_head} and so on"
    )


_MOST_PLACES = 48
"""Number of wrong heads of rows that are compared."""


@hint(Level.SHOWN, silences=("right_with_other_layers", "some_heads"))
def other_shape(e: Evidence) -> str:
    """Exactly the layers whose heads differ from those of the first are wrong."""
    maps, found = e.schedule.case.head_maps, e.wrong_shapes
    if not maps or found != [maps[1].layer]:
        return ""
    (heads, kv_heads, dim), (of_first, kv_of_first, dim_of_first) = found[0], maps[0].layer
    return (
        "a workspace, buffer, plan, stride, group or scale is probably the first layer's, if cases whose layers have "
        f"the same heads pass: only layers of {heads} query and {kv_heads} KV heads of {dim} are wrong, and the first "
        f"layer has {of_first} and {kv_of_first} of {dim_of_first}"
    )


@hint(Level.SHOWN, silences=("part_of_a_head", "some_dims"))
def columns_not_written(e: Evidence) -> str:
    """The same values of every head are unwritten in every wrong row, and others are not."""
    unwritten, heads = e.comparison.unwritten, e.comparison.unwritten.any(-1)
    if not heads.any() or e.schedule.case.head_maps or e.may_be_nan:
        return ""
    columns = unwritten[heads]
    if not (columns == columns[0]).all() or columns[0].all():
        return ""
    lost, written = columns[0].nonzero().flatten(), (~columns[0]).nonzero().flatten()
    text = f"values {index_ranges(lost.tolist())} of {columns.shape[-1]} of a head are never written"
    if shift := _shift(e, heads, lost, written):
        return (
            f"values of a head are stored at the wrong offset: {text}, and the others hold what those {abs(shift)} "
            f"{'behind' if shift > 0 else 'before'} them should"
        )
    return f"a grid over a head's values is too small, or a tile of them has a wrong offset: {text}"


def _shift(e: Evidence, heads: torch.Tensor, lost: torch.Tensor, written: torch.Tensor) -> int:
    """Number of values by which the written ones are shifted, if each holds the value of another; else 0."""
    if len(lost) != len(written):
        return 0
    out, want, limit = (
        each[heads].double() for each in (e.comparison.out, e.expected.attention, e.expected.attention_limit)
    )
    near = (out[:, written] - want[:, lost]).abs() <= limit[:, lost]
    return int(lost[0] - written[0]) if bool(near.all()) else 0


@hint(Level.PATTERN)
def part_of_a_head(e: Evidence) -> str:
    """NaN or Inf next to numbers in one row of one head, which no key or value can cause."""
    bad = ~e.comparison.finite
    # An overflow gives Inf and NaN, depending on the signs of the values.
    large = e.step.data in ("peaked", "negative", "rising_logits")
    if not (bad.any(-1) & (~bad & e.comparison.exists).any(-1)).any() or e.reads_foreign or large:
        return ""
    return (
        "only a part of a head's values is NaN or Inf, so it was overwritten, or never computed: probably the layout "
        "of a scratch for partial results, or a head dim that is padded"
    )


@hint(Level.PATTERN, silences=("elsewhere",))
def some_heads(e: Evidence) -> str:
    """Only some heads of a row are wrong: heads share lengths and pages, but not how they are packed."""
    heads = list(e.attended.heads) if e.attended else []
    if not heads:
        return ""
    count, kv_heads, _ = (e.attended and e.attended.shape) or e.schedule.case.head_shape
    group = count // kv_heads
    which = f"only head{'s' if len(heads) > 1 else ''} {index_ranges(heads)} of {count}"
    if e.attended and e.attended.elsewhere.get("others", 0.0) >= _ALL_OF_IT:
        cause = f"a wrong stride of rows, such as a padded one: rows are {count} heads apart"
    elif _lacks_a_part(e):
        cause = (
            "their part of the prefix is lost in the merge with the new tokens, as if a log-sum-exp or partial "
            "result of another head or row is used ([T, H] read as [H, T])"
        )
    elif group > 1 and {head // group for head in heads} != set(range(kv_heads)) and len(heads) % group == 0:
        cause = "an offset or stride of KV heads, or the head mapping"
    elif group > 1:
        cause = "packing of grouped heads (rows x heads of a KV head as one tile), their head mapping, or their masks"
    else:
        cause = "an offset or stride of heads, or a parameter by head"
    return (
        f"{which} attended to the wrong KV tokens, and all heads of a row share one length and page table: probably "
        f"{cause}"
    )


_ALL_OF_IT = 0.9
"""Fraction of the weight that counts as all of it."""


def _lacks_a_part(e: Evidence) -> bool:
    """True if the whole prefix is missing and all new KV tokens are there, or the reverse."""
    attended = e.attended
    if attended is None or not attended.used or attended.used - attended.wanted:
        return False
    prefix = e.step.requests[attended.request].prefix
    missing = attended.wanted - attended.used
    sides = ({key for key in attended.wanted if key < prefix}, {key for key in attended.wanted if key >= prefix})
    return missing in sides and min(len(side) for side in sides) > 0


@hint(Level.PATTERN, silences=("key_range", "right_keys"))
def some_dims(e: Evidence) -> str:
    """A range of dims is wrong, and the others are right. With one-hot values a dim is a key, so none is reported."""
    dims = [int(dim) for dim in e.comparison.wrong.flatten(0, 2).any(0).nonzero().flatten()]
    widths = {shape.head_dim - e.schedule.case.rope_dim for shape in e.wrong_shapes}
    if len(widths) != 1 or e.step.data == "one_hot" or not dims or part_of_a_head(e):
        return ""
    size = widths.pop()
    if len(dims) < 8:
        # The dims that one lane loads or stores at once, in every head and row (onnxruntime #29593).
        first, end = dims[0], dims[-1] + 1
        if end - first != len(dims) or first % 4 or end % 4 or end - first == size:
            return ""
        return (
            f"only dims {first}..{end - 1} of {size} are wrong: probably those that one thread loads or stores at once"
        )
    if dims[0] and dims[0] % 16 == 0 and size - dims[0] <= len(dims) * 3 / 2:
        return (
            f"only dims from {dims[0]} on are wrong: probably a head dim of {size} that is padded, or computed in tiles"
        )
    first, end = dims[0] // 16 * 16, -(-(dims[-1] + 1) // 16) * 16
    if end - first >= size or end - first > len(dims) * 3 / 2:
        return ""
    return f"only dims {first}..{end - 1} of {size} are wrong{_dims_they_hold(e, first, end)}"


def _dims_they_hold(e: Evidence, first: int, end: int) -> str:
    """Name the dims whose values the wrong dims hold, if the values of equally many other dims are found."""
    want, limit, count = e.expected.attention, e.expected.attention_limit, end - first
    wrong = e.comparison.wrong.any(-1)
    held = e.comparison.out[..., first:end].double()[wrong]
    for start in range(0, want.shape[-1] - count + 1, 16):
        theirs = slice(start, start + count)
        if bool(((held - want[..., theirs][wrong]).abs() <= limit[..., theirs][wrong]).all()):
            return (
                f", and hold what dims {start}..{start + count - 1} should: a tile of the head dim is loaded or "
                "stored instead of another"
            )
    return ": probably a tile of the head dim, when V is loaded or the output is stored"
