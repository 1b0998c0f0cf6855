"""The answer of softmax attention for a step: outputs, log-sum-exps, sums of weights, and the limit of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...contract import FP8_PRODUCTS, AttentionLayer
from ...steps.data import StepData, make_layers
from ...steps.schedule import Schedule
from ..family import Answer
from .attention import Attention, attend
from .kv_splits import merged_attention_limit, split_sums
from .limits import attention_limit, factor_spacing, key_factor
from .new_rows import as_given


def answer(schedule: Schedule, data: StepData, given: bool) -> Answer:
    """Return the answer for a step's numbers. ``given``: see ``attend_with_limit``."""
    case = schedule.case
    attention, limit = attend_with_limit(schedule, data, given)
    sums = None
    if case.kv_splits:
        sums = split_sums(case, data, attention, schedule.lse_dtype, schedule.matmul_dtype, schedule.q_scale)
        limit = merged_attention_limit(case, attention, limit, sums)
    return Answer(
        out=attention.out,
        limit=limit,
        lse=sums[0] if sums else None,
        lse_limit=sums[1] if sums else None,
        key_sum=attention.lse.exp(),
        key_factor=key_factor(attention, case.dtype, schedule.matmul_dtype),
    )


def attend_with_limit(
    schedule: Schedule, data: StepData, given: bool = False, layers: Sequence[AttentionLayer] = ()
) -> tuple[Attention, torch.Tensor]:
    """Attention on a step's numbers, and the limit of each element: [L, T, Hq, Dv] float64. ``given``: a forward's own
    rows are attended to as given, not as the pool holds them. ``layers``: layers to use instead of the case's, for the
    answer of a backend with such a mistake.
    """
    case, matmul_dtype = schedule.case, schedule.matmul_dtype
    # What is rounded in absolute terms: FP8 probabilities, and those of fp16 that a sink made small.
    flat = matmul_dtype in FP8_PRODUCTS or (case.dtype == "fp16" and case.sinks)
    if given:
        data = as_given(data, one_by_one=case.draft is not None)
    factors = factor_spacing(case, matmul_dtype)
    attention = attend(data, layers or make_layers(case), flat=flat, factors=factors, q_scale=schedule.q_scale)
    return attention, attention_limit(attention, case.dtype, matmul_dtype)
