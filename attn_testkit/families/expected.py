"""Expected results of a step: attention outputs, the model's outputs, and the limit of each."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from cachetools import LRUCache, cached

from ..cases.case import CODES, Case
from ..model import Weights, make_weights
from ..steps.data import KEPT_BYTES, StepData, bytes_in, numbers_of
from ..steps.patterns import ALIKE
from ..steps.schedule import Schedule, Step
from .by_layer import answer, make_data
from .rounding import linear_limit, row_limit


@dataclass(frozen=True, eq=False)
class _Answer:
    attention: torch.Tensor
    """[L, T, Hq, Dv]."""
    attention_limit: torch.Tensor
    """[L, T, Hq, Dv]."""
    row_limit: torch.Tensor
    """[L, T, Hq]."""
    hidden: torch.Tensor
    """[R, hidden]."""
    hidden_limit: torch.Tensor
    """[R, hidden]."""
    logits: torch.Tensor
    """[R, vocab]."""
    logits_limit: torch.Tensor
    """[R, vocab]."""
    lse: torch.Tensor | None
    """[L, T, P, Hq]: natural, of each part of a case with parts (``families/softmax/kv_splits.py``)."""
    lse_limit: torch.Tensor | None
    """[L, T, P, Hq]."""
    key_sum: torch.Tensor | None
    """[L, T, Hq]: for data of codes, where every key has the weight 1, the sum of a row's weights: its keys, and a
    sink's share. None for other data."""
    key_factor: torch.Tensor | None
    """[L, T, Hq]: for data of codes, the relative error that all weights of a row may share; NaN: its keys cannot be
    counted. None for other data."""


@dataclass(frozen=True, eq=False)
class Expected(_Answer):
    """Float64, host. L layers, T live rows, R output rows (T, or one per request if requests are ragged)."""

    data: StepData
    """Inputs of the step."""


def expect(schedule: Schedule, step: Step, pattern: str | None = None) -> Expected:
    """The answer for one step of a schedule, and the limits. ``pattern``: see ``Family.data``.

    The answer is cached, because eager, graph and every backend are compared with the same numbers. The cache does not
    keep the data, which are much larger for long requests.
    """
    return Expected(**vars(_answer(schedule, step, pattern)), data=make_data(schedule, step, pattern))


def expect_of(schedule: Schedule, data: StepData) -> Expected:
    """The answer for data of any origin: hidden states and logits of every row."""
    return Expected(**vars(replace(_of(schedule, data, None, given=False), key_sum=None, key_factor=None)), data=data)


def _asked(schedule: Schedule, step: Step, pattern: str | None) -> tuple[object, ...]:
    # The same numbers have another answer where none are given but by the pool.
    return (*numbers_of(schedule, step, pattern), step.stored and schedule.new_rows_as_given)


@cached(LRUCache(KEPT_BYTES, getsizeof=bytes_in), key=_asked, lock=threading.Lock())
def _answer(schedule: Schedule, step: Step, pattern: str | None) -> _Answer:
    if not step.requests:
        first = vars(_answer(schedule, schedule.steps[0], pattern))
        layered = {"attention", "attention_limit", "row_limit", "lse", "lse_limit", "key_sum", "key_factor"}
        given = {name: every for name, every in first.items() if every is not None}
        none = {name: every[:, :0] if name in layered else every[:0] for name, every in given.items()}
        return _Answer(**{**first, **none})
    # The model takes row 0 for a first request without rows: no row is before it.
    ends = np.maximum(np.cumsum([r.new for r in step.requests]) - 1, 0)
    rows = torch.from_numpy(ends) if schedule.case.mode.is_ragged() else None
    data = make_data(schedule, step, pattern)
    found = _of(schedule, data, rows, given=schedule.new_rows_as_given and not step.stored)
    return found if (pattern or step.data) == CODES else replace(found, key_sum=None, key_factor=None)


def _of(schedule: Schedule, data: StepData, rows: torch.Tensor | None, *, given: bool) -> _Answer:
    """``rows`` [R] int64: rows with hidden states and logits; None: all. ``given``: new rows are attended to as
    given."""
    case = schedule.case
    found = answer(schedule, data, given)
    own = _own(case, found.limit)
    hidden, hidden_limit = _hidden(case, data, found.out, own)
    if rows is not None:
        hidden, hidden_limit = hidden[rows], hidden_limit[rows]
    weights, sizes = _weights(found.out)
    return _Answer(
        attention=found.out,
        attention_limit=found.limit,
        row_limit=row_limit(own, case.dtype, alike=case.data in ALIKE),
        hidden=hidden,
        hidden_limit=hidden_limit,
        logits=hidden @ weights.head,
        logits_limit=linear_limit(hidden_limit, hidden, sizes.head),
        lse=found.lse,
        lse_limit=found.lse_limit,
        key_sum=found.key_sum,
        key_factor=found.key_factor,
    )


def _own(case: Case, limit: torch.Tensor) -> torch.Tensor:
    """[L, T, Hq, Dv]: ``limit``, with zeros in heads and dims that a layer does not have."""
    if not case.head_maps:
        return limit
    return torch.stack([each.q_whole(each.q_part(of)) for each, of in zip(case.head_maps, limit, strict=True)])


def _weights(out: torch.Tensor) -> tuple[Weights, Weights]:
    layers, _, heads, dim = out.shape
    return _double_weights(layers, heads * dim)


@lru_cache(maxsize=4)
def _double_weights(layers: int, width: int) -> tuple[Weights, Weights]:
    """W and |W| in float64."""
    weights = make_weights(layers, width).double()
    return weights, Weights(weights.out.abs(), weights.head.abs())


def _hidden(case: Case, data: StepData, out: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (weights, sizes), rows = _weights(out), out.flatten(2)
    hidden = data.hidden.double()
    for product in rows @ weights.out:
        hidden += product
    summed = [each.layer.num_qo_heads * each.layer.head_dim for each in case.head_maps]
    terms = torch.tensor(summed, dtype=torch.float64).view(-1, 1, 1) if summed else None
    total = linear_limit(limit.flatten(2), rows, sizes.out, terms).sum(0)
    # Three float32 additions to a number of this size.
    return hidden, total + 3 * 2.0**-24 * hidden.abs()
