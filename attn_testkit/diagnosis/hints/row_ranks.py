"""A rank of prefill context parallelism takes its rows for other rows of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ...cases.features.row_ranks import row_splits_of
from ...contract import ROW_ORDERS, RowSplit
from ...steps.data import StepData
from .evidence import Evidence, Supposed
from .hint import Level, hint


@dataclass(frozen=True)
class _Prompt:
    """Lengths of a prompt."""

    new: torch.Tensor
    """[] int64: rows of the step on all ranks."""
    prefix: int
    new_of_first: torch.Tensor
    """[] int64: rows of the first prompt of the batch."""


@dataclass(frozen=True)
class _Mistake:
    """A way in which a rank numbers its rows."""

    why: str
    row: Callable[[RowSplit, torch.Tensor, _Prompt], torch.Tensor]
    """Function of a rank, of the indices of its rows [n] and of the prompt. Returns the rows that the rank takes them
    for; a negative one is a position in the prefix."""


def _at_the_end(split: RowSplit, index: torch.Tensor, of: _Prompt) -> torch.Tensor:
    return of.new - split.lens(of.new) + index


def _after_the_first_block(split: RowSplit, index: torch.Tensor, of: _Prompt) -> torch.Tensor:
    return split.start(split.blocks[0], of.new) + index if split.blocks else index


def _rest_in_last_block(split: RowSplit, index: torch.Tensor, of: _Prompt) -> torch.Tensor:
    if not split.blocks:
        return index
    size = of.new // (split.ranks * len(split.blocks))
    first, last = (block * size for block in (split.blocks[0], split.blocks[-1]))
    return torch.where(index < size, first + index, last + index - size * (len(split.blocks) > 1))


def _of_rank_0(split: RowSplit, index: torch.Tensor, of: _Prompt) -> torch.Tensor:
    return replace(split, rank=0).row(index, of.new)


def _after_a_shorter_prefix(split: RowSplit, index: torch.Tensor, of: _Prompt) -> torch.Tensor:
    padded = (of.new + split.ranks - 1) // split.ranks * split.ranks
    return split.row(index, of.new) - (padded - of.new).clamp(max=of.prefix)


def _dealt(order: str) -> _Mistake:
    return _Mistake(
        f"the rows are dealt in the order {{order}}, and not in the order {order}",
        lambda split, index, of: replace(split, order=order).row(index, of.new),
    )


_MISTAKES = (
    _Mistake("its rows are not the first ones of the prompt", lambda split, index, of: index),
    _Mistake("its rows are not the last ones of the prompt, as a causal mask of fewer rows takes them", _at_the_end),
    _Mistake("its second block does not follow the first one", _after_the_first_block),
    _Mistake("these are rows of rank 0: look at pcp_rank", _of_rank_0),
    _Mistake("the first blocks have the rows that are left over", _rest_in_last_block),
    _Mistake(
        "the prefix is the length without the rows, and not without rows that are padded", _after_a_shorter_prefix
    ),
    _Mistake("the prefix precedes all rows", lambda split, index, of: split.row(index, of.new) - of.prefix),
    _Mistake(
        "the blocks are planned for the rows of request 0", lambda split, index, of: split.row(index, of.new_of_first)
    ),
    *map(_dealt, ROW_ORDERS),
)


def _of_ranks(e: Evidence) -> bool:
    return bool(e.schedule.case.row_ranks) and e.can_be_asked


@hint(Level.CAUSE, when=_of_ranks)
def row_of_rank(e: Evidence) -> Iterator[Supposed]:
    """Rows of ranks are right for other rows of the prompt, or for the keys of the rank's own rows."""
    for mistake in _MISTAKES:
        yield from _taken(e, mistake)
    yield from _own_keys_only(e)


def _taken(e: Evidence, mistake: _Mistake) -> Iterator[Supposed]:
    data = e.expected.data
    position, first = data.query_positions.clone(), ""
    first_new = torch.tensor(e.step.requests[0].new)
    for at, request in enumerate(e.step.requests):
        new = torch.tensor(request.new)
        for split in row_splits_of(e.schedule.case):
            right = split.rows(request.new)
            taken = mistake.row(split, torch.arange(len(right)), _Prompt(new, request.prefix, first_new))
            position[at, right] = request.prefix + taken
            moved = (right != taken).nonzero()
            if len(moved) and not first:
                own = int(moved[0])
                first = (
                    f"{split} took its row {own} of request {at} for row {int(taken[own])} of the prompt's new rows; "
                    f"it is row {int(right[own])}: {mistake.why.format(order=split.order)}"
                )
    if first:
        yield Supposed(first, _at_positions(data, position), every_row=True)


def _at_positions(data: StepData, position: torch.Tensor) -> StepData:
    key = torch.arange(data.visible.shape[-1])
    # The keys of a request are those that its last row sees.
    held = data.visible.any(1, keepdim=True)
    return replace(data, visible=held & (key <= position[..., None]), query_positions=position)


def _own_keys_only(e: Evidence) -> Iterator[Supposed]:
    data, visible = e.expected.data, e.expected.data.visible.clone()
    for at, request in enumerate(e.step.requests):
        for split in row_splits_of(e.schedule.case):
            mine = split.rows(request.new)
            hidden = torch.zeros(visible.shape[-1], dtype=torch.bool)
            hidden[request.prefix : request.prefix + request.new] = True
            hidden[request.prefix + mine] = False
            visible[at, mine] = visible[at, mine] & ~hidden
    if not torch.equal(visible, data.visible):
        yield Supposed(
            "each rank attends to the prefix and to the keys of its own rows: gather k and v of the rows of all ranks",
            replace(data, visible=visible),
            every_row=True,
        )
