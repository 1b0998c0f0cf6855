"""Cases for arithmetic that fails only for large numbers: stores, queries, sums and products of few bits."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..contract import FP8_PRODUCTS, Capabilities, ForwardMode

_MANY_KEYS = 4096
"""Number of small terms that a 16-bit sum loses next to a large term, also in each of 16 splits."""

_MANY_PARTS = 16_384
"""Keys of sixteen parts of 1,024; a sum that is kept in bf16 is rounded sixteen times (FastDeploy #5541)."""

_FAINT_KEYS = 1500
"""Several runs of keys with a small weight, each after a key with a large weight."""

_FEW_KEYS = (70, 20)
"""Lengths of a request with more keys than the smallest tiles, and of one with little more than one tile."""


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
