"""Causes of a wrong result with the right KV tokens."""

from __future__ import annotations

import math

import torch

from ...cases.derived_parameters import CONTIGUOUS
from ...contract import FP8_PRODUCTS
from ...steps.data import make_layers
from ..attended_keys import AttendedKeys
from .evidence import SMALL_ERROR, SMALLEST_TILE, Evidence
from .heads import part_of_a_head
from .hint import Level, hint

RESCALING = "rescaling of partial sums when a later tile of keys has a larger maximum"
DATA_SUSPECTS = {
    "negative": [
        "a finite value used as minus infinity (all logits of this case are near -6e4)",
        "overflow of q k before it is scaled",
    ],
    "peaked": ["overflow or saturation of large logits"],
    "large_and_small_values": [
        "sums kept in 16 bits, which lose small terms next to a large one (as in the values of this case)"
    ],
    "saturated": ["a store in FP8 that does not saturate at its largest number (values of this case are beyond it)"],
    "large_queries": ["the range of q: queries that are clamped, or rounded to FP8 (those of this case are large)"],
    "large_and_small_queries": [
        "the scale of queries (q_scale) is missing, is that of another token or step, or is not multiplied back (rows "
        "of this case are too large or too small for FP8)"
    ],
    "fp16_overflow": ["products of weights and values in 16 bits before they are divided by the sum of the weights"],
    "beyond_fp16": ["rows of bf16 that are converted to fp16, whose largest number is 65,504"],
    "small_weights": [
        "weights rounded to FP8 without a factor, so that small ones vanish (declare matmul_dtype='fp8_e4m3_unscaled')"
    ],
    "rising_logits": [
        f"{RESCALING} (logits of this case climb and fall by hundreds along the keys)",
        "overflow or saturation of large logits",
    ],
}
"""Pattern of the data -> suspects if the case has it."""
LARGE_VALUES = ("fp16_overflow", "beyond_fp16")
"""Patterns whose logits are 0 and whose values are large."""


@hint(Level.GUESS)
def right_keys(e: Evidence) -> str:
    """The KV tokens are right, so softmax, scales, rounding or the mapping of heads is wrong."""
    attended = e.attended
    if attended is None or not attended.right or e.reads_foreign or e.misrouted:
        return ""
    if attended.heads or not _asked_a_wrong_head(e, attended):
        return ""
    case = e.schedule.case
    if not e.comparison.all_finite:
        large = not e.observed.replay and ", ".join(_NAN_SUSPECTS.get(e.step.data, DATA_SUSPECTS.get(e.step.data, [])))
        if large or _cannot_tell(e, attended):
            what = "not finite where values" if e.step.data in LARGE_VALUES else "a NaN where logits"
            return f"{what} are large: look at {large}" if large else ""
    if not attended.normalised:
        if scale := scale_of_values(e, attended):
            return scale
        if more := _counted_besides(attended):
            return (
                f"weights of the right KV tokens sum to {attended.total:.3g}, as if there were {more} more of logit "
                "0 and value 0: probably splits or tiles without KV tokens count with a log-sum-exp of 0, or masked "
                "KV tokens are in the denominator"
            )
        fp8 = "FP8 scales, " if case.kv_dtype != "same" else ""
        cap = " (a soft cap comes before the mask)" if case.logit_cap else ""
        return (
            f"weights of the right KV tokens sum to {attended.total:.3g} instead of 1: look at {fp8}a denominator "
            f"that counts masked KV tokens or misses some{cap}, saturation, or partial results that are combined "
            "wrongly"
        )
    if _rounded_to_fp8(e):
        return (
            "the output is rounded to FP8, probably in a scratch buffer of the pool's dtype: every value is within "
            "1/16 of the right one"
        )
    few, free = e.comparison.margin, case.kv_dtype != "same" and e.schedule.matmul_dtype not in FP8_PRODUCTS
    noise = few >= SMALL_ERROR and is_noise(e)
    if (few < SMALL_ERROR or noise) and e.step.data != "negative":
        fp8 = ", or q and weights rounded to FP8, which matmul_dtype must declare" if free else ""
        size = f"errors of both signs in all heads that are small next to the values, up to {few:.3g} times the limit"
        return (
            f"the KV tokens are right, with {size if noise else f'an error of only {few:.2g} times the limit'}: "
            "probably "
            "precision, such as q, logits, weights, an accumulator or partial sums rounded to the model's dtype, or to "
            f"fewer bits{fp8}"
        )
    suspects = ["log-sum-exps of the KV splits, and their merge"] if case.kv_splits else []
    suspects += [_rescaling(e)] if _rescaling(e) and e.step.data != "rising_logits" else []
    suspects += DATA_SUSPECTS["rising_logits"] if e.step.data == "rising_logits" else []
    suspects += _strides(e)
    suspects += ["scale"]
    suspects += ["soft cap"] if case.logit_cap else []
    suspects += ["sinks"] if case.sinks else []
    suspects += ["FP8 scales"] if case.kv_dtype != "same" else []
    suspects += ["q rounded to FP8 (matmul_dtype must declare it)"] if free else []
    suspects += ["head mapping"] if case.heads.q_heads != case.heads.kv_heads else []
    suspects += ["the split of a row into latent and rope part"] if case.heads.layout.values_in_keys else []
    suspects += ["row order"] if e.step.tokens > e.step.bs else []
    suspects += DATA_SUSPECTS.get(e.step.data, [])
    unknown = len(attended.not_asked)
    if unknown > attended.length // 2:
        return (
            f"{unknown} of {attended.length} KV tokens were not examined, and may be missing (a length in 16 bits, a "
            f"fixed capacity); if none is, look at {', '.join(dict.fromkeys(suspects))}"
        )
    return (
        "the KV tokens are right, but softmax weights or values are wrong: look at "
        f"{', '.join(dict.fromkeys(suspects))}"
    )


