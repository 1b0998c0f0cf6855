"""The last rows of an extend as steps of decode and verify: the same tokens, keys and slots."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.last_rows import captured_for_bits, has_last_rows, last_rows_of, replayed_for_bits
from attn_testkit.steps.schedule import make_schedule

CASE = "extend-gqa2x2-d32-fp32-p4-k5.9.0-n8a2.3.8-shuffled-gauss-w4-b3prod"
DECLARED = TorchNativeBackend.capabilities.with_changes(promises={"mode_invariant": True})


def test_last_rows_have_the_numbers_and_the_keys_that_they_have_in_extend() -> None:
    own = make_schedule(parse_case(CASE))
    first = own.steps[0]
    data, start = make_step_data(own, first), 0
    decode, verify = last_rows_of(own, DECLARED)
    width = min(4, *(request.new for request in first.requests))
    assert [each.case.mode for each in (decode, verify)] == [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY]
    for other, count in ((decode, 1), (verify, width)):
        step, padded = other.steps
        assert padded.requests is step.requests
        assert (step.bs, step.bucket, padded.bucket, other.buckets) == (3, 3, 4, (4, 3))
        found, start = make_step_data(other, step), 0
        for index, request in enumerate(first.requests):
            start += request.new
            mine = slice(index * count, (index + 1) * count)
            assert torch.equal(found.q[:, mine], data.q[:, start - count : start])
            assert torch.equal(found.out_cache_loc[mine], data.out_cache_loc[start - count : start])
            keys = request.prefix + request.new
            assert torch.equal(found.stored_keys[:, index, :keys], data.stored_keys[:, index, :keys])
            row, whole = found.visible[..., index, count - 1, :], data.visible[..., index, request.new - 1, :]
            assert torch.equal(row[..., :keys], whole[..., :keys])
        assert [layer.sliding_window_size for layer in make_layers(other.case)] == [
            layer.sliding_window_size for layer in make_layers(own.case)
        ]


@pytest.mark.parametrize(
    ("case", "has"),
    [
        (CASE, True),
        (CASE.replace("b3prod", "b3prod-noncausal").replace("-w4", ""), False),
        (CASE.replace("-w4", "-lsewhole"), False),
        (CASE.replace("-shuffled", "-chunks3-shuffled"), False),
        (f"{CASE}-bigpool", False),
        ("decode-gqa2x2-d32-fp32-p4-k5-shuffled-gauss-b1prod", False),
    ],
)
def test_only_extends_whose_rows_see_no_later_key_have_last_rows(case: str, has: bool) -> None:
    assert has_last_rows(parse_case(case)) is has


def test_last_rows_are_of_modes_that_are_declared_and_attend_the_same_numbers() -> None:
    own = make_schedule(parse_case(CASE))
    fp8 = make_schedule(parse_case(CASE.replace("gauss", "gauss-kvfp8e4m3")))
    given = DECLARED.with_changes(precision={"new_rows_as_given": {"extend"}})

    def modes(schedule: object, declared: object) -> list[str]:
        return [str(each.case.mode) for each in last_rows_of(schedule, declared)]  # type: ignore[arg-type]

    assert modes(own, TorchNativeBackend.capabilities) == []
    assert modes(own, DECLARED.with_changes(eager={"extend", "target-verify"}, graph=())) == ["target-verify"]
    assert modes(own, DECLARED.with_changes(eager={"extend"}, graph={"decode"})) == ["decode"]
    assert modes(own, DECLARED.with_changes(bounds={"max_topk": 0}, eager={"extend", "decode"}, graph=())) == ["decode"]
    assert modes(own, given) == ["decode", "target-verify"], "nothing is rounded to FP8"
    assert modes(fp8, given) == []
    both = given.with_changes(precision={"new_rows_as_given": {"extend", "decode"}})
    assert modes(fp8, both) == [], "a decode has its own row as given, and an extend all rows of its step"
    assert modes(fp8, DECLARED) == ["decode", "target-verify"]


def test_no_more_rows_are_cut_from_a_request_than_it_has_where_live_requests_fill_the_bucket() -> None:
    own = make_schedule(parse_case("extend-gqa2x2-d64-fp32-p16-k33-n9a9-shared-one_hot-layers2from5-b4small"))
    requests = own.steps[0].requests
    assert len(requests) > own.case.bs
    for other in last_rows_of(own, DECLARED):
        for cut, whole in zip(other.steps[0].requests, requests, strict=True):
            assert cut.new <= whole.new
            assert cut.prefix >= whole.prefix


def test_a_bucket_that_live_requests_fill_is_the_only_one() -> None:
    own = make_schedule(parse_case("extend-gqa2x2-d64-fp32-p16-k33-n9a9-shared-one_hot-layers2from5-b4small"))
    for other in last_rows_of(own, DECLARED):
        assert [(step.name, step.bucket) for step in other.steps] == [("last rows", own.steps[0].bs)]
        assert other.buckets == (own.steps[0].bs,)


def test_last_rows_of_modes_with_graphs_are_replayed_and_the_extend_with_them() -> None:
    own = make_schedule(parse_case(CASE))
    rows = last_rows_of(own, DECLARED)
    decode, verify = rows
    assert captured_for_bits([own, *rows], DECLARED.with_changes(graph={"decode", "target-verify"})) == [decode, verify]
    assert captured_for_bits([own, *rows], DECLARED.with_changes(graph={"extend", "decode"})) == [own, decode]
    assert captured_for_bits([own, *rows], DECLARED.with_changes(graph=())) == []
    assert captured_for_bits([own], DECLARED.with_changes(graph={"extend"})) == [], "there is nothing to compare"
    assert replayed_for_bits(decode) == decode.steps
    assert replayed_for_bits(own) == own.steps[:1]


@pytest.mark.parametrize(("count", "captured"), [(128, True), (129, False)])
def test_last_rows_of_a_very_large_batch_are_not_captured(count: int, captured: bool) -> None:
    own = make_schedule(parse_case(f"extend-gqa2x2-d32-fp32-p4-k5x{count}-n1a1x{count}-shuffled-gauss-b{count}prod"))
    (decode,) = last_rows_of(own, DECLARED)
    assert captured_for_bits([own, decode], DECLARED.with_changes(graph={"decode"})) == [decode] * captured
