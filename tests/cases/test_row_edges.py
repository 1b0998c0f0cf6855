"""Cases whose rows lie on both sides of an edge of splits or tiles."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import CODES, Case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode

CAPABILITIES: Capabilities = TorchNativeBackend.capabilities.with_changes(heads={"gqa_ratios": {4, 5, 6, 7}})
SEVERAL = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.EXTEND)


def of_edges(mode: ForwardMode, tier: str = "core", declared: Capabilities = CAPABILITIES) -> list[Case]:
    return [case for case in generate(declared, mode, tier) if case.prefixes in ((254, 510, 1022), (107, 20))]


def seen(case: Case, request: int) -> set[int]:
    """Keys of each row of a request."""
    rows = case.new[request] if case.new else case.width
    prefix = case.prefixes[request]
    # Of a draft-extend and an extend the prefix is what is there before the rows; of a verify likewise.
    return {prefix + row + 1 for row in range(rows)}


@pytest.mark.parametrize("mode", SEVERAL)
def test_rows_of_one_request_have_fewer_keys_than_an_edge_as_many_and_more(mode: ForwardMode) -> None:
    (case,) = (case for case in of_edges(mode) if case.data == CODES)
    for request, edge in enumerate((256, 512, 1024)):
        assert {edge - 1, edge, edge + 1} <= seen(case, request)


def test_decode_has_requests_of_as_many_keys_as_an_edge_and_of_one_more() -> None:
    edges = [case for case in generate(CAPABILITIES, ForwardMode.DECODE, "core") if case.data == CODES and case.bs == 6]
    assert [prefix + 1 for prefix in edges[0].prefixes] == [256, 257, 512, 513, 1024, 1025]


@pytest.mark.parametrize("mode", SEVERAL)
def test_packed_rows_of_a_group_that_is_no_power_of_two_are_more_than_a_tile(mode: ForwardMode) -> None:
    (case,) = (case for case in of_edges(mode) if case.data != CODES)
    group = case.heads.q_heads // case.heads.kv_heads
    assert group == 7
    assert group * (case.new[0] if case.new else case.width) >= 200
    assert {128, 129} <= seen(case, 0)


def test_full_tries_each_odd_group_and_a_backend_without_one_has_no_such_case() -> None:
    mode = ForwardMode.EXTEND
    groups = [case.heads.q_heads // case.heads.kv_heads for case in of_edges(mode, "full") if case.data != CODES]
    assert groups == [7, 5, 6]
    without = CAPABILITIES.with_changes(heads={"gqa_ratios": {4, 8}})
    assert all(case.data == CODES for case in of_edges(mode, declared=without))


def test_a_backend_of_one_row_has_no_such_case_in_modes_of_several() -> None:
    one = CAPABILITIES.with_changes(
        bounds={"max_q_rows": 1, "max_extend_tokens": 1, "max_topk": 0}, graph=(), eager={"extend", "decode"}
    )
    assert not of_edges(ForwardMode.EXTEND, declared=one)


@pytest.mark.parametrize("mode", ForwardMode)
def test_they_come_from_core_on(mode: ForwardMode) -> None:
    assert not of_edges(mode, "smoke")
