"""Errors of products of narrow factors: sums that the errors of tf32 scale with, from the factors themselves.

A factor is cut off or rounded to a spacing of u of itself, so its error is one of u at most, and below that anything.
Errors of many factors do two things. What they have in common scales a sum: cutting off makes every term smaller. Their
independent parts add up as a random walk does. With s = sqrt(2 / 12) u, the standard deviation of the errors
of two factors that lie anywhere in a spacing, a sum of terms t_j is off by at most

    2 u |sum_j t_j|  +  8 s sqrt(sum_j t_j^2).

The first is all that errors can do together, those of one factor that all terms share among it; eight standard
deviations of the second come once in 10^14 numbers, and a suite has 10^9.

An output is sum_j p_j v_j, and so is off by that with t_j = p_j v_j. A logit l_j = sum_d q_d k_jd is off by e_j, and
the output by sum_j p_j e_j (v_j - out) and what is of second order. The common part of the e_j scales all logits; that
moves the output by its derivative, sum_j p_j l_j (v_j - out). The rest of e_j goes by a_j = sqrt(sum_d (q_d k_jd)^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

TOGETHER = 2.0
"""Factors of a product."""
_APART = 8 * math.sqrt(2 / 12)
"""Standard deviations, of two factors that lie anywhere in a spacing."""


@dataclass(frozen=True)
class FactorErrors:
    """Largest errors of results, as multiples of the relative spacing u of a factor, or of its square."""

    values: torch.Tensor
    """[L, T, Hq, Dv]: of u, by the second product."""
    logits: torch.Tensor
    """[L, T, Hq, Dv]: of u, by the first product."""
    bend: torch.Tensor
    """[L, T, Hq, Dv]: of u squared, by the first product."""
    lse: torch.Tensor
    """[L, T, Hq, 1]: of u, of a log-sum-exp."""
    lse_bend: torch.Tensor
    """[L, T, Hq, 1]: of u squared."""
    unit: float
    """u."""


def joined_errors(parts: Sequence[FactorErrors], dim: int) -> FactorErrors:
    """Errors of parts of a step along a dimension."""
    names = [each.name for each in fields(FactorErrors) if each.name != "unit"]
    return FactorErrors(
        **{name: torch.cat([getattr(part, name) for part in parts], dim) for name in names}, unit=parts[0].unit
    )


def factor_errors(
    p: torch.Tensor,
    logits: torch.Tensor,
    squares: torch.Tensor,
    values: torch.Tensor,
    packed: Callable[[torch.Tensor], torch.Tensor],
    unit: float,
) -> FactorErrors:
    """``p`` [..., R, S]: weights of keys; those of hidden keys are 0. ``values`` [..., S, Dv].

    ``logits`` [..., R, S]: what scaling q.k by 1 + e adds to a logit, over e: the logit itself, or less by a soft cap.
    ``squares``, likewise: the sum of the squares of a logit's terms, with the same slope. ``packed``: [..., R, X] ->
    [L, T, Hq, X].
    """
    out, weighted = p @ values, p * logits
    mean = weighted.sum(-1, keepdim=True)
    square = values.square()
    walk = p.square() * squares
    of_walk = walk @ square - 2 * out * (walk @ values) + out.square() * walk.sum(-1, keepdim=True)
    # (x + y)^2 <= 2 x^2 + 2 y^2; half of an exponent's square is its second order.
    bend = p * (_APART**2 * squares + TOGETHER**2 * (logits - mean).square())
    bent = bend.sum(-1, keepdim=True)
    return FactorErrors(
        values=packed(TOGETHER * out.abs() + _APART * (p.square() @ square).sqrt()),
        logits=packed(TOGETHER * (weighted @ values - mean * out).abs() + _APART * of_walk.clamp(min=0).sqrt()),
        bend=packed(bend @ values.abs() + out.abs() * bent),
        lse=packed(TOGETHER * mean.abs() + _APART * walk.sum(-1, keepdim=True).sqrt()),
        lse_bend=packed(bent),
        unit=unit,
    )
