"""Batches of more requests than a block of a scan, of a few long ones, and rows at the edges of chunks."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.many_requests import many_request_cases
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.schedule import make_schedule

ALL = TorchNativeBackend.capabilities
DECODE = parse_case("decode-gqa2x2-d32-fp32-p4-k5-shuffled-gauss-b1prod")
EXTEND = parse_case("extend-gqa2x2-d32-fp32-p4-k5-n2a2-shuffled-gauss-b1prod")
VERIFY = parse_case("target-verify-gqa2x2-d32-fp32-p4-k5-chain2-shuffled-gauss-b1prod")


def test_requests_behind_a_block_of_1024_have_other_lengths_and_rows_than_those_at_its_beginning() -> None:
    decode, *_ = many_request_cases(ALL, DECODE)
    (extend,) = many_request_cases(ALL, EXTEND)
    for case, counts in ((decode, decode.prefixes), (extend, extend.new)):
        assert len(counts) == 1030
        assert not set(counts[1024:]) & set(counts[:1024])
        assert len(set(counts[1024:])) == 6
        assert parse_case(case.id) == case
    few = ALL.with_changes(bounds={"max_extend_tokens": 4})
    (narrow,) = many_request_cases(few, EXTEND)
    assert max(narrow.new) == 4


@pytest.mark.parametrize("mode", [DECODE.mode, EXTEND.mode, VERIFY.mode], ids=str)
def test_rows_lie_at_both_ends_of_a_chunk_and_some_requests_have_rows_in_two(mode: ForwardMode) -> None:
    chunked = [case for case in generate(ALL, mode, "core") if case.local_chunk]
    assert all(case.local_chunk % case.page_size == 0 for case in chunked)
    assert len({case.page_size for case in chunked}) == 5
    spans = [
        (each.prefix, each.prefix + each.new - 1, case.local_chunk)
        for case in chunked
        for each in make_schedule(case).steps[0].requests
    ]
    places = {
        position % size - size * (position % size > 1) for first, last, size in spans for position in (first, last)
    }
    assert {0, -1} <= places
    crossing = [first // size != last // size for first, last, size in spans]
    assert any(crossing) == (mode is not ForwardMode.DECODE)
    without = ALL.with_changes(windows={"chunked": ()})
    assert not [case for case in generate(without, mode, "core") if case.local_chunk]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("local64-w4", "not in its usual form|chunked-local layers and sliding window"),
        ("w4-local64", "chunked-local layers and sliding window: a layer has a window or chunks"),
        ("local0", "local chunk"),
    ],
)
def test_a_chunk_that_no_layer_can_have_is_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_case(f"decode-gqa2x2-d32-fp32-p4-k5-shuffled-gauss-{words}-b1prod")
