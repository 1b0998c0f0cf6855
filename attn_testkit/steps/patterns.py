"""Data patterns: how the queries, keys and values of a step are drawn. Host data, the same bits on every machine.

Normal numbers come from one bank made by numpy; a digest of the case id says where in the bank to read.

Patterns
    ``gauss``      unit normals.
    ``shifted``    keys and values with a mean: a dropped or doubled key moves every channel the same way.
    ``peaked``     large queries: few keys carry the weight.
    ``negative``   every logit is about -6e4 and all are equal: a finite "minus infinity" shows itself (flashinfer
                   #4401 masked with -5e4), and so does a zero.
    ``mean``       Q = K = 0: the output is the exact mean of the visible values.
    ``rising_logits``      logits climb by some hundred along the keys for some rows, and fall for others: a maximum
                   that comes late, or a tile far below the one before it, must rescale what was summed.
    ``one_hot``  V is one-hot: channel c carries one chosen key. A limit in proportion to the weight a channel carries
                   then shows one wrong key of thousands, and the output says which keys were attended.
    ``saturated``  every token has a key and a value beyond what an FP8 pool holds: who stores them without a limit
                   stores NaN.
    ``halfway``    unit normals, of which ``steps/packed_rows.py`` makes keys and values that are exactly between two
                   numbers of a packed row: who rounds them away from zero stores other numbers.
    ``large_and_small_values``    equal weights, and a value at either end of a request that is 50,000 times as large as
                   those between: sums of 16 bits lose thousands of small terms, one by one.
    ``large_queries``       one channel of the queries is between 256 and 448, the largest number of FP8, and that of
                   the keys so small that logits are as those of ``gauss``: who limits queries to 224 or 240, as is
                   right for another FP8, has other logits.
    ``large_and_small_queries``  rows whose queries are beyond the numbers of FP8, at 1792, next to rows whose queries
                   are so small that all but one number of them is 0 in FP8; logits are as those of ``gauss``.
                   They need a scale before they are rounded: ``steps/query_scales.py`` says which rows have which.
    ``fp16_overflow``   equal weights, and values of about 30,000, each channel of one sign: a product of 16 bits that
                   is not yet divided by the sum of the weights is infinite from the third key on.
    ``beyond_fp16``   the same, and keys as well, ten times as large: each is beyond what fp16 holds, and a bf16 number.
    ``small_weights``      one key of 512 has a logit of about 7, the others of 0, and values of the other sign. Each of
                   these weighs less than half of the smallest number of FP8, and all together a third of the whole:
                   rounded to FP8 without a factor they vanish.
    ``codes``      Q = 0, so all keys of a row weigh the same, and every key has a code of +1 and -1 for a value: a
                   walk along the keys that stays within ``CODE_BOUND`` in each channel. Values of any run of keys
                   nearly cancel, so outputs and their rounding are of the size of one key of n, not of 1; and the
                   output says how often each key was counted (``checks/key_counts.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ..cases.features.data_pattern import HALFWAY
from ..cases.normals import normals
from .query_scales import LARGEST_FP8

CODE_BOUND = 8
"""The sum of consecutive codes is at most twice this number in any channel. A power of two."""
LARGE_AND_SMALL = "large_and_small_queries"
ALIKE = frozenset({"large_and_small_values"})
"""Patterns whose values are nearly equal in every channel."""
FAINT_RUN = 512
"""Length of a run of keys: one with a large weight, and the following ones with small weights."""
_TOWERING = 32000.0
"""Near half of the largest fp16 number: the sum of three exceeds fp16, their mean does not."""
_LARGE_QUERY, _SMALL_QUERY = 448.0 * 2.0**2, 448.0 * 2.0**-17
"""Magnitudes of large and small queries. The second is 0.0034, and a quarter of it is 0 in FP8. Kernels with a smallest
scale use 1 / (448 * 512), half of the scale here."""
_LARGE_KEY = 112.0
"""Largest number of an FP8 pool whose scale is 1/4, as in one layer."""

_COHERENT = 80
"""Most equal terms in the sum that a logit of ``negative`` is. There are more than half as many."""
_Shape = tuple[int, ...]
_Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Maker = Callable[[_Shape, _Shape, _Shape, np.random.Generator], _Drawn]


def _gauss(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    return normals(q, rng), normals(k, rng), normals(v, rng)


def _shifted(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    return normals(q, rng) + 0.25, normals(k, rng) + 1.0, normals(v, rng) + 3.0


def _peaked(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    return normals(q, rng) * 6, normals(k, rng), normals(v, rng)


def _negative(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    # Powers of two: every product and every partial sum is exact, so all logits of a row are equal in any order of
    # summation. The first layer's scale is 0.5 / sqrt(D), the second's 1.5 / sqrt(D). Kernels may multiply queries by
    # that before the product. Then each of many equal terms is rounded the same way, and the errors of more than some
    # hundred add up to more than float32 arithmetic does elsewhere; so fewer channels of a wide key are not 0.
    size = 2.0 ** round(math.log2(65536 / (0.75 * math.sqrt(q[-1]))))
    stride = 1 << max(0, math.ceil(math.log2(k[-1] / _COHERENT)))
    return torch.full(q, -size), torch.ones(k) * stride * (torch.arange(k[-1]) % stride == 0), normals(v, rng)


def _mean(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    return torch.zeros(q), torch.zeros(k), normals(v, rng)


def _one_hot(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    return normals(q, rng) * 0.5, normals(k, rng), torch.zeros(v)


def _rising_logits(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    # One channel of the keys is a ramp from -1 to 1, and that of a query +-size: scaled by 0.5 and 1.5 / sqrt(D), the
    # logits differ by 100 and 300. Rows and heads climb and fall alternately.
    size = 100 * math.sqrt(q[-1])
    queries, keys = normals(q, rng).clone(), normals(k, rng).clone()
    keys[..., -1] = torch.linspace(-1, 1, k[2]).view(1, 1, -1, 1)
    sign = 1 - 2 * ((torch.arange(q[1])[:, None] + torch.arange(q[2])) % 2)
    queries[..., -1] = size * sign
    return queries, keys, normals(v, rng)


def _saturated(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    queries, keys, values = (normals(shape, rng).clone() for shape in (q, k, v))
    sign = 1.0 - 2 * (torch.arange(k[2]) % 2)
    # Scales are 2 at most. No query looks at these channels, so that logits stay what they are.
    keys[..., 0] = 2000 * sign[:, None]
    values[..., 1] = -2000 * sign[:, None]
    queries[..., :2] = 0
    return queries, keys, values


def _large_and_small_values(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    values = normals(v, rng).abs() * 4e-5 + 1.2e-4
    # Half a unit in the last place of an fp16 sum is 2^-8 from here on, and 16 small terms together are less.
    values[:, :, [0, -1]] = 8.0
    return torch.zeros(q), torch.zeros(k), values


def _large_queries(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    queries, keys, values = (normals(shape, rng).clone() for shape in (q, k, v))
    # The last channel: that of MLA is not a value too.
    last = queries[..., -1]
    queries[..., -1] = torch.where(last < 0, -1.0, 1.0) * (LARGEST_FP8 - 64 * last.abs()).clamp(min=256.0)
    keys[..., -1] *= math.sqrt(q[-1]) / LARGEST_FP8
    return queries, keys, values


def _large_and_small(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    # Keys in the last channel for large queries, and in the others, of MLA those of the rope part, for small ones. The
    # largest number of a small query meets a key of 0: the logit is of the others.
    first = v[-1] if q[-1] > v[-1] else 0
    small, drawn, keys = slice(first + 1, -1), normals(q, rng), normals(k, rng).clone()
    queries, sign = torch.zeros(q), torch.where(drawn[..., -1:] < 0, -1.0, 1.0)
    queries[..., small] = _SMALL_QUERY / 4 * sign * (1 - drawn[..., small].abs().clamp(max=1.0) / 4)
    queries[..., first], queries[..., -1] = _SMALL_QUERY, _LARGE_QUERY * sign[..., 0]
    along = normals((*k[:-1], 1), rng)
    keys[..., small] = torch.where(along < 0, -1.0, 1.0) * _LARGE_KEY / 4 * (2 + along.abs().clamp(max=2.0))
    keys[..., first] = 0
    keys[..., -1] *= 1.5 * math.sqrt(q[-1]) / _LARGE_QUERY
    return queries, keys, normals(v, rng)


def _fp16_overflow(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    sign = 1.0 - 2 * (torch.arange(v[-1]) % 2)
    values = sign * (_TOWERING - 1000 * normals(v, rng).abs().clamp(max=4.0))
    return torch.zeros(q), torch.zeros(k), values


def _beyond_fp16(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    # The products of such keys with queries of 0 are 0; those of an infinite key are NaN.
    queries, _, values = _fp16_overflow(q, k, v, rng)
    return queries, torch.full(k, 10 * _TOWERING), 10 * values


def _small_weights(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    # Only the last channel: that of MLA is not a value too. It gives logits of 7.25 in the first layer.
    queries, keys, values = torch.zeros(q), torch.zeros(k), normals(v, rng) + 3.0
    queries[..., -1], keys[:, :, ::FAINT_RUN, :, -1] = 4.0, 7.25 / (4.0 * 0.5) * math.sqrt(q[-1])
    values[:, :, ::FAINT_RUN] *= -1
    return queries, keys, values


def _plus_minus_one(q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    return torch.zeros(q), normals(k, rng), balanced_codes(v, rng)


def balanced_codes(shape: _Shape, rng: np.random.Generator) -> torch.Tensor:
    """Float32 of +1 and -1. Along the third dimension they are the steps of a walk from 0 that turns at the bound.

    A reflected walk is a free walk that is folded at the bounds, so no loop over keys is needed.
    """
    layers, requests, keys, *rest = shape
    count = layers * requests * math.prod(rest)
    bits = np.unpackbits(np.frombuffer(rng.bytes(-(-keys * count // 8)), np.uint8), count=keys * count)
    steps = bits.view(np.int8).reshape(keys, count) * np.int8(2) - np.int8(1)
    # In 8 bits: the fold repeats every 4 * CODE_BOUND, which divides 256.
    free = np.cumsum(steps, axis=0, dtype=np.int8)
    walk = np.abs(((free - CODE_BOUND) & (4 * CODE_BOUND - 1)) - 2 * CODE_BOUND) - CODE_BOUND
    codes = torch.from_numpy(np.diff(walk, axis=0, prepend=np.int8(0)))
    return codes.view(keys, layers, requests, *rest).permute(1, 2, 0, *range(3, len(shape))).float()


_MAKERS: dict[str, _Maker] = {
    "gauss": _gauss,
    "shifted": _shifted,
    "peaked": _peaked,
    "negative": _negative,
    "mean": _mean,
    "one_hot": _one_hot,
    "rising_logits": _rising_logits,
    "saturated": _saturated,
    HALFWAY: _gauss,
    "large_and_small_values": _large_and_small_values,
    "large_queries": _large_queries,
    LARGE_AND_SMALL: _large_and_small,
    "fp16_overflow": _fp16_overflow,
    "beyond_fp16": _beyond_fp16,
    "small_weights": _small_weights,
    "plus_minus_one": _plus_minus_one,
}


def draw(pattern: str, q: _Shape, k: _Shape, v: _Shape, rng: np.random.Generator) -> _Drawn:
    """Queries, keys and values of the shapes ``q``, ``k``, ``v``, in float32. Keys are along the third dimension.

    A pattern for diagnosis (``probe.``, ``place.``) begins as ``mean``, and so does any other name.
    """
    return _MAKERS.get(pattern, _mean)(q, k, v, rng)


def marked_keys(length: int, dim: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """The key that each channel carries in ``one_hot`` data: [min(length, dim)] key indices."""
    if length <= dim:
        return np.roll(np.arange(length), -int(rng.integers(0, max(length, 1))))
    tail, front = np.arange(length - dim // 2, length), np.arange(dim // 4)
    rest = rng.permutation(np.arange(dim // 4, length - dim // 2))[: dim - len(tail) - len(front)]
    return np.concatenate([front, rest, tail])


def mark_keys(v: torch.Tensor, lens: list[int], rng: np.random.Generator) -> None:
    """Write one-hot values into ``v`` [L, B, S, Hk, Dv], zeros before; ``lens``: keys of each request.

    All keys if there are enough channels, else the first and the last ones and a random choice.
    """
    _, _, _, heads, dim = v.shape
    for b, length in enumerate(lens):
        for head in range(heads):
            chosen = marked_keys(length, dim, rng)
            v[:, b, torch.from_numpy(chosen), head, torch.arange(len(chosen))] = 1.0


def probe_values(v: torch.Tensor, pattern: str) -> torch.Tensor:
    """``probe.R.S``: one-hot values for keys S, S+1, ... of request R, zero elsewhere. ``v``: [L, B, S, Hk, Dv]."""
    request, start = (int(word) for word in pattern.split(".")[1:])
    v = torch.zeros_like(v)
    count = min(v.shape[-1], v.shape[2] - start)
    if request >= v.shape[1] or count <= 0:
        return v
    at = torch.arange(count)
    v[:, request, start + at, :, at] = 1.0
    return v
