"""Batches whose requests agree, and a lone one that fills its graph."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode

CAPABILITIES = TorchNativeBackend.capabilities


@pytest.mark.parametrize(
    ("families", "ratios", "heads"),
    [
        ({"mha", "gqa"}, {1, 4}, "mha32"),
        ({"gqa"}, {4, 8}, "gqa4x32"),
        ({"mqa"}, {4, 8}, "mqa8"),
        ({"mla"}, {16}, "mla16"),
    ],
)
def test_a_lone_prompt_has_more_tiles_of_heads_and_rows_than_there_are_workers(
    families: set[str], ratios: set[int], heads: str
) -> None:
    declared = CAPABILITIES.with_changes(heads={"families": families, "gqa_ratios": ratios})
    (case,) = (
        case for case in generate(declared, ForwardMode.EXTEND, "core") if case.new == (130,) and case.bucket == 10
    )
    assert case.id.split("-")[1] == heads
    if "mha" in families:
        assert case.heads.kv_heads * -(-case.new[0] // 32) > 132, (
            "blocks of 32 rows, and the multiprocessors of an H200"
        )


def one_row_each(mode: ForwardMode) -> list[Case]:
    return [
        case
        for case in generate(CAPABILITIES, mode, "core")
        if case.kv_splits and set(case.new) == {1} and case.chunks == 1
    ]


def test_in_extend_every_request_may_have_one_new_row_where_keys_come_in_parts() -> None:
    found = one_row_each(ForwardMode.EXTEND)
    assert any(case.heads.kv_heads > 1 and case.heads.q_heads > case.heads.kv_heads for case in found)
    assert any(0 in case.prefixes for case in found)
