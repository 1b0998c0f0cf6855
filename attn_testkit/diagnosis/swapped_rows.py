"""Whose result is it? A wrong row is compared with what other rows and requests should give.

Offsets of query rows, orders that are not undone, and swapped rows of the page table all give numbers that are right
for somebody else. Such a row seen by itself looks like a wrong length: its KV tokens are others, or fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..cases.case import CODES
from ..cases.data import StepData, make_layers
from ..cases.schedule import Schedule, Step
from ..checks import Judgement
from ..checks.observation import Observation
from ..families.softmax.answer import attend_with_limit
from ..families.softmax.attention import windowed
from ..oracle.expect import expect
from .rerun import Rerunner

__all__ = ["SwappedRow", "find_swapped"]

_MOST_ROWS = 12
"""Wrong rows that are compared."""
_MOST_QUERIES = 64
"""Rows of a step whose queries are tried."""
_SAME_QUERIES, _OTHER_PATTERN = ("mean", "negative", "towering", "colossal", CODES), "gauss"
"""Data in which a row's result does not depend on its query, so that a row before it looks like a shorter length; and
data to ask with instead."""


@dataclass(frozen=True)
class SwappedRow:
    """A wrong row that is right for somebody else."""

    request: int
    row: int
    """Row inside the request."""
    of_request: int
    of_row: int | None
    """The row whose result it is. None: its own query was used, with KV tokens of ``of_request``."""
    keys: int = 0
    """With its own query: it saw the KV tokens before this one."""
    copied: bool = False
    """It holds the same values as the other row, and neither need be right."""
    queried: bool = False
    """It saw its own KV tokens, with the query of the other row."""

    @property
    def text(self) -> str:
        """``request 1 row 0 holds the result of request 0 row 2``."""
        name = f"request {self.request}" + (f" row {self.row}" if self.row else "")
        if self.of_row is None:
            return f"{name} was computed with KV tokens 0..{self.keys - 1} of request {self.of_request}"
        row = f" row {self.of_row}" if self.of_row or self.of_request == self.request else ""
        if self.queried:
            return f"{name} was computed with the query of request {self.of_request}{row}"
        what = "the same values as" if self.copied else "the result of"
        return f"{name} holds {what} request {self.of_request}{row}"


def find_swapped(
    rerunner: Rerunner | None, schedule: Schedule, judgement: Judgement, *, in_graph: bool
) -> tuple[SwappedRow, ...]:
    """Wrong rows that are right for others, of the first dozen.

    ``rerunner``: for asking with other numbers where queries are all alike; None: then nothing is found.
    ``in_graph``: whether the graph alone is wrong, so that it is asked.
    """
    if schedule.case.data in _SAME_QUERIES:
        again = None if rerunner is None else _again(rerunner, schedule, judgement.observed.step, in_graph)
        if again is None:
            return ()
        judgement = Judgement(again, expect(schedule, again.step, _OTHER_PATTERN))
    found = []
    for row in judgement.wrong_rows[:_MOST_ROWS]:
        layers = judgement.wrong[:, row].flatten(1).any(-1)
        out = judgement.out[layers][:, row].double()
        found += (
            _result_of(judgement, out, layers, row)
            or _keys_of(schedule, judgement, out, layers, row)
            or _query_of(schedule, judgement, out, layers, row)
            or _copy_of(judgement, out, layers, row)
        )
    return tuple(found)


def _again(rerunner: Rerunner, schedule: Schedule, step: Step, in_graph: bool) -> Observation | None:
    if not in_graph:
        return rerunner.eager(schedule, step, pattern=_OTHER_PATTERN)
    answer = rerunner.graph(schedule, pattern=_OTHER_PATTERN)
    return answer.replay_of(step) if answer else None


def _like(out: torch.Tensor, right: torch.Tensor, limit: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """[N] bool: which of ``right`` [l, N, Hq, Dv] the row ``out`` [l, Hq, Dv] is. Zeros are like none.

    ``exists`` [l, 1, Hq, Dv] bool: what the layers have.
    """
    near = ((out[:, None] - right).abs() <= limit).permute(1, 0, 2, 3).flatten(1).all(-1)
    something = ((right.abs() > limit).any(-1) | ~exists.any(-1)).permute(1, 0, 2).flatten(1).all(-1)
    return near & something


def _result_of(judgement: Judgement, out: torch.Tensor, layers: torch.Tensor, row: int) -> list[SwappedRow]:
    """The row holds what another row should."""
    expected, data = judgement.expected, judgement.expected.data
    like = _like(out, expected.attention[layers], expected.attention_limit[layers], judgement.exists[layers])
    like[row] = False
    like &= ~_sees_one_key(judgement, layers, int(data.row_request[row]))
    if not like.any():
        return []
    other = int(like.nonzero()[0])
    return [SwappedRow(*_place(data, row), *_place(data, other))]


def _sees_one_key(judgement: Judgement, layers: torch.Tensor, request: int) -> torch.Tensor:
    """[T] bool: rows of a request that see one KV token. Of that every query makes the same: it may be a mask's row."""
    data, own = judgement.expected.data, make_layers(judgement.observed.schedule.case)
    windows = [layer.sliding_window_size for layer, wrong in zip(own, layers.tolist(), strict=True) if wrong]
    seen = torch.stack([windowed(data.visible, data, w)[data.row_request, data.row_offset].sum(-1) for w in windows])
    return (seen == 1).all(0) & (data.row_request == request)


