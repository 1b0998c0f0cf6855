"""Queries that a backend rounds to FP8 with a different scale than it declares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...contract import FP8_PRODUCTS
from ...steps.query_scales import E4M3, LARGEST_FP8, group_largest
from .evidence import Evidence, Supposed
from .hint import Level, assumption, hint

_ROUNDED = {
    "none": "as they are, where those beyond 448 are cut off and those below 2^-9 vanish",
    "per_token_head": "after a division by the largest of each head of each token",
    "per_token": "after a division by the largest of each token",
    "per_tensor": "after a division by the largest of all rows",
}
"""Value of ``Precision.q_scale`` -> rounding of queries to FP8, in words."""


# Limits of rows that FP8 flushes are wide, so another factor fits them as well.
@assumption(
    lambda e: e.schedule.case.kv_dtype != "same" and e.schedule.matmul_dtype in FP8_PRODUCTS,
    silences=("other_scaling", "other_scale"),
)
def other_query_scale(e: Evidence) -> Iterator[Supposed]:
    """The step is right for queries that are rounded with another ``q_scale``."""
    data, own = e.expected.data, e.schedule.q_scale
    if e.counts_alone or not e.comparison.all_finite:
        return
    for q_scale, words in _ROUNDED.items():
        rounded = replace(data, q=_rounded(data.q.float(), q_scale))
        if q_scale == own or torch.equal(rounded.q, data.q.float()):
            continue
        text = (
            f"queries are rounded to FP8 {words}: declare q_scale={q_scale!r}, or scale them as {own!r} says. The "
            "result is right for queries that are rounded so"
        )
        # Queries that are rounded already are not rounded a second time.
        yield Supposed(text, rounded, q_scale="none", every_row=True)


def _scaled_and_wrong(e: Evidence) -> bool:
    wrong = e.comparison.all_finite and not e.comparison.right and not e.counts_alone
    return e.schedule.q_scale != "none" and wrong


# A product without some dims is near as well, if the scale that is lost makes logits small.
@assumption(_scaled_and_wrong, silences=("rows_of_others", "other_scaling", "other_scale", "other_dims"))
def lost_query_scale(e: Evidence) -> Iterator[Supposed]:
    """The step is right for logits without the scale of their queries, with it applied twice, or with another
    token's."""
    data, own = e.expected.data, e.schedule.q_scale
    q = data.q.float()
    scales = _scales(q, own).expand_as(q)
    # A kernel's scale of zeros is its smallest one.
    of_others = torch.where(group_largest(q.abs(), own) > 0, scales, _SMALLEST_SCALE)
    for words, factor in (
        ("is not multiplied back into the logits: the result is right without it", 1 / scales),
        ("is multiplied into the logits twice: the result is right with its square", scales),
        ("is that of the token before: the result is right with that one", of_others.roll(1, 1) / scales),
        ("is that of the head before: the result is right with that one", of_others.roll(1, 2) / scales),
    ):
        if not bool((factor == 1).all()):
            yield Supposed(
                f"the scale of queries (q_scale={own!r}) {words}",
                replace(data, q=q * factor),
                q_scale="none",
                every_row=True,
            )


@hint(Level.CAUSE, when=lambda e: e.schedule.q_scale != "none")
def queries_of_zeros(e: Evidence) -> str:
    """All wrong values are NaN, in rows and heads whose queries are zeros; other rows exist."""
    wrong, zeros = e.comparison.wrong.any(-1), ~e.expected.data.q.any(-1)
    is_nan = (e.comparison.out.isnan() & ~e.comparison.unwritten).any(-1)
    if not wrong.any() or zeros.all() or not bool((zeros & is_nan)[wrong].all()):
        return ""
    return (
        "queries of zeros give NaN, and all others are right: the scale of such a token or head was computed as 0, and "
        "zeros were divided by it. Divide by a smallest scale there"
    )


_SMALLEST_SCALE = 2.0**-18


def _rounded(q: torch.Tensor, q_scale: str) -> torch.Tensor:
    """Round ``q`` [L, T, Hq, D] float32 as a kernel with this scale does."""
    scale = torch.ones(1) if q_scale == "none" else _scales(q, q_scale)
    return (q / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(E4M3).float() * scale


def _scales(q: torch.Tensor, q_scale: str) -> torch.Tensor:
    """[L, 1 or T, 1 or Hq, 1] float32: scales of ``q`` [L, T, Hq, D]; 1 for zeros."""
    scale = group_largest(q.abs(), q_scale) / LARGEST_FP8
    return torch.where(scale > 0, scale, 1.0)
