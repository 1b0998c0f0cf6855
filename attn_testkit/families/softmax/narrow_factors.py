"""Errors of products of narrow factors: the sums with which errors of tf32 scale, computed from the factors. A factor
is cut off or rounded to a relative spacing u, so its relative error is anything up to u. Errors of many factors have
two effects. Their common part scales a sum: cutting off makes every term smaller. Their independent parts add up like a
random walk. With s = sqrt(2 / 12) u, the standard deviation of the errors of two factors that are uniform in a spacing,
a sum of terms t_j is off by at most

    2 u |sum_j t_j|  +  8 s sqrt(sum_j t_j^2).

The first term bounds all common errors, including those of a factor that all terms share. Eight standard deviations of
the second occur once in 10^14 values, and a suite has 10^9. An output is sum_j p_j v_j, so this bound applies with t_j
= p_j v_j. A logit l_j = sum_d q_d k_jd is off by e_j, and the output by sum_j p_j e_j (v_j - out) plus second-order
terms. The common part of the e_j scales all logits; this changes the output by its derivative, sum_j p_j l_j (v_j -
out). The rest of e_j scales with a_j = sqrt(sum_d (q_d k_jd)^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

TOGETHER = 2.0
"""Factors of a product."""
_APART = 8 * math.sqrt(2 / 12)
"""Standard deviations of the errors of two factors that are uniform in a spacing."""


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


def joined_errors(parts: Sequence[FactorErrors], joined: Callable[[list[torch.Tensor]], torch.Tensor]) -> FactorErrors:
    """Errors of parts of a step. ``joined``: joins the tensors of the parts."""
    names = [each.name for each in fields(FactorErrors) if each.name != "unit"]
    return FactorErrors(**{name: joined([getattr(part, name) for part in parts]) for name in names}, unit=parts[0].unit)


def factor_errors(
    p: torch.Tensor,
    logits: torch.Tensor,
    squares: torch.Tensor,
    values: torch.Tensor,
    packed: Callable[[torch.Tensor], torch.Tensor],
    unit: float,
) -> FactorErrors:
    """``p`` [..., R, S]: weights of keys; those of hidden keys are 0. ``values`` [..., S, Dv].

    ``logits`` [..., R, S]: the derivative of a logit when q.k is scaled by 1 + e: the logit itself, or less with a soft
    cap. ``squares``, in the same shape: the sum of the squares of a logit's terms, with the same slope. ``packed``:
    [..., R, X] -> [L, T, Hq, X].
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
