"""The limit of an element as a sum of terms, one for each cause of rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...steps.data import StepData
from ...steps.schedule import Schedule
from .answer import answer, attend_with_limit
from .limits import attention_limit


@dataclass(frozen=True)
class LimitTerm:
    """One summand of the limits of a step."""

    name: str
    about: str
    """The rounding that it allows for."""
    value: torch.Tensor
    """[L, T, Hq, Dv] float64."""


def limit_terms(schedule: Schedule, data: StepData) -> tuple[torch.Tensor, list[LimitTerm]]:
    """Answer of a step, [L, T, Hq, Dv] float64, and the terms of its limit; their sum is the limit.

    Each term is the increase of the limit when one more cause is included: ``limits.py`` has the formula.
    """
    attention, limit = attend_with_limit(schedule, data, given=schedule.new_rows_as_given)
    nothing = replace(
        attention,
        out=torch.zeros_like(attention.out),
        mass=torch.zeros_like(attention.mass),
        logit_noise=torch.zeros_like(attention.logit_noise),
        flat=None if attention.flat is None else torch.zeros_like(attention.flat),
        factors=None,
        logit_error=None,
    )

    def causes() -> Iterator[tuple[str, str, dict[str, object]]]:
        yield "floor", "numbers below the dtype's smallest are flushed to zero", {}
        yield "output", "the output is rounded to its dtype", {"out": attention.out}
        yield "weights", "weights are rounded before the second product", {"mass": attention.mass}
        yield "small weights", "small weights are rounded to a fixed spacing", {"flat": attention.flat}
        yield "logits", "logits are float32 sums of rounded terms", {"logit_noise": attention.logit_noise}
        yield "factors", "factors of both products are narrower than the dtype", {"factors": attention.factors}
        yield "queries", "queries are rounded to FP8", {"logit_error": attention.logit_error}

    terms, before, with_causes = [], torch.zeros_like(limit), nothing
    for name, about, changes in causes():
        with_causes = replace(with_causes, **changes)  # type: ignore[arg-type]  # fields of Attention, by name
        now = attention_limit(with_causes, schedule.case.dtype, schedule.matmul_dtype)
        terms.append(LimitTerm(name, about, now - before))
        before = now
    if schedule.case.kv_splits:
        merged = answer(schedule, data, schedule.new_rows_as_given).limit
        terms.append(LimitTerm("merging", "results of KV splits are merged", merged - limit))
    return attention.out, terms
