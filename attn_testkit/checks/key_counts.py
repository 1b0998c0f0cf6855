"""Counts of how often each key of a row was used, from one forward of codes. Keys of ``codes`` data have equal weights,
1 / n in a row that sees n keys, and the value of key j is a code c_j of +1 and -1 in D channels
(``steps/patterns.py``). If key j was counted w_j times, n times the error of an output is the sum of (w_j - 1) c_j.
Codes of different keys are nearly at right angles, so the product of that error with c_j, divided by D, estimates w_j -
1. The estimate is 0 for keys that count once, and for keys of any request that rightly do not count. The limit is half
a key, and one whole key exceeds it, whatever n is.

The effect of rounding: outputs and partial results are at most 2 B / n in size, where B is the bound of the walk, so
one rounding changes the error in keys by at most 2 B u per channel. If s partial results are rounded, independently of
each other and of the code, the root mean square of an estimate's error is at most 2 B u sqrt(s / D). That is 0.06 in
bf16 for s = D, and half a key is eight times as much. docs/explanation/sensitivity.md has measurements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..families.expected import Expected
from ..steps.data import StepData, dequantised

HALF_A_KEY = 0.5
_AT_ONCE = 1 << 24
"""Number of estimates that are made in one product."""


def codes_of(data: StepData, lens: Sequence[int], layer: int, kv_head: int) -> torch.Tensor:
    """Codes of all keys of the batch, [N, D] float32 of +1 and -1, request by request, ``lens`` keys each."""
    stored = data.stored_values if data.stored_values is not None else data.stored_keys[..., : data.v.shape[-1]]
    one = torch.cat([stored[layer, b, :length, kv_head] for b, length in enumerate(lens)])
    if one.dtype.itemsize > 1:
        return one.float().sign_()
    if data.row_format:
        one = (
            one
            if data.stored_values is not None
            else torch.cat([data.stored_keys[layer, b, :length, kv_head] for b, length in enumerate(lens)])
        )
        return data.row_format.unpack(one)[..., : data.v.shape[-1]].sign_()
    # Torch converts FP8 one by one. The highest bit is the sign.
    return torch.where(one.view(torch.uint8) < 128, 1.0, -1.0)


def code_sizes(data: StepData) -> torch.Tensor:
    """Size of the codes of each layer, [L] float64: 1, unless an FP8 pool's scale changes it."""
    stored, which = (data.stored_keys, 0) if data.stored_values is None else (data.stored_values, 1)
    scales = data.kv_scales[which][..., :1, :]
    if data.row_format:
        # Within rounding of 1 or a scale's; all numbers of a layer are of one size.
        one = dequantised(stored[:, :1, :1, :1], scales, data.row_format)
        return one[..., : data.v.shape[-1]].abs().amax(-1).flatten()
    return dequantised(stored[:, :1, :1, :1, :1].contiguous(), scales).abs().flatten()


def in_keys(out: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Error of ``out`` [L, T, Hq, D] in sums of codes, float64. NaN if it is NaN or Inf, or no key can be counted.

    The part that is common to all keys is removed, up to what rounding explains (``limits.key_factor``): it does not
    come from a count.
    """
    assert expected.key_sum is not None
    assert expected.key_factor is not None
    scale = expected.key_sum / code_sizes(expected.data).view(-1, 1, 1)
    error, whole = (out.double() - expected.attention) * scale[..., None], expected.attention * scale[..., None]
    common = (error * whole).sum(-1) / whole.square().sum(-1).clamp_(min=1.0)
    error -= torch.minimum(common.abs(), expected.key_factor).copysign(common)[..., None] * whole
    return error.masked_fill_(~error.isfinite(), torch.nan)


def key_ratio(out: torch.Tensor, expected: Expected, lens: Sequence[int]) -> torch.Tensor:
    """Largest error of any key's count, over half a key, [L, T, Hq] float64.

    All keys of the batch are considered, ``lens`` of each request, not only the row's own. The result is 0 for rows
    with NaN or Inf, which other checks report, and for rows whose keys cannot be counted.
    """
    if not out.numel():
        return torch.zeros(out.shape[:-1], dtype=torch.float64)
    error = in_keys(out, expected)
    # No product with a code of +-1, over D, is larger than this mean: most rows need no product.
    ratio = error.abs().mean(-1).div_(HALF_A_KEY).nan_to_num_(0.0)
    group = ratio.shape[2] // expected.data.stored_keys.shape[3]
    for layer, kv_head in dict.fromkeys((i, h // group) for i, _, h in (ratio > 1).nonzero().tolist()):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        asked = ratio[layer, :, heads] > 1
        rows = error[layer, :, heads][asked].float()
        codes = codes_of(expected.data, lens, layer, kv_head)
        most = torch.cat([_largest(part, codes) for part in torch.split(rows, max(1, _AT_ONCE // len(codes)))])
        ratio[layer, :, heads][asked] = most.double() / (codes.shape[1] * HALF_A_KEY)
    return ratio


def _largest(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Largest absolute product of each of ``rows`` [m, D] with any of ``codes`` [N, D], as [m] float32."""
    return (rows @ codes.mT).abs_().amax(1)
