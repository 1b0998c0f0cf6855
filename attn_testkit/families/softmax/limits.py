"""Limits of a right answer's distance from the oracle. Computed from dtypes and data; none is tuned to a backend.

A kernel rounds the probabilities and the output to dtypes of unit roundoff u. Each rounding moves an output channel by
at most u times the weight that the channel carries, so the limit of one output element is

    2 u (sum_j p_j |v_j| + |ref|)  +  what float32 logits may do  +  a floor for subnormals.

The factor 2 leaves room for partial results that are rounded before they are combined. Measured on an H200 over kv 1
to 4096, gaussian, peaked, shifted and tiny values, bf16 and fp16, errors take this part of the limit: FlashInfer decode
0.05 to 0.52, XQA 0.05 to 0.78, torch with rounded probabilities 0.05 to 0.41.

A backend that says that it multiplies in FP8 (``Capabilities.matmul_dtype``) rounds its probabilities to FP8 before the
second product, and nothing else of coarser roundoff: the queries that it is given are numbers that FP8 holds. Those of
any other backend with an FP8 pool are free, and who rounds them is over the limit.
FP8 has few small numbers: below 2^-6 its error no longer shrinks with the number, and is 2^-10 at most. Kernels round
p relative to the row's largest, and multiplied by a factor (7 in FlyDSL, which leaves room for a maximum that is out of
date; 256 in FlashAttention 3; 448 in XQA). The limit asks for 4: then 2^-12 of the largest p may be lost, whatever p_j
is. A backend that declares ``fp8_e4m3_unscaled`` has no factor.

Queries that are rounded to FP8 move a logit by some e at most, from their own numbers (``query_rounding.py``), and a
weight by a factor of at most exp(2 e): by that an output is off, and by as much all that scales with weights is larger.

Factors of tf32 are limited by what their errors do in sum (``narrow_factors.py``): the largest that each may do, added
up over all of them, is some 30 times what they do. Measured with Triton's ``tl.dot`` under the emulation, which cuts
factors off, over the float32 cases of core: errors take 0.28 of the limit in the median and 0.73 at most.

Packed rows that hold scales (``contract/row_format.py``) mean numbers that bf16 does not hold, and kernels
round them to bf16 before both products. That is a narrow factor too: rounded by at most half a spacing, and only one of
the two factors, so its unit roundoff takes the place of the spacing.

A log-sum-exp moves by no more than its logits do; and by r where its sum is off by a factor 1 + r. Kernels may sum the
probabilities as they were rounded for the second product (FlashInfer's fa2 sums them on tensor cores), so r may be u.
Merged results carry the errors of all their log-sum-exps: the weight of a part moves by a factor of at most exp(2 d).
"""

from __future__ import annotations

import torch

from ...cases.fields import Fields
from ...contract import ROW_FORMATS
from ...steps.patterns import CODE_BOUND
from ..rounding import FLOAT32, FLUSHED, SMALLEST, UNIT_ROUNDOFF
from .attention import Attention
from .narrow_factors import TOGETHER

_FP8_ABSOLUTE = {"fp8_e4m3": 2.0**-12, "fp8_e4m3_unscaled": 2.0**-10}
"""Half the spacing of the subnormal e4m3 numbers, over the factor that probabilities are multiplied by."""
_FP16_ABSOLUTE = 2.0**-25
"""Half that spacing for fp16. If a sink is part of the running maximum every p of a row may be that small."""
_LARGEST_ERROR = 100.0
"""Largest error of a logit or log-sum-exp: beyond it nothing can be asked of a row, and the numbers stay finite."""


def factor_spacing(case: Fields, matmul_dtype: str) -> float:
    """Spacing of the factors of both products if they are narrower than the model's dtype, or keys are rounded to it;
    0.0 otherwise.
    """
    if matmul_dtype == "tf32":
        return UNIT_ROUNDOFF["tf32"]
    return UNIT_ROUNDOFF[case.dtype] if case.kv_dtype in ROW_FORMATS else 0.0


def _unit(dtype: str, attention: Attention) -> torch.Tensor:
    """[T, 1, 1]: u of the dtype; for float32 the sums themselves, of as many terms as a row sees, are what rounds."""
    ones = torch.ones(attention.keys.shape[0], 1, 1, dtype=torch.float64)
    if dtype != "fp32":
        return ones * UNIT_ROUNDOFF[dtype]
    return ones * UNIT_ROUNDOFF[dtype] * (attention.keys.double().view(-1, 1, 1) + 16)


def attention_limit(attention: Attention, dtype: str, matmul_dtype: str = "model") -> torch.Tensor:
    """[L, T, Hq, Dv] float64: the largest allowed |out - ref| of each element.

    ``dtype``: of the output. ``matmul_dtype``: of the probabilities in the second product, ``model`` for the same; for
    FP8, and for fp16 with sinks, ``attention`` needs its ``flat``. For ``tf32`` and packed rows it needs its
    ``factors``.
    """
    # A logit that float32 arithmetic moved by d moves p by a factor exp(d): at most 2 d in sum with the denominator.
    # Eight roundings cover a tiled dot product, the scale and the soft cap.
    exponent = (2 * 8 * FLOAT32 * attention.logit_noise).clamp(max=1.0)
    limit = attention.out.abs().add_(attention.mass)
    narrow = _of_factors(attention, limit) if attention.factors is not None else 0.0
    limit.mul_(2 * _unit(dtype, attention) + exponent).add_(4 * SMALLEST[dtype] + FLUSHED).add_(narrow)
    if attention.flat is not None and dtype == "fp16":
        limit.add_(attention.flat, alpha=2 * _FP16_ABSOLUTE)
    if matmul_dtype in _FP8_ABSOLUTE:
        assert attention.flat is not None
        limit.add_(attention.mass, alpha=2 * UNIT_ROUNDOFF["fp8_e4m3"])
        limit.add_(attention.flat, alpha=2 * _FP8_ABSOLUTE[matmul_dtype])
    if attention.logit_error is not None:
        grown = 2 * attention.logit_error.clamp(max=_LARGEST_ERROR)
        limit.mul_(grown.exp()).add_(attention.mass * grown.expm1())
    return limit


