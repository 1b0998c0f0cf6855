"""Queries that a backend rounds to FP8 with a different scale than it declares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...contract import FP8_PRODUCTS
from ...steps.data import make_layers
from ...steps.query_scales import E4M3, LARGEST_FP8, STATIC, group_largest, static_scales
from .evidence import Evidence, Supposed
from .hint import Level, assumption, hint

_ROUNDED = {
    "none": "as they are, where those beyond 448 are cut off and those below 2^-9 vanish",
    "per_token_head": "after a division by the largest of each head of each token",
    "per_token": "after a division by the largest of each token",
    "per_tensor": "after a division by the largest of all rows",
    STATIC: "after a division by the layer's q_scale",
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
        rounded = replace(data, q=_rounded(e, q_scale))
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
    scales = _scales(e, own).expand_as(q)
    if own == STATIC:
        for words, factor in _of_a_checkpoint(e, scales):
            yield Supposed(words, replace(data, q=q * factor), q_scale="none", every_row=True)
        return
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


def _of_a_checkpoint(e: Evidence, scales: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Mistakes with ``layer.q_scale``, and by what the logits of each row and head are multiplied then."""
    yield (
        "logits are not multiplied by layer.q_scale, by which queries are divided before they are rounded to FP8: the "
        "result is right without it",
        1 / scales,
    )
    yield (
        "logits are multiplied by layer.q_scale twice, or queries are not divided by it: the result is right with its "
        "square",
        scales,
    )
    if len(scales) > 1:
        yield (
            "logits of every layer are multiplied by the q_scale of the first layer: the result is right with that one",
            scales[:1] / scales,
        )
    of_keys = torch.tensor([layer.k_scale for layer in make_layers(e.schedule.case)]).view(-1, 1, 1, 1)
    yield (
        "logits are multiplied by k_scale in place of layer.q_scale, as if it were the scale of both: the result is "
        "right with its square",
        of_keys / scales,
    )


@hint(Level.CAUSE, when=lambda e: e.schedule.q_scale not in ("none", STATIC))
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


def _rounded(e: Evidence, q_scale: str) -> torch.Tensor:
    """Queries [L, T, Hq, D] float32 of the step, rounded as a kernel with this scale does."""
    q = e.expected.data.q.float()
    scale = torch.ones(1) if q_scale == "none" else _scales(e, q_scale)
    return (q / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(E4M3).float() * scale


def _scales(e: Evidence, q_scale: str) -> torch.Tensor:
    """[L, 1 or T, 1 or Hq, 1] float32: scales of the step's queries [L, T, Hq, D]; 1 for zeros."""
    if q_scale == STATIC:
        return static_scales([layer.q_scale for layer in make_layers(e.schedule.case)])
    scale = group_largest(e.expected.data.q.float().abs(), q_scale) / LARGEST_FP8
    return torch.where(scale > 0, scale, 1.0)
