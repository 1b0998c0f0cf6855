"""Misrouted rows: a wrong row is compared with the expected results of other rows and requests.

Offsets of query rows, orders that are not undone, and swapped rows of the page table all give results that are right
for another row. By itself, such a row looks like a wrong length: it has other KV tokens, or fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..cases.case import CODES
from ..checks import Comparison
from ..checks.observation import Observation
from ..families.expected import expect
from ..families.softmax.answer import attend_with_limit
from ..families.softmax.attention import seen_in
from ..steps.data import StepData, make_layers
from ..steps.schedule import Schedule, Step
from .rerun import Rerunner

_MOST_ROWS = 12
"""Number of wrong rows that are compared."""
_MOST_QUERIES = 64
"""Number of rows of a step whose queries are tried."""
_ENDS = 16
"""Number of KV tokens at either end of a request that are tried as the only one."""
_SAME_QUERIES, _OTHER_PATTERN = ("mean", "negative", "fp16_overflow", "beyond_fp16", CODES), "gauss"
"""Data in which a row's result does not depend on its query, so that an earlier row looks like a shorter length; and
the data that is used instead."""


@dataclass(frozen=True)
class MisroutedRow:
    """A wrong row that is right for another row or request."""

    request: int
    row: int
    """Index of the row inside the request."""
    of_request: int
    of_row: int | None
    """The row whose result it holds. None if its own query was used, with KV tokens of ``of_request``."""
    keys: int = 0
    """Number of KV tokens that it saw with its own query."""
    copied: bool = False
    """True if it holds the same values as the other row; neither row need be right."""
    queried: bool = False
    """True if it saw its own KV tokens with the query of the other row."""

    @property
    def text(self) -> str:
        """Description, as ``request 1 row 0 holds the result of request 0 row 2``."""
        name = f"request {self.request}" + (f" row {self.row}" if self.row else "")
        if self.of_row is None:
            return f"{name} was computed with KV tokens 0..{self.keys - 1} of request {self.of_request}"
        row = f" row {self.of_row}" if self.of_row or self.of_request == self.request else ""
        if self.queried:
            return f"{name} was computed with the query of request {self.of_request}{row}"
        what = "the same values as" if self.copied else "the result of"
        return f"{name} holds {what} request {self.of_request}{row}"


def find_misrouted(
    rerunner: Rerunner | None, schedule: Schedule, comparison: Comparison, *, in_graph: bool
) -> tuple[MisroutedRow, ...]:
    """Find wrong rows that are right for others, among the first dozen.

    ``rerunner``: for a run with other values if all queries are alike; with None nothing is found then.
    ``in_graph``: true if only the graph is wrong, so that the graph is run.
    """
    if comparison.observed.step.data in _SAME_QUERIES:
        again = None if rerunner is None else _again(rerunner, schedule, comparison.observed.step, in_graph)
        if again is None:
            return ()
        comparison = Comparison(again, expect(schedule, again.step, _OTHER_PATTERN))
    found = []
    # Keys of another request, or another query, would come with a bias that nobody knows.
    biased = comparison.expected.data.qq_bias is not None
    for row in comparison.wrong_rows[:_MOST_ROWS]:
        layers = comparison.wrong[:, row].flatten(1).any(-1)
        out = comparison.out[layers][:, row].double()
        if not biased and _holds_one_own_value(schedule, comparison, out, layers, row):
            continue  # of another request, too, if their data are alike, as in one_hot data
        found += (
            _result_of(comparison, out, layers, row)
            or ([] if biased else _keys_of(schedule, comparison, out, layers, row))
            or ([] if biased else _query_of(schedule, comparison, out, layers, row))
            or _copy_of(comparison, out, layers, row)
        )
    return tuple(found)


def _again(rerunner: Rerunner, schedule: Schedule, step: Step, in_graph: bool) -> Observation | None:
    if not in_graph:
        return rerunner.eager(schedule, step, pattern=_OTHER_PATTERN)
    answer = rerunner.graph(schedule, pattern=_OTHER_PATTERN)
    return answer.replay_of(step) if answer else None


def _like(out: torch.Tensor, right: torch.Tensor, limit: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """Compare the row ``out`` [l, Hq, Dv] with each of ``right`` [l, N, Hq, Dv], as [N] bool. Zeros match none.

    ``exists`` [l, 1, Hq, Dv] bool: elements that the layers have.
    """
    near = ((out[:, None] - right).abs() <= limit).permute(1, 0, 2, 3).flatten(1).all(-1)
    something = ((right.abs() > limit).any(-1) | ~exists.any(-1)).permute(1, 0, 2).flatten(1).all(-1)
    return near & something


def _result_of(comparison: Comparison, out: torch.Tensor, layers: torch.Tensor, row: int) -> list[MisroutedRow]:
    """Find a row whose result this row holds."""
    expected, data = comparison.expected, comparison.expected.data
    like = _like(out, expected.attention[layers], expected.attention_limit[layers], comparison.exists[layers])
    like[row] = False
    like &= ~_sees_one_key(comparison, layers, int(data.row_request[row]))
    if not like.any():
        return []
    other = int(like.nonzero()[0])
    return [MisroutedRow(*_place(data, row), *_place(data, other))]


def _sees_one_key(comparison: Comparison, layers: torch.Tensor, request: int) -> torch.Tensor:
    """Rows of a request that see one KV token, [T] bool. Their result is the same for every query, so a mask may be the
    cause."""
    data, own = comparison.expected.data, make_layers(comparison.observed.schedule.case)
    bad = [layer for layer, wrong in zip(own, layers.tolist(), strict=True) if wrong]
    seen = torch.stack([seen_in(data.visible, data, each)[data.row_request, data.row_offset].sum(-1) for each in bad])
    return (seen == 1).all(0) & (data.row_request == request)


def _holds_one_own_value(
    schedule: Schedule, comparison: Comparison, out: torch.Tensor, layers: torch.Tensor, row: int
) -> bool:
    """True if the row attended to a single KV token of its own request: one of the first or of the last."""
    data = comparison.expected.data
    own, offset = _place(data, row)
    keys = list(range(comparison.observed.step.lens[own]))
    tried = torch.tensor(sorted({*keys[:_ENDS], *keys[-_ENDS:]}))
    one, count = slice(own, own + 1), len(tried)
    supposed: StepData = replace(
        _row_repeated(data, row, count),
        stored_keys=data.stored_keys[:, one],
        stored_values=None if data.stored_values is None else data.stored_values[:, one],
        visible=(torch.arange(data.visible.shape[-1]) == tried[:, None])[None],
        key_positions=data.key_positions[one],
        query_positions=data.query_positions[one, offset : offset + 1].expand(-1, count),
        row_request=torch.zeros(count, dtype=torch.int64),
        row_offset=torch.arange(count),
        encoder=data.encoder and data.encoder.part((own,)),
    )
    result, limit = attend_with_limit(schedule, supposed)
    return bool(_like(out, result.out[layers], limit[layers], comparison.exists[layers]).any())


def _copy_of(comparison: Comparison, out: torch.Tensor, layers: torch.Tensor, row: int) -> list[MisroutedRow]:
    """Find a row of another request with the same values, although their queries differ."""
    data, all_rows = comparison.expected.data, comparison.out[layers].double()
    same = (all_rows == out[:, None]).permute(1, 0, 2, 3).flatten(1).all(-1)
    same &= data.row_request != data.row_request[row]
    if not same.any() or not out.isfinite().all() or not (out.abs().sum((-1, -2)) > 0).all():
        return []
    return [MisroutedRow(*_place(data, row), *_place(data, int(same.nonzero()[0])), copied=True)]


def _keys_of(
    schedule: Schedule, comparison: Comparison, out: torch.Tensor, layers: torch.Tensor, row: int
) -> list[MisroutedRow]:
    """Find another request whose KV tokens the row's own query saw, as far as a row of that request would."""
    data, case = comparison.expected.data, schedule.case
    bs, longest = data.stored_keys.shape[1:3]
    own, offset = _place(data, row)
    requests = comparison.observed.step.requests
    # A request without rows sees nothing, and has keys before the step all the same.
    lens = [
        int(data.visible[b].any(0).nonzero().amax()) + 1 if request.new else request.prefix
        for b, request in enumerate(requests)
    ]
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
        _row_repeated(data, row, len(asked)),
        row_request=b,
        row_offset=at,
        visible=visible,
        key_positions=torch.arange(longest).expand(bs, -1),
        query_positions=positions,
    )
    result, limit = attend_with_limit(schedule, supposed)
    like = _like(out, result.out[layers], limit[layers], comparison.exists[layers]).tolist()
    fits = [place for place, fit in zip(asked, like, strict=True) if fit]
    # Other KV tokens of its own request: a wrong length or position, not a swap. Requests may share a prefix.
    stored = data.stored_keys.contiguous().view(torch.uint8)  # torch compares no FP8 numbers
    if not fits or any(torch.equal(stored[:, own, :n], stored[:, request, :n]) for request, n in fits):
        return []
    request, keys = next(((r, n) for r, n in fits if n == lens[r]), fits[0])
    return [MisroutedRow(own, offset, request, None, keys)]


def _query_of(
    schedule: Schedule, comparison: Comparison, out: torch.Tensor, layers: torch.Tensor, row: int
) -> list[MisroutedRow]:
    """Find another row whose query saw the row's own KV tokens."""
    data = comparison.expected.data
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
        encoder=data.encoder and data.encoder.part((own,)),
    )
    result, limit = attend_with_limit(schedule, supposed)
    like = _like(out, result.out[layers], limit[layers], comparison.exists[layers])
    # With a single visible KV token, or with equal ones, every query is right.
    if not like.any() or (row < asked and like[row]):
        return []
    return [MisroutedRow(*_place(data, row), *_place(data, int(like.nonzero()[0])), queried=True)]


def _row_repeated(data: StepData, row: int, count: int) -> StepData:
    """Data with ``count`` rows that are all this one. Only tensors that attention reads are changed."""
    bias = data.qq_bias
    return replace(
        data,
        q=data.q[:, row : row + 1].expand(-1, count, -1, -1),
        row_key=data.row_key[row].expand(count),
        qq_bias=None if bias is None else bias[:, row : row + 1].expand(-1, count, -1),
    )


def _place(data: StepData, row: int) -> tuple[int, int]:
    return int(data.row_request[row]), int(data.row_offset[row])