def scale_of_values(e: Evidence, attended: AttendedKeys) -> str:
    """Text if the weights of the right KV tokens sum to a scale of V, or to its reciprocal."""
    scale, total = make_layers(e.schedule.case)[attended.layer].v_scale, attended.total
    if scale == 1 or not total:
        return ""
    for value, name, why in (
        (scale, "v_scale", "applied twice, or applied to values that the KV pool holds unscaled"),
        (1 / scale, "1 / v_scale", "not applied, or divided by"),
    ):
        if abs(total / value - 1) < _NEAR:
            return (
                f"v_scale is probably {why}: weights of the right KV tokens sum to {total:.3g}, which is {name} of the "
                "layer"
            )
    return ""


_NEAR = 0.03
"""Part by which rounding may change a sum of weights."""


def is_noise(e: Evidence) -> bool:
    """True if every head of every wrong layer is wrong by errors of both signs that are small next to its values.

    A wrong scale, head or row changes values by much of their size.
    """
    layers = torch.tensor(e.wrong_layers)
    rows = e.comparison.wrong.flatten(2).any(-1).any(0)
    out, want = (each.double()[layers][:, rows] for each in (e.comparison.out, e.expected.attention))
    if not bool(layers.any()) or not e.comparison.all_finite:
        return False
    error = (out - want).transpose(1, 2).flatten(2)
    size, values = (torch.linalg.vector_norm(each, dim=-1) for each in (error, want.transpose(1, 2).flatten(2)))
    above = (error > 0).double().sum(-1) / (error != 0).sum(-1).clamp(min=1)
    wrong_heads = e.comparison.wrong[layers].any(-1).any(1)
    both = (above > _ONE_SIDE) & (above < 1 - _ONE_SIDE)
    return bool(wrong_heads.all() and both.all() and (size < _PART_OF_VALUES * values).all())


_ONE_SIDE, _PART_OF_VALUES = 0.25, 2.0**-5
"""Part of errors of one sign, at least, and largest error next to values, if rounding is the reason."""


def _counted_besides(attended: AttendedKeys) -> int:
    """Number of extra KV tokens of value 0 that would give this sum of weights, if few would; else 0."""
    count, total = len(attended.wanted), attended.total
    if not total or not 0 < count <= _FEW_ENOUGH:
        return 0
    of_scale = abs(math.log2(total) - round(math.log2(total))) < _OF_SCALE
    more = count / total - count
    return round(more) if abs(more - round(more)) < _WHOLE and round(more) > 0 and not of_scale else 0


_FEW_ENOUGH, _WHOLE = 40, 0.15
"""Most KV tokens for which one more shows in a sum of rounded weights, and its distance from a whole number."""
_OF_SCALE = 0.04
"""Distance, in powers of two, at which a sum may come from a scale of an FP8 pool."""


def _rounded_to_fp8(e: Evidence) -> bool:
    """True if every value of the wrong rows of heads is within a rounding to FP8 (e4m3), and some need all of it.

    If weights or sums are wrong, small values are off by more than a part of their size.
    """
    heads = e.comparison.wrong.any(-1)
    out, want, limit = (
        each[heads].double() for each in (e.comparison.out, e.expected.attention, e.expected.attention_limit)
    )
    off = (out - want).abs() - limit
    near, far = off <= (want.abs() / 16).clamp(min=_LEAST), off > (want.abs() / 64).clamp(min=_LEAST / 4)
    return bool(near.all()) and int(far.sum()) >= _MANY and all(map(_few_significands, e.comparison.out, heads))


