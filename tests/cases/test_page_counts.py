"""Every number of pages up to a kernel's usual split, for each group and dtype of the KV pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case
from attn_testkit.catalogue.page_counts import groups_of_pages, page_count_cases
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode

CAPABILITIES = TorchNativeBackend.capabilities


def found(declared: Capabilities = CAPABILITIES) -> list[Case]:
    (small, *_) = [case for case in generate(declared, ForwardMode.DECODE, "core") if case.bs == 132]
    return list(page_count_cases(declared, small))


def test_each_number_of_pages_has_a_tail_and_powers_of_two_are_full() -> None:
    for case in found():
        keys = [prefix + 1 for prefix in case.prefixes]
        tails = [length for length in keys if length % case.page_size]
        full = [length // case.page_size for length in keys if length % case.page_size == 0]
        assert [-(-length // case.page_size) for length in tails] == list(range(1, 18))
        assert full == [1, 2, 4, 8, 16]


def test_every_group_of_the_array_meets_every_dtype_of_the_pool() -> None:
    cases = found()
    layouts = {case.heads for case in cases}
    assert {(case.heads, case.kv_dtype) for case in cases} == {
        (h, d) for h in layouts for d in CAPABILITIES.kv_pool.kv_dtypes
    }
    assert len(cases) == len(layouts) * len(CAPABILITIES.kv_pool.kv_dtypes)
    assert {heads.family for heads in layouts} == {"mha", "gqa", "mqa"}
    assert max(heads.q_heads // heads.kv_heads for heads in layouts) == 16
    assert {case.dtype for case in cases} == set(CAPABILITIES.precision.dtypes)
    assert {case.head_dim for case in cases} == {32, 64, 128}
    assert all(case in generate(CAPABILITIES, ForwardMode.DECODE, "core") for case in cases)


def test_pages_of_one_key_have_no_tails_of_their_own() -> None:
    for case in found(CAPABILITIES.with_changes(kv_pool={"page_sizes": {1}})):
        assert sorted(set(case.prefixes)) == list(range(17))


@pytest.mark.parametrize("mode", [mode for mode in ForwardMode if mode is not ForwardMode.DECODE])
def test_other_modes_have_none(mode: ForwardMode) -> None:
    small = replace(generate(CAPABILITIES, mode, "smoke")[0])
    assert not list(page_count_cases(CAPABILITIES, small))


def test_a_group_that_has_fp8_in_each_number_of_pages_has_it_in_no_short_case_beside() -> None:
    for longest, in_both in ((4096, set()), (280, {2, 8, 16})):
        declared = CAPABILITIES.with_changes(
            heads={"families": {"gqa"}, "gqa_ratios": {2, 4, 8, 16}},
            kv_pool={"page_sizes": {16}},
            bounds={"max_context_len": longest},
        )
        decodes = generate(declared, ForwardMode.DECODE, "core")
        short = {c.heads.q_heads // 2 for c in decodes if c.prefixes == (70, 33, 1) and c.kv_dtype != "same"} - {0}
        assert groups_of_pages(declared) == {2, 8, 16} - in_both
        assert short & {2, 8, 16} == in_both
        assert 4 in short
