"""Limits of a right answer's distance from the oracle. Computed from dtypes and data; none is tuned to a backend.

A kernel rounds the probabilities and the output to dtypes of unit roundoff u. Each rounding moves an output channel by
at most u times the weight that the channel carries, so the limit of one output element is

    2 u (sum_j p_j |v_j| + |ref|)  + the error of float32 logits + a floor for subnormals.

The factor 2 leaves room for partial results that are rounded before they are combined. Measured on an H200 over kv 1 to
4096, gaussian, peaked, shifted and tiny values, bf16 and fp16, errors are these fractions of the limit: FlashInfer
decode
0.05 to 0.52, XQA 0.05 to 0.78, torch with rounded probabilities 0.05 to 0.41.

A backend that declares FP8 products (``Precision.matmul_dtype``) rounds its probabilities to FP8 before the second
product, and nothing else with a coarser roundoff: its queries are exact in FP8. Queries of any other backend with an
FP8 pool are arbitrary, and a kernel that rounds them exceeds the limit. FP8 has few small numbers: below 2^-6 its error
no longer shrinks with the number, and is 2^-10 at most. Kernels round p relative to the row's largest, and multiplied
by a factor (7 in FlyDSL, which leaves room for a maximum that is out of date; 256 in FlashAttention 3; 448 in XQA). The
limit assumes 4: then 2^-12 of the largest p may be lost, whatever p_j is. A backend that declares ``fp8_e4m3_unscaled``
has no factor.

Queries that are rounded to FP8 move a logit by some e at most, from their own numbers (``query_rounding.py``), and a
weight by a factor of at most exp(2 e): an output is off by that factor, and everything that scales with weights grows
by it.

The limit for tf32 factors uses the sum of their errors (``narrow_factors.py``): the sum of the largest possible errors
would be some 30 times the real ones. Measured with Triton's ``tl.dot`` under the emulation, which cuts factors off,
over the float32 cases of core: errors are 0.28 of the limit in the median and 0.73 at most.

Packed rows that hold scales (``contract/row_format.py``) encode numbers that bf16 cannot represent, and kernels round
them to bf16 before both products. They are narrow factors too: only one of the two factors is rounded, by at most half
a spacing, so its unit roundoff replaces the spacing.

A log-sum-exp is off by no more than its logits, and by r if its sum is off by a factor 1 + r. Kernels may sum the
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
"""Absolute error of the same kind in fp16. If a sink is in the running maximum, every p of a row may be that small."""
_LARGEST_ERROR = 100.0
"""Largest error of a logit or log-sum-exp: beyond it a row is not checked, and the limits stay finite."""


def factor_spacing(case: Fields, matmul_dtype: str) -> float:
    """Spacing of the factors of both products if they are narrower than the model's dtype, or keys are rounded to it;
    0.0 otherwise.
    """
    if matmul_dtype == "tf32":
        return UNIT_ROUNDOFF["tf32"]
    return UNIT_ROUNDOFF[case.dtype] if case.kv_dtype in ROW_FORMATS else 0.0


def _unit(dtype: str, attention: Attention) -> torch.Tensor:
    """[T, 1, 1]: u of the dtype; for float32 it covers the rounding of sums with as many terms as a row sees keys."""
    ones = torch.ones(attention.keys.shape[0], 1, 1, dtype=torch.float64)
    if dtype != "fp32":
        return ones * UNIT_ROUNDOFF[dtype]
    return ones * UNIT_ROUNDOFF[dtype] * (attention.keys.double().view(-1, 1, 1) + 16)


def attention_limit(attention: Attention, dtype: str, matmul_dtype: str = "model") -> torch.Tensor:
    """[L, T, Hq, Dv] float64: the largest allowed |out - ref| of each element.

    ``dtype``: of the output. ``matmul_dtype``: dtype of the probabilities in the second product, ``model`` for the
    same. For FP8, and for fp16 with sinks, ``attention.flat`` must be set; for ``tf32`` and packed rows
    ``attention.factors``.
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
    """[L, T, Hq] float64: if all logits are 0, the relative error of rounding that all weights share. A kernel whose
    running maximum includes the sink rounds a weight of exp(-sink). NaN if that is more than one part in twice
    ``CODE_BOUND``: less than half of a key may then be left.
    """
    narrow = matmul_dtype in _FP8_ABSOLUTE
    absolute = _FP8_ABSOLUTE.get(matmul_dtype, _FP16_ABSOLUTE if dtype == "fp16" else 0.0)
    lost = absolute * attention.top.exp()
    return (lost + UNIT_ROUNDOFF["fp8_e4m3" if narrow else dtype]).masked_fill_(lost > 1 / (2 * CODE_BOUND), torch.nan)


def _of_factors(attention: Attention, sizes: torch.Tensor) -> torch.Tensor:
    """[L, T, Hq, Dv]: the error that narrow factors of both products add, at most twice the sum of all errors.
    ``sizes``, in the same shape: sizes of the answer and of the weight of a channel.
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
    """Rounding error of a log-sum-exp of that size: by arithmetic, by a change of base, and by its dtype."""
    size = _finite(lse.abs())
    rounding = 4 * FLOAT32 * size
    return rounding if lse_dtype == "fp32" else rounding + UNIT_ROUNDOFF[dtype] * size + SMALLEST[dtype]


def _finite(sizes: torch.Tensor) -> torch.Tensor:
    return sizes.masked_fill(sizes.isinf(), 0.0)


def merged_lse_limit(
    whole: torch.Tensor, lse: torch.Tensor, off: torch.Tensor, dtype: str, lse_dtype: str
) -> torch.Tensor:
    """[L, T, Hq] float64: limit of a backend's log-sum-exp of all parts, relative to ``whole`` [L, T, Hq]. ``lse`` [L,
    T, P, Hq]: the log-sum-exp of each part, and ``off``, in the same shape, its limit. A merge is off by no more than
    its inputs and its own rounding, and none of its results is larger than the result of a part or of the whole.
    """
    largest = torch.maximum(_finite(lse.abs()).amax(2), _finite(whole.abs()))
    return off.amax(2) + (lse.shape[2] - 1) * _lse_rounding(largest, dtype, lse_dtype)


def merged_limit(
    limit: torch.Tensor, attention: Attention, lse: torch.Tensor, off: torch.Tensor, dtype: str, merges: int
) -> torch.Tensor:
    """[L, T, Hq, Dv] float64: ``limit`` of all keys at once, plus the error of merging the results of parts.
    ``attention``: attention on all keys. ``lse`` [L, T, P, Hq]: the log-sum-exp of each part, and ``off``, in the same
    shape, its limit. ``merges``: number of results that are rounded between parts, 0 if all are merged in float32.
    """
    # Merging subtracts the largest from each, in float32 and in one base or the other.
    apart = (off + 8 * FLOAT32 * _finite(lse.abs())).amax(2)[..., None]
    rounded = merges * (UNIT_ROUNDOFF[dtype] * attention.mass + SMALLEST[dtype] / 2)
    return limit + attention.mass * torch.expm1(2 * apart.clamp(max=_LARGEST_ERROR)) + rounded
