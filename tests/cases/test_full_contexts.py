"""Contexts that are full: one request takes all of it, another five eighths."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import CODES, Case
from attn_testkit.cases.plans import context_len
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode

DECODE, DRAFT = ForwardMode.DECODE, ForwardMode.DRAFT_DECODE
CAPABILITIES = TorchNativeBackend.capabilities


def full(declared: Capabilities, mode: ForwardMode) -> list[Case]:
    """Cases of codes whose second request takes five eighths of the context."""
    of_codes = [case for case in generate(declared, mode, "core") if case.data == CODES]
    near = range(declared.bounds.max_context_len * 5 // 8, declared.bounds.max_context_len * 5 // 8 + 40)
    return [case for case in of_codes if len(case.prefixes) == 2 and case.prefixes[1] in near]


@pytest.mark.parametrize("mode", ForwardMode, ids=str)
@pytest.mark.parametrize("most", [301, 4096, 5000, 66_000])
def test_a_request_fills_the_context_and_another_five_eighths_of_it(mode: ForwardMode, most: int) -> None:
    (found,) = full(
        CAPABILITIES.with_changes(
            bounds={"max_context_len": most}, heads={"families": {"mqa"}}, precision={"dtypes": {"bf16"}}
        ),
        mode,
    )
    assert most - (found.page_size if mode is DRAFT else 0) <= context_len(found) <= most
    assert found.prefixes[0] > most - 100


def test_longer_contexts_have_other_long_cases_and_short_ones_need_none() -> None:
    for most in (300, 66_001):
        assert not full(
            CAPABILITIES.with_changes(
                bounds={"max_context_len": most}, heads={"families": {"mqa"}}, precision={"dtypes": {"bf16"}}
            ),
            DECODE,
        )


def test_of_mla_8192_tokens_are_filled_and_no_more() -> None:
    mla = CAPABILITIES.with_changes(heads={"families": {"mla"}, "head_dims": {512}}, precision={"dtypes": {"bf16"}})
    assert full(mla.with_changes(bounds={"max_context_len": 8192}), DECODE)
    assert not full(mla.with_changes(bounds={"max_context_len": 8193}), DECODE)
