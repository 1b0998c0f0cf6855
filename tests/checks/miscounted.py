"""Outputs of codes by kernels that count keys as they are told, and round partial results or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from by_hand import schedule_of

from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.families.expected import Expected, expect
from attn_testkit.steps.data import DTYPES
from attn_testkit.steps.schedule import Schedule


class Run(NamedTuple):
    """Keys ``first`` .. ``last`` of a request, counted ``extra`` times more than they should be."""

    request: int
    first: int
    last: int
    extra: int


def evaluated(
    case: str, runs: Sequence[Run] = (), row: int = 0, *, layers: Sequence[int] = (0, 1), heads: slice = slice(None)
) -> Comparison:
    """One step in which a row counts ``runs`` wrong, in some layers and heads; all else is right."""
    schedule, expected = started(case)
    return step_of(schedule, expected, wrong_out(expected, runs, row, layers, heads))


def started(case: str) -> tuple[Schedule, Expected]:
    schedule = schedule_of(case)
    return schedule, expect(schedule, schedule.steps[0])


def wrong_out(
    expected: Expected, runs: Sequence[Run], row: int, layers: Sequence[int] = (0, 1), heads: slice = slice(None)
) -> torch.Tensor:
    """[L, T, Hq, D] float64."""
    assert expected.key_sum is not None
    out, values = expected.attention.clone(), expected.data.values
    group = out.shape[2] // values.shape[3]
    for layer in layers:
        for head in range(out.shape[2])[heads]:
            total = expected.key_sum[layer, row, head]
            summed = out[layer, row, head] * total
            for run in runs:
                summed = summed + run.extra * values[layer, run.request, run.first : run.last + 1, head // group].sum(0)
                total = total + run.extra * (run.last - run.first + 1)
            out[layer, row, head] = summed / total
    return out


def with_kv_splits(expected: Expected, dtype: str, keys: int) -> torch.Tensor:
    """[L, T, Hq, D] float64 of decode rows: splits of so many keys, each rounded to ``dtype``, and merged."""
    out, values = torch.zeros_like(expected.attention), expected.data.values
    group = out.shape[2] // values.shape[3]
    for row, visible in enumerate(expected.data.visible[:, 0]):
        mine = values[:, row, : int(visible.sum())].repeat_interleave(group, 2)
        for part in mine.split(keys, 1):
            out[:, row] += part.mean(1).to(DTYPES[dtype]).double() * part.shape[1] / mine.shape[1]
    return out


def step_of(schedule: Schedule, expected: Expected, out: torch.Tensor) -> Comparison:
    """``out`` [L, T, Hq, D], rounded to the model's dtype."""
    rounded = out.to(DTYPES[schedule.case.dtype])
    copies = copies_of([("attention", str(layer), each) for layer, each in enumerate(rounded)])
    return Comparison(Observation(schedule, schedule.steps[0], "a step", copies), expected)
