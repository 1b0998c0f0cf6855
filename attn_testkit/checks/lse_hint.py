"""The hint for a wrong log-sum-exp: the first mistake that explains it."""

from __future__ import annotations

import math

import torch

from ..families.rounding import UNIT_ROUNDOFF
from .lse_patterns import MISTAKES, LseEvidence
from .lse_places import of_fewer_keys, of_other_heads
from .rank_reads import RankReads, misread_by_rank
from .rank_selections import misread_selection

_UNSHIFTED = (
    "exponentials of large numbers are 0 or Inf, so the logarithm of their sum is -Inf or Inf: subtract {} before exp, "
    "and add it to the logarithm"
)
POISON = 0xFF
"""Byte of memory that was never written."""
_LARGE, _LARGE_IN_FP16 = 80.0, 10.0
"""Sizes of a logit whose exponential is near the limits of float32, and of fp16."""


def lse_hint(evidence: LseEvidence, want: torch.Tensor, limit: torch.Tensor) -> str:
    """The first mistake that explains every row and head; empty if none does.

    ``want``, ``limit`` [T, Hq] float64: the expected values and their limits.
    """
    found = evidence.found
    if not evidence.merged:
        reads = RankReads(evidence.case, evidence.data, evidence.layer, evidence.part, found, want, limit)
        if misread := misread_by_rank(reads) or misread_selection(reads):
            return misread
    if found.isnan().any():
        unwritten = bool((evidence.stored.contiguous().view(torch.uint8) == POISON).all(-1).any())
        if not evidence.merged and not unwritten and bool(want[found.isnan()].isfinite().all()):
            return ""  # rows see keys, and no splits are merged
        return (
            "the value was never written, or is -inf minus -inf, as of a softmax over no key or a merge of two KV "
            "splits without keys"
        )
    empty = want == -torch.inf
    if empty.any() and bool((((found - want).abs() <= limit) | empty).all()):
        return "a KV split without keys must have -inf: anything else gives it weight in a merge"
    widest = limit.where(limit.isfinite(), 0.0).max()
    for mistake, text in MISTAKES:
        supposed = mistake(evidence)
        # A log-sum-exp in another base has an error that belongs to that base; one of another place has its limit.
        if supposed is not None and _alike(found, supposed, 2 * widest):
            return text
    infinite = found.isinf() & ~empty
    large = _LARGE_IN_FP16 if evidence.case.dtype == "fp16" else _LARGE
    if bool(infinite.any()) and bool((want[infinite].abs() >= large).all()):
        return _UNSHIFTED.format("the larger log-sum-exp" if evidence.merged else "the maximum")
    if placed := of_other_heads(found, want, limit) or of_fewer_keys(evidence, want, limit):
        return placed
    if shifted := _by_a_constant(found, want, 2 * widest):
        return shifted
    rounded = evidence.stored.bfloat16().to(evidence.stored.dtype)
    if torch.equal(evidence.stored, rounded) and _alike(found, want, limit + UNIT_ROUNDOFF["bf16"] * want.abs()):
        return "it was rounded to bfloat16: keep it in float32, or declare dtype='model'"
    return ""


def _by_a_constant(found: torch.Tensor, want: torch.Tensor, near: torch.Tensor) -> str:
    """Find one constant by which all values are off, although the values differ: a factor of every sum (flashinfer
    #1566)."""
    known = want.isfinite()
    off, due = (found - want)[known], want[known]
    if not off.isfinite().all() or len(due) < _SEVERAL or due.max() - due.min() < _APART:
        return ""
    shift = float((off.max() + off.min()) / 2)
    if float(off.max() - off.min()) > float(near) or not math.log(_LEAST) < abs(shift) < math.log(_MOST):
        return ""
    return (
        f"off by {shift:.4g} in every row and head, as if each sum were multiplied by {math.exp(shift):.4g}: a factor "
        "of the weights before they are rounded (as to FP8), or a divisor of the sum, was not removed from the "
        "logarithm"
    )


_SEVERAL, _APART = 4, 0.5
"""Number of values, and their spread, that make a common shift significant."""
_LEAST, _MOST = 1.5, 1e6
"""Range of factors that may occur in code."""


def _alike(found: torch.Tensor, supposed: torch.Tensor, limit: torch.Tensor) -> bool:
    return bool(((found == supposed) | ((found - supposed).abs() <= limit)).all())
