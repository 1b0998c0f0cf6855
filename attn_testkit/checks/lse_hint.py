"""What is said of a wrong log-sum-exp: the first mistake that explains it."""

from __future__ import annotations

import math

import torch

from ..families.rounding import UNIT_ROUNDOFF
from .lse_patterns import MISTAKES, LseEvidence
from .lse_places import of_fewer_keys, of_other_heads

__all__ = ["lse_hint"]

_UNSHIFTED = (
    "an exponential of a large number is 0 or Inf, and so the logarithm of their sum is -Inf or Inf: take {} out "
    "before exp, and add it to the logarithm"
)
_LARGE, _LARGE_IN_FP16 = 80.0, 10.0
"""Sizes of a logit from which on its exponential is near the ends of float32, and of fp16."""


def lse_hint(evidence: LseEvidence, want: torch.Tensor, limit: torch.Tensor) -> str:
    """The first mistake that explains every row and head; empty where none does.

    ``want``, ``limit`` [T, Hq] float64: what is right, and how far it may be from that.
    """
    found = evidence.found
    if found.isnan().any():
        return "never written, or -inf minus -inf: a softmax over no key, or a merge of two parts without any"
    empty = want == -torch.inf
    if empty.any() and bool((((found - want).abs() <= limit) | empty).all()):
        return "a part without keys must have -inf: anything else gives it weight in a merge"
    widest = limit.where(limit.isfinite(), 0.0).max()
    for mistake, text in MISTAKES:
        supposed = mistake(evidence)
        # A log-sum-exp in another base is off by as much as itself, in that base; one of another place has its limit.
        if supposed is not None and _alike(found, supposed, 2 * widest):
            return text
    infinite = found.isinf() & ~empty
    large = _LARGE_IN_FP16 if evidence.case.dtype == "fp16" else _LARGE
    if bool(infinite.any()) and bool((want[infinite].abs() >= large).all()):
        return _UNSHIFTED.format("the larger of the parts' log-sum-exps" if evidence.merged else "the maximum")
    if placed := of_other_heads(found, want, limit) or of_fewer_keys(evidence, want, limit):
        return placed
    if shifted := _by_a_constant(found, want, 2 * widest):
        return shifted
    rounded = evidence.stored.bfloat16().to(evidence.stored.dtype)
    if torch.equal(evidence.stored, rounded) and _alike(found, want, limit + UNIT_ROUNDOFF["bf16"] * want.abs()):
        return "it was rounded to bfloat16 on its way: keep it in float32, or claim dtype='model'"
    return ""


def _by_a_constant(found: torch.Tensor, want: torch.Tensor, near: torch.Tensor) -> str:
    """All are off by one number, though they differ: a factor of every sum (flashinfer #1566)."""
    known = want.isfinite()
    off, due = (found - want)[known], want[known]
    if not off.isfinite().all() or len(due) < _SEVERAL or due.max() - due.min() < _APART:
        return ""
    shift = float((off.max() + off.min()) / 2)
    if float(off.max() - off.min()) > float(near) or not math.log(_LEAST) < abs(shift) < math.log(_MOST):
        return ""
    return (
        f"off by {shift:.4g} in every row and head, as if each sum were multiplied by {math.exp(shift):.4g}: a factor "
        "that weights have before they are rounded (as to FP8), or that a sum is divided by, and that the logarithm "
        "keeps"
    )


_SEVERAL, _APART = 4, 0.5
"""Numbers that differ, of which one shift tells."""
_LEAST, _MOST = 1.5, 1e6
"""Factors of a sum that somebody writes."""


def _alike(found: torch.Tensor, supposed: torch.Tensor, limit: torch.Tensor) -> bool:
    return bool(((found == supposed) | ((found - supposed).abs() <= limit)).all())
