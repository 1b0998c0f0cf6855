"""The log-sum-exps of the parts of a request's keys, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...cases.case import Case
from ...cases.features.kv_splits import splits_of
from ...contract import AttentionLayer, KVSplit
from ...steps.data import StepData, make_layers
from .attention import Attention, attend
from .limits import factor_spacing, lse_limit, merged_limit, merged_lse_limit


def attend_split(
    data: StepData, layers: Sequence[AttentionLayer], part: KVSplit, *, factors: float = 0.0, q_scale: str = "none"
) -> Attention:
    """Attention on only the keys of ``part``. Outputs of rows that see no key of the part are NaN.

    ``factors``, ``q_scale``: as in ``attend``.
    """
    bs, _, longest = data.visible.shape
    # A request's first row follows its prefix. In draft-decode all keys are one part.
    first = data.row_offset == 0
    prefix = torch.zeros(bs, 1, dtype=torch.int64)
    prefix[data.row_request[first], 0] = data.row_key[first]
    held = part.holds(torch.arange(longest)[None], prefix)
    if not part.sinks:
        layers = [replace(layer, sinks=None) for layer in layers]
    return attend(data, layers, data.visible & held[:, None], factors=factors, q_scale=q_scale)


def split_sums(
    case: Case, data: StepData, whole: Attention, lse_dtype: str, matmul_dtype: str = "model", q_scale: str = "none"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural log-sum-exps [L, T, P, Hq] float64 and their limits, in the same shape, for each part of a case that has
    parts. If the backend merges, the log-sum-exps of all keys follow. ``whole``: attention on all keys.
    ``matmul_dtype``: of
    ``lse_limit``; ``q_scale``: of ``attend``.
    """
    layers = make_layers(case)
    factors = factor_spacing(case, matmul_dtype)
    parts = [attend_split(data, layers, part, factors=factors, q_scale=q_scale) for part in splits_of(case)]
    sums = torch.stack([part.lse for part in parts], 2)
    limits = torch.stack([lse_limit(part, case.dtype, lse_dtype, matmul_dtype) for part in parts], 2)
    if not case.merged_by_backend:
        return sums, limits
    of_all = merged_lse_limit(whole.lse, sums, limits, case.dtype, lse_dtype)
    return torch.cat([sums, whole.lse[:, :, None]], 2), torch.cat([limits, of_all[:, :, None]], 2)


def merged_attention_limit(
    case: Case, whole: Attention, limit: torch.Tensor, sums: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """[L, T, Hq, Dv]: ``limit`` if all keys are one part, else with the error that merging may add.

    ``sums``: of ``split_sums``.
    """
    parts = len(splits_of(case))
    if parts < 2:
        return limit
    lse, off = (each[:, :, :parts] for each in sums)
    return merged_limit(limit, whole, lse, off, case.dtype, parts - 2 if case.merged_by_backend else 0)