def key_factor(attention: Attention, dtype: str, matmul_dtype: str = "model") -> torch.Tensor:
    """[L, T, Hq] float64: of logits that are all 0, the part by which rounding may change all weights alike.

    A kernel whose running maximum knows the sink rounds a weight of exp(-sink). NaN where that takes more than one part
    in twice ``CODE_BOUND``: what is left of a key may then be less than half of it.
    """
    narrow = matmul_dtype in _FP8_ABSOLUTE
    absolute = _FP8_ABSOLUTE.get(matmul_dtype, _FP16_ABSOLUTE if dtype == "fp16" else 0.0)
    lost = absolute * attention.top.exp()
    return (lost + UNIT_ROUNDOFF["fp8_e4m3" if narrow else dtype]).masked_fill_(lost > 1 / (2 * CODE_BOUND), torch.nan)


def _of_factors(attention: Attention, sizes: torch.Tensor) -> torch.Tensor:
    """[L, T, Hq, Dv]: what narrow factors of both products add, at most twice what all errors together can do.

    ``sizes``, likewise: of the answer and of the weight that a channel carries.
    """
    factors = attention.factors
    assert factors is not None
    unit = factors.unit
    worst_of_logits = (2 * TOGETHER * unit * attention.logit_noise).clamp(max=1.0) * sizes
    of_logits = unit * factors.logits + unit**2 * factors.bend
    of_values = torch.minimum(unit * factors.values, 2 * TOGETHER * unit * attention.mass)
    return torch.minimum(of_logits, worst_of_logits) + of_values


def lse_limit(attention: Attention, dtype: str, lse_dtype: str = "fp32", matmul_dtype: str = "model") -> torch.Tensor:
    """[L, T, Hq] float64, natural units: the largest allowed |lse - ref|; 0 where it is -inf, which is exact.

    ``dtype``: of the probabilities in the second product. ``lse_dtype``: of the log-sum-exp, ``model`` for ``dtype``.
    ``matmul_dtype``: as in ``attention_limit``.
    """
    noise, keys = attention.logit_noise.squeeze(-1), attention.keys.double().view(-1, 1)
    # The logits, by eight roundings each as in attention_limit; the sum, of as many terms as a row sees; then the
    # logarithm, and the maximum that is added to it.
    limit = FLOAT32 * (8 * noise + (keys + 16) + 4 * noise)
    if dtype != "fp32":
        limit += UNIT_ROUNDOFF[dtype]
    if dtype == "fp16":
        limit += _FP16_ABSOLUTE * keys
    if attention.factors is not None:
        unit, factors = attention.factors.unit, attention.factors
        of_logits = (unit * factors.lse + unit**2 * factors.lse_bend).squeeze(-1)
        limit += torch.minimum(of_logits, TOGETHER * unit * noise) + unit
    if attention.logit_error is not None:
        limit += attention.logit_error.squeeze(-1)
    limit += _lse_rounding(attention.lse, dtype, lse_dtype)
    return limit.masked_fill(attention.lse == -torch.inf, 0.0)


def _lse_rounding(lse: torch.Tensor, dtype: str, lse_dtype: str) -> torch.Tensor:
    """Rounding of a log-sum-exp of that size: by the arithmetic on it, by a change of base, and by its dtype."""
    size = _finite(lse.abs())
    rounding = 4 * FLOAT32 * size
    return rounding if lse_dtype == "fp32" else rounding + UNIT_ROUNDOFF[dtype] * size + SMALLEST[dtype]


def _finite(sizes: torch.Tensor) -> torch.Tensor:
    return sizes.masked_fill(sizes.isinf(), 0.0)


def merged_lse_limit(
    whole: torch.Tensor, lse: torch.Tensor, off: torch.Tensor, dtype: str, lse_dtype: str
) -> torch.Tensor:
    """[L, T, Hq] float64: how far a backend's log-sum-exp of all parts may be from ``whole`` [L, T, Hq].

    ``lse`` [L, T, P, Hq]: of each part, and ``off``, likewise, how far it may be from that. A merge is off by no more
    than what goes into it, and by its own rounding; none of its results is larger than a part's, or than the whole's.
    """
    largest = torch.maximum(_finite(lse.abs()).amax(2), _finite(whole.abs()))
    return off.amax(2) + (lse.shape[2] - 1) * _lse_rounding(largest, dtype, lse_dtype)


def merged_limit(
    limit: torch.Tensor, attention: Attention, lse: torch.Tensor, off: torch.Tensor, dtype: str, merges: int
) -> torch.Tensor:
    """[L, T, Hq, Dv] float64: ``limit`` of all keys at once, and what merging the results of parts may add.

    ``attention``: of all keys. ``lse`` [L, T, P, Hq]: of each part, and ``off``, likewise, how far it may be from that.
    ``merges``: results that are rounded between one part and the next, 0 where all are merged in float32.
    """
    # Merging subtracts the largest from each, in float32 and in one base or the other.
    apart = (off + 8 * FLOAT32 * _finite(lse.abs())).amax(2)[..., None]
    rounded = merges * (UNIT_ROUNDOFF[dtype] * attention.mass + SMALLEST[dtype] / 2)
    return limit + attention.mass * torch.expm1(2 * apart.clamp(max=_LARGEST_ERROR)) + rounded