_MANY, _LEAST = 32, 2.0**-9
"""Least number of values that are not near by chance; rounding error of numbers below FP8's exponents."""


def _few_significands(out: torch.Tensor, heads: torch.Tensor) -> bool:
    """True if the values of some heads of a layer may have passed through e4m3, which has 8 significands: a scale that
    is not a power of two makes twice as many, and the rounding after it some more. Products in FP8 give any values.

    ``out`` [T, Hq, D], ``heads`` [T, Hq] bool.
    """
    significands, _ = torch.frexp(out[heads].double())
    return len(set(significands.abs().flatten().tolist())) <= _MOST_SIGNIFICANDS


_MOST_SIGNIFICANDS = 40


def _asked_a_wrong_head(e: Evidence, attended: AttendedKeys) -> bool:
    """True if the examined head is right, so that it shows nothing about the wrong ones."""
    row = sum(request.new for request in e.step.requests[: attended.request]) + attended.row
    wrong = e.comparison.wrong[:, row].any(-1).any(0)
    return bool(wrong[attended.head]) or not wrong.any() or e.counts_alone


def _strides(e: Evidence) -> list[str]:
    """Suspect strides if q is a view and only the first row is right, as if the view were read as contiguous."""
    later = list(range(1, e.step.tokens))
    contiguous = (e.schedule.case.derived("qkv-memory") == CONTIGUOUS) != e.step.other_strides
    if not later or e.rows != later or contiguous:
        return []
    return ["the strides of q (here a view of a packed tensor, not contiguous; row 0 is right under any stride)"]


def _cannot_tell(e: Evidence, attended: AttendedKeys) -> bool:
    """True if the examined KV tokens need not be all: a window hides others, and so does a NaN of a replay."""
    seen = len(attended.wanted)
    hidden = attended.window >= 0 and seen < e.lens[attended.request] - len(attended.not_asked)
    return not e.comparison.all_finite and (e.observed.replay or hidden)


def _rescaling(e: Evidence) -> str:
    """Describe a wrong rescaling if only rows of several tiles of keys are wrong."""
    data, wrong = e.expected.data, set(e.rows)
    keys = [int(n) for n in data.visible[data.row_request, data.row_offset].sum(-1)]
    right = [n for row, n in enumerate(keys) if row not in wrong]
    lowest = min((keys[row] for row in wrong), default=0)
    if not right or lowest <= max(right) or lowest <= SMALLEST_TILE:
        return ""
    known = f"rows of up to {max(right)} KV tokens are right, but rows of {lowest} or more are wrong"
    return f"{RESCALING} or splits are merged ({known})"


_NAN_SUSPECTS = {
    "negative": [
        "exponentials without subtracting the maximum, of logits or when splits are merged (0 / 0, since all logits of "
        "this case are near -6e4)",
        "a finite value used as minus infinity",
    ],
}
"""Suspects of a NaN, if they differ from suspects of a wrong number."""


@hint(Level.REMARK)
def computed_nan(e: Evidence) -> str:
    """NaN is computed from a request's own KV tokens."""
    if not e.computes_nan or part_of_a_head(e):
        return ""
    if e.attended is not None and e.attended.right and e.step.data in _LARGE_LOGITS:
        return ""
    case = e.schedule.case
    if case.kv_dtype != "same" and e.changed is not None and e.changed.right_without("fp8"):
        return (
            f"the NaN comes from how rows of this KV pool ({case.kv_dtype}) are read: the case passes with a pool of "
            "the model's dtype. Look at where numbers and scales lie in a row, and at scales of 0"
        )
    text = (
        "the NaN is computed, not read from foreign memory. Probably 0 / 0, or -inf minus -inf: a split, a tile or a "
        "row that sees no KV token"
    )
    if case.kv_splits:
        return f"{text}, or a KV split: in this case some requests have no KV token in one of the splits"
    widest = max(layer.sliding_window_size for layer in make_layers(e.schedule.case))
    if widest >= 0 and e.wrong and all(e.lens[request] > widest + 1 for request in e.wrong):
        return f"{text}, as if a window leaves out the first ones: only requests longer than it are wrong"
    return f"{text}; or an overflow"


_LARGE_LOGITS = ("peaked", "negative", "rising_logits")
"""Data for which ``right_keys`` names the cause of NaN."""
