"""Cases for arithmetic that fails only for large numbers: stores, queries, sums and products of few bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..cases.case import Case
from ..cases.features.data_pattern import HALFWAY
from ..contract import FP8_PRODUCTS, ROW_FORMATS, Capabilities, ForwardMode

_MANY_KEYS = 4096
"""Number of small terms that a 16-bit sum loses next to a large term, also in each of 16 splits."""

_MANY_PARTS = 16_384
"""Keys of sixteen parts of 1,024; a sum that is kept in bf16 is rounded sixteen times (FastDeploy #5541)."""

_FAINT_KEYS = 1500
"""Several runs of keys with a small weight, each after a key with a large weight."""

_FEW_KEYS = (70, 20)
"""Lengths of a request with more keys than the smallest tiles, and of one with little more than one tile."""

_STORING = (ForwardMode.DECODE, ForwardMode.EXTEND)
"""Modes with different code that stores new keys: a row of each request, and many."""


def extreme_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Declared extreme cases, derived from ``small``, a case with as little work for each key as the declaration
    allows."""
    one = small.of_requests((_MANY_KEYS,))
    two = (small.page_size + 1, 2 * small.page_size)
    fp8 = small.of_requests(two, kv_dtype="fp8_e4m3")
    if "fp8_e4m3" in declared.kv_pool.kv_dtypes:
        yield fp8.with_changes(data="saturated")
    if "fp16" in declared.precision.dtypes and "same" in declared.kv_pool.kv_dtypes:
        yield one.with_changes(dtype="fp16", kv_dtype="same", data="large_and_small_values")
    if (
        "bf16" in declared.precision.dtypes
        and "same" in declared.kv_pool.kv_dtypes
        and small.mode is ForwardMode.DECODE
    ):
        yield one.with_changes(dtype="bf16", kv_dtype="same", prefixes=(_MANY_PARTS,), data="large_and_small_values")
    if "fp8_e4m3" in declared.kv_pool.kv_dtypes:
        yield fp8.with_changes(data="large_queries")
        if declared.precision.q_scale != "none":
            # Each step draws which rows are large: of three requests two are alike, where each has its own scale.
            lengths = (small.page_size + 16, 2 * small.page_size + 2, 5)
            three = fp8.of_requests(lengths, padded=1)
            yield three.with_changes(data="large_and_small_queries")
    for dtype, data in (("fp16", "fp16_overflow"), ("bf16", "beyond_fp16")):
        if dtype in declared.precision.dtypes and "same" in declared.kv_pool.kv_dtypes:
            yield fp8.with_changes(dtype=dtype, kv_dtype="same", prefixes=_FEW_KEYS, data=data)
    if "fp8_e4m3" in declared.kv_pool.kv_dtypes and declared.precision.matmul_dtype in FP8_PRODUCTS:
        yield one.with_changes(kv_dtype="fp8_e4m3", prefixes=(_FAINT_KEYS,), data="small_weights")


def halfway_cases(declared: Capabilities, small: Case, found: Sequence[Case]) -> Iterator[Case]:
    """A case of decode and of extend for each declared format whose rule for quotients between two numbers is known.
    ``found``: other cases, of which one has heads for which there are such rows."""
    if small.mode not in _STORING:
        return
    for name in sorted(declared.kv_pool.kv_dtypes & set(ROW_FORMATS)):
        like = next((case for case in found if case.kv_dtype == name), None)
        if like and ROW_FORMATS[name].with_ties(declared.kv_pool.ties.get(name, "")).rounds_halfway:
            shape = {each: getattr(like, each) for each in ("heads", "head_dim", "rope_dim", "dtype", "kv_dtype")}
            yield small.of_requests((small.page_size + 1, 2 * small.page_size), data=HALFWAY, **shape)
