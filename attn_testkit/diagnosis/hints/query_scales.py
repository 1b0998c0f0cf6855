"""The right KV tokens, and queries that were rounded to FP8 under another scale than the backend declares."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...cases.query_scales import E4M3, LARGEST_FP8, group_largest
from ...contract import FP8_PRODUCTS
from ...oracle.expect import attend_with_limit
from .evidence import Evidence

__all__ = ["other_query_scale"]

_ROUNDED = {
    "none": "as they are, where those beyond 448 are cut off and those below 2^-9 vanish",
    "per_token_head": "after a division by the largest of each head of each token",
    "per_token": "after a division by the largest of each token",
    "per_tensor": "after a division by the largest of all rows",
}
"""``Capabilities.q_scale`` -> how queries are rounded to FP8."""


def other_query_scale(e: Evidence) -> str:
    """The step is right for queries that are rounded under another ``q_scale``."""
    schedule = e.schedule
    counts_alone = e.judgement.all_finite and e.judgement.worst is None
    if schedule.case.kv_dtype == "same" or schedule.matmul_dtype not in FP8_PRODUCTS or counts_alone:
        return ""
    data, own = e.expected.data, schedule.q_scale
    for q_scale, words in _ROUNDED.items():
        rounded = replace(data, q=_rounded(data.q.float(), q_scale))
        if q_scale == own or torch.equal(rounded.q, data.q.float()):
            continue
        # What is rounded already is off no more.
        want, limit = attend_with_limit(
            replace(schedule, q_scale="none"), rounded, schedule.new_rows_as_given and not e.step.stored
        )
        if ((e.judgement.out.double() - want.out).abs() <= limit).all():
            return (
                f"right for queries rounded to FP8 {words}: declare q_scale={q_scale!r}, or scale them as {own!r} says"
            )
    return ""


def _rounded(q: torch.Tensor, q_scale: str) -> torch.Tensor:
    """``q`` [L, T, Hq, D] float32 as a kernel with this scale has them."""
    scale = torch.ones(1)
    if q_scale != "none":
        scale = group_largest(q.abs(), q_scale) / LARGEST_FP8
        scale = torch.where(scale > 0, scale, 1.0)
    return (q / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(E4M3).float() * scale
