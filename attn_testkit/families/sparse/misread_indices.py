"""Indices of a selection that are looked up in the wrong way: the slots to which rows attend then, and the answer.
Unlike the mistakes of ``family.py``, these read slots of others and attend to keys more than once, so the answer is
computed from the contents of the pool. Unowned slots then hold zeros, and all others finite values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...steps.data import StepData, pool_image
from ...steps.schedule import Schedule, Step
from ..family import Answer, Supposition
from ..softmax.answer import attend_with_limit

_MOST_NUMBERS = 1 << 25
"""Most elements of gathered keys for which a mistake is tried: 256 MiB in float64."""

_POSITIONS_AS_SLOTS = (
    "indices are used as slots of the pool, but they are positions, which the request table maps to slots"
)
_SLOTS_AS_POSITIONS = "indices are looked up in the request table as if they were positions, but they are slots already"
_OF_NEIGHBOR = "a row uses the selection of the row {} it"
_NOT_CLIPPED = (
    "lengths are not clipped to top-k: a row walks as many indices as it has keys, and those after its {topk} are the "
    "next row's"
)
_FIRST_KEY = "-1 in a row of `selected` is attended to as {name} 0"
_COUNTED = "a row is assumed to have min(top-k, keys) indices, so -1 among them is attended to as {name} 0"


@dataclass(frozen=True, eq=False)
class _Rows:
    """Tensors that all mistakes about the rows of a step need."""

    selected: torch.Tensor
    """[L, T, topk] int64: as the backend gets it."""
    table: torch.Tensor
    """[T, columns] int64: the row of the request table of each row's request."""
    keys: torch.Tensor
    """[T, 1] int64: keys of each row's request."""
    seen: torch.Tensor
    """[T, 1] int64: keys that each row may see."""
    slots: bool
    """True if indices are slots."""

    def looked_up(self, positions: torch.Tensor, most: torch.Tensor | None = None) -> torch.Tensor:
        """[L, T, n] slots of ``positions``: -1 for those from ``most`` on, -2 if the table has no such column."""
        columns = self.table.shape[1]
        at = positions.clamp(0, columns - 1)
        found = self.table.expand(len(positions), -1, -1).gather(2, at).masked_fill(positions >= columns, -2)
        if most is not None:
            found = found.masked_fill(positions >= most, -1)
        return found.masked_fill(positions < 0, -1)


def supposed_of_slots(schedule: Schedule, data: StepData, step: Step) -> Iterator[Supposition]:
    """Answers of backends that look indices up in the wrong way, over a pool whose unowned slots hold zeros.

    A row that reads slots outside the pool has an unknown answer, and its limit is infinite. The answer of a row that
    attends to no key is NaN.
    """
    case, selection = schedule.case, schedule.case.selection
    if selection is None or selection.block > 1 or data.by_head or data.index is not None or data.selected is None:
        return
    if case.head_maps or case.kv_splits or case.layers.groups or not step.requests:
        return
    of_row = data.row_request
    table = torch.stack([torch.from_numpy(step.req_to_token[each.pool_row]).long() for each in step.requests])
    lens = torch.tensor(step.lens)
    rows = _Rows(
        data.selected.long(), table[of_row], lens[of_row, None],
        data.visible.sum(-1)[of_row, data.row_offset, None], selection.slots,
    )  # fmt: skip
    pool = pool_image(schedule, step, data, False, after=True, unowned=0.0)
    for text, slots in _misread(rows, branches=case.draft is not None):
        if slots.numel() * pool.shape[-2] * pool.shape[-1] <= _MOST_NUMBERS:
            yield Supposition(text, _answer(schedule, data, pool, slots))


def _misread(rows: _Rows, *, branches: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Mistakes, and the slots [L, T, n] int64 that are attended to in each, as often as they are listed. -1: none; -2:
    unknown.

    ``branches``: the request table is not ordered by position, so nothing is looked up.
    """
    selected, topk = rows.selected, rows.selected.shape[-1]
    if not rows.slots:
        yield _POSITIONS_AS_SLOTS, selected
        if branches:
            return
    limits = (None, rows.keys, rows.seen)
    if rows.slots and not branches:
        for most in limits:
            yield _SLOTS_AS_POSITIONS, rows.looked_up(selected, most)
    name, column = "slot" if rows.slots else "key", torch.arange(topk)
    first_keys = selected.clamp(min=0)
    counted = torch.where((selected >= 0) | (column < rows.keys), first_keys, -1)
    mistakes = [(_FIRST_KEY.format(name=name), first_keys)]
    if not torch.equal(counted, first_keys):
        mistakes.append((_COUNTED.format(name=name), counted))
    for text, indices in mistakes:
        yield text, indices if rows.slots else rows.looked_up(indices)
    for back, which in ((1, "before"), (-1, "after")):
        shifted = selected.roll(back, 1)
        # The row that the first or last one reads is not known: there may be rows of padding.
        shifted[:, 0 if back > 0 else -1] = -2
        for most in (None,) if rows.slots else limits:
            found = shifted if rows.slots else rows.looked_up(shifted, most).masked_fill(shifted == -2, -2)
            yield _OF_NEIGHBOR.format(which), found
    for count in (rows.keys, rows.seen):
        walked = _walked(selected, count)
        for indices in (walked, torch.where(walked == -1, 0, walked)):
            for most in (None,) if rows.slots else limits:
                found = indices if rows.slots else rows.looked_up(indices.clamp(min=-1), most)
                # Memory after the last row is unknown. Rows that stay within their own indices show nothing.
                yield _NOT_CLIPPED.format(topk=topk), found.masked_fill((indices == -2) | (count <= topk), -2)


def _walked(selected: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """[L, T, n]: the ``count`` [T, 1] indices from the start of each row on, -3 after them; -2: after all rows."""
    tokens, topk = selected.shape[1:]
    step = torch.arange(int(count.max()))
    at = torch.arange(tokens)[:, None] * topk + step
    found = selected.flatten(1)[:, at.clamp(max=tokens * topk - 1)].masked_fill(at >= tokens * topk, -2)
    return found.masked_fill(step >= count, -3)


def _answer(schedule: Schedule, data: StepData, pool: torch.Tensor, slots: torch.Tensor) -> Answer:
    """Answer of rows that attend to ``slots`` [L, T, n], each row as a request with these keys."""
    unknown = ((slots == -2) | (slots >= pool.shape[2])).any(-1)
    slots = slots.masked_fill(unknown[..., None], -1)
    at, bits = slots.clamp(min=0), pool.view(torch.uint8)
    parts = [torch.stack([bits[layer, part][at[layer]] for layer in range(len(at))]) for part in range(pool.shape[1])]
    keys, *values = (part.view(pool.dtype) for part in parts)
    tokens, listed = slots.shape[1:]
    read = replace(
        data,
        stored_keys=keys,
        stored_values=values[0] if values else None,
        visible=torch.ones(tokens, 1, listed, dtype=torch.bool),
        allowed=(slots >= 0)[:, :, None],
        key_positions=torch.zeros(tokens, listed, dtype=torch.int64),
        query_positions=torch.zeros(tokens, 1, dtype=torch.int64),
        row_request=torch.arange(tokens),
        row_offset=torch.zeros(tokens, dtype=torch.int64),
    )
    attention, limit = attend_with_limit(schedule, read)
    empty = (slots < 0).all(-1)[..., None, None]
    return Answer(
        out=attention.out.masked_fill(empty, torch.nan), limit=limit.masked_fill(unknown[..., None, None], torch.inf)
    )