def _copy_of(judgement: Judgement, out: torch.Tensor, layers: torch.Tensor, row: int) -> list[SwappedRow]:
    """The row holds what a row of another request holds, though their queries differ."""
    data, all_rows = judgement.expected.data, judgement.out[layers].double()
    same = (all_rows == out[:, None]).permute(1, 0, 2, 3).flatten(1).all(-1)
    same &= data.row_request != data.row_request[row]
    if not same.any() or not out.isfinite().all() or not (out.abs().sum((-1, -2)) > 0).all():
        return []
    return [SwappedRow(*_place(data, row), *_place(data, int(same.nonzero()[0])), copied=True)]


def _keys_of(
    schedule: Schedule, judgement: Judgement, out: torch.Tensor, layers: torch.Tensor, row: int
) -> list[SwappedRow]:
    """The row's own query saw KV tokens of another request, as far as a row of that one would."""
    data, case = judgement.expected.data, schedule.case
    bs, longest = data.stored_keys.shape[1:3]
    own, offset = _place(data, row)
    lens = [int(data.visible[b].any(0).nonzero().amax()) + 1 for b in range(bs)]
    mine = int(data.visible[own, offset].nonzero().amax()) + 1
    near = [range(max(1, n - case.most_new), n + 1) for n in lens]
    ends = [sorted({*near[b], *(n for n in (mine, lens[own]) if n <= lens[b])}) for b in range(bs)]
    asked = [(b, end) for b in range(bs) for end in ends[b]]
    width = max(map(len, ends))
    b = torch.tensor([b for b, _ in asked])
    at = torch.tensor([i for each in ends for i in range(len(each))])
    end = torch.tensor([end for _, end in asked])
    visible = torch.zeros(bs, width, longest, dtype=torch.bool)
    visible[b, at] = torch.arange(longest) < end[:, None]
    positions = torch.zeros(bs, width, dtype=torch.int64)
    positions[b, at] = end - 1
    supposed: StepData = replace(
        data,
        q=data.q[:, row : row + 1].expand(-1, len(asked), -1, -1),
        row_request=b,
        row_offset=at,
        visible=visible,
        key_positions=torch.arange(longest).expand(bs, -1),
        query_positions=positions,
    )
    result, limit = attend_with_limit(schedule, supposed)
    like = _like(out, result.out[layers], limit[layers], judgement.exists[layers]).tolist()
    fits = [place for place, fit in zip(asked, like, strict=True) if fit]
    # Its own KV tokens, other ones of them: a wrong length or position, no swap. Requests may share a prefix.
    stored = data.stored_keys.contiguous().view(torch.uint8)  # torch compares no FP8 numbers
    if not fits or any(torch.equal(stored[:, own, :n], stored[:, request, :n]) for request, n in fits):
        return []
    request, keys = next(((r, n) for r, n in fits if n == lens[r]), fits[0])
    return [SwappedRow(own, offset, request, None, keys)]


def _query_of(
    schedule: Schedule, judgement: Judgement, out: torch.Tensor, layers: torch.Tensor, row: int
) -> list[SwappedRow]:
    """The row's own KV tokens were seen by the query of another row."""
    data = judgement.expected.data
    asked, (own, offset) = min(data.q.shape[1], _MOST_QUERIES), _place(data, row)
    one = slice(own, own + 1)
    supposed: StepData = replace(
        data,
        q=data.q[:, :asked],
        stored_keys=data.stored_keys[:, one],
        stored_values=None if data.stored_values is None else data.stored_values[:, one],
        visible=data.visible[one, offset : offset + 1].expand(-1, asked, -1),
        key_positions=data.key_positions[one],
        query_positions=data.query_positions[one, offset : offset + 1].expand(-1, asked),
        row_request=torch.zeros(asked, dtype=torch.int64),
        row_offset=torch.arange(asked),
    )
    result, limit = attend_with_limit(schedule, supposed)
    like = _like(out, result.out[layers], limit[layers], judgement.exists[layers])
    # With one KV token to see, or with equal ones, every query is right.
    if not like.any() or (row < asked and like[row]):
        return []
    return [SwappedRow(*_place(data, row), *_place(data, int(like.nonzero()[0])), queried=True)]


def _place(data: StepData, row: int) -> tuple[int, int]:
    return int(data.row_request[row]), int(data.row_offset[row])
