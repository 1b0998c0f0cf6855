"""Warm-ups of one plan are compared where their rows have keys, and a capture's writes are looked for."""

from __future__ import annotations

import pytest
import torch
from attn_testkit.runner_modes.warm_ups import uneven_warm_ups

from attn_testkit.cases.case import parse_case
from attn_testkit.checks.graphs import at_capture

DECODE = parse_case("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod")
V1 = parse_case("draft-extend-gqa2x2-d64-bf16-p16-k3.15.40-n4a1.3.2-shuffled-gauss-b4prod")
EXTEND = parse_case("extend-mqa4-d256-bf16-p128-k0.1.128-n38a17.64.33-chunks3-contiguous-mean-kvfp8e4m3-cap1.5-b3prod")


def _run(rows: int) -> list[torch.Tensor]:
    return [torch.ones(rows, 4, 64, dtype=torch.bfloat16) for _ in range(2)]


def test_a_later_run_with_other_bits_is_named_by_its_number_its_layer_and_the_count() -> None:
    runs = [_run(4), _run(4), _run(4)]
    runs[2][1][3, 0, :2] = -1.0
    (where,) = uneven_warm_ups(DECODE, "bucket 4", runs, 1)
    assert where.startswith("bucket 4, layer 1")
    assert where.endswith("2 of 1024 values differ in warm-up 3")


def test_a_nan_in_every_run_is_no_difference() -> None:
    runs = [_run(4), _run(4)]
    for run in runs:
        run[0][0] = float("nan")
    assert uneven_warm_ups(DECODE, "bucket 4", runs, 1) == ()


@pytest.mark.parametrize(("fill", "found"), [(0, 0), (1, 1)])
def test_requests_without_keys_are_not_compared(fill: int, found: int) -> None:
    runs = [_run(4), [torch.zeros_like(out) for out in _run(4)]]
    assert len(uneven_warm_ups(DECODE, "bucket 4", runs, fill)) == found


@pytest.mark.parametrize(("row", "found"), [(V1.width - 2, 0), (V1.width - 1, 1)])
def test_of_a_dummy_request_of_one_key_the_last_row_alone_is_compared(row: int, found: int) -> None:
    runs = [_run(2 * V1.width), _run(2 * V1.width)]
    runs[1][0][row] = 7.0
    assert len(uneven_warm_ups(V1, "bucket 2", runs, 1)) == found


def test_rows_of_a_prefill_are_of_no_fixed_request() -> None:
    assert uneven_warm_ups(EXTEND, "bucket 2", [_run(4), [out * 2 for out in _run(4)]], 1) == ()


HYBRID = "decode-kda4x2-d128-fp16-p16-k1.70.9-shuffled-mild_decay-k128w2s32.slot0.strided-layers2from0hybrid-b4nan"
_STATE = "-d64-bf16-p16-k5-shuffled-mild_decay-k64w4s32"


@pytest.mark.parametrize(
    ("case", "requests", "found"),
    [
        (f"decode-gdn4x2{_STATE}-b1prod", 4, 1),  # padding is skipped
        (f"decode-gdn4x2{_STATE}.null-b1prod", 4, 1),
        (f"decode-gdn4x2{_STATE}.slot0-b1prod", 4, 0),
        (f"decode-gdn4x2{_STATE}.slot0-b1prod", 1, 1),  # alone in its slot
        ("target-verify-gdn4x2-d64-bf16-p16-k5-chain2-shuffled-mild_decay-k64w4s32.slot0-b1prod", 2, 1),
        ("target-verify-gdn4x2-d64-bf16-p16-k5-chain2-shuffled-mild_decay-k64w4s32.slot0.slots-b1prod", 2, 0),
    ],
)
def test_layers_whose_one_state_all_dummy_requests_update_are_not_compared(
    case: str, requests: int, found: int
) -> None:
    parsed = parse_case(case)
    runs = [_run(requests * parsed.width), [torch.zeros_like(out) for out in _run(requests * parsed.width)]]
    assert len(uneven_warm_ups(parsed, "bucket", runs, 1)) == found


def test_softmax_layers_of_a_hybrid_model_are_compared() -> None:
    hybrid = parse_case(HYBRID)
    runs = [_run(4), _run(4)]
    runs[1][0][:] = 7.0
    assert uneven_warm_ups(hybrid, "bucket 4", runs, 1) == ()
    runs[1][1][:] = 7.0
    assert "layer 1" in uneven_warm_ups(hybrid, "bucket 4", runs, 1)[0]


def test_one_run_agrees_with_itself() -> None:
    assert uneven_warm_ups(DECODE, "bucket 4", [_run(4)], 1) == ()


def test_a_clean_capture_gives_no_finding() -> None:
    assert at_capture((), (), DECODE) == []


@pytest.mark.parametrize(("count", "listed"), [(8, "14, 15"), (9, "14, 15, ...")])
def test_the_first_eight_slots_that_a_capture_wrote_are_listed(count: int, listed: str) -> None:
    (finding,) = at_capture((), range(8, 8 + count), DECODE)
    assert finding.check == "captures-cleanly"
    assert f"write {count} KV slots outside page 0" in finding.headline
    assert finding.where.endswith(listed)


@pytest.mark.parametrize(
    ("case_id", "what"),
    [
        ("decode-gdn4x2-d64-bf16-p16-k1.2.3-shuffled-gauss-k64w4s32-b4prod", "2 state slots other than slot 0"),
        (HYBRID, "2 slots outside page 0 and state slot 0"),
    ],
)
def test_what_a_capture_of_states_wrote_is_named_as_such(case_id: str, what: str) -> None:
    (finding,) = at_capture((), (3, 5), parse_case(case_id))
    assert finding.headline.endswith(f"write {what}")
    assert finding.where == "slots 3, 5"


def test_of_uneven_warm_ups_the_first_is_reported_once() -> None:
    assert [finding.where for finding in at_capture(("here", "there"), (), DECODE)] == ["here"]
