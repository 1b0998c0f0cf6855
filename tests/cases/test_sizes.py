"""Each option of a layer, format, layout and server variant meets batches that are large in one direction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.features.rows import rows_of
from attn_testkit.catalogue.array import array_cases, array_of
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.registry import load_backend
from attn_testkit.steps.schedule import make_schedule

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
SIZES: dict[str, Callable[[Case], bool]] = {
    "more than 32 requests": lambda case: case.bs > 32,
    "more than 1,024 keys": lambda case: max(case.prefixes) > 1024,
}
ROWS: dict[str, Callable[[Case], bool]] = {
    "more than 128 rows of a request": lambda case: max(rows_of(case)) > 128,
    "more than 512 rows of a request": lambda case: max(rows_of(case)) > 512,
}
OPTIONS: dict[str, Callable[[Case], bool]] = {
    "ALiBi": lambda case: case.alibi,
    "spans": lambda case: case.spans is not None,
    "additive bias": lambda case: case.qq_bias != "none",
    "local chunks": lambda case: case.local_chunk > 0,
    "cross attention": lambda case: case.encoder_len > 0,
    "not causal": lambda case: "noncausal" in case.variants,
    "sliding window": lambda case: case.window >= 0,
    "soft cap": lambda case: case.logit_cap > 0,
    "sinks": lambda case: case.sinks,
    "log-sum-exps": lambda case: bool(case.kv_splits),
    "KV groups": lambda case: case.layers.groups,
    "wider keys": lambda case: case.rope_dim > 0 and not case.heads.layout.values_in_keys,
    "FP8": lambda case: case.kv_dtype == "fp8_e4m3",
    "given output": lambda case: "given_out" in case.variants,
    "selection": lambda case: case.selection is not None,
    "indexer": lambda case: case.indexer is not None,
}


def declared_by(backend: str) -> Capabilities:
    return load_backend(backend).capabilities


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("backend", ["torch_native", "torch_native_sparse", "trtllm_mha", "flashinfer_mla"])
def test_each_option_that_an_array_has_meets_each_size(backend: str, mode: ForwardMode) -> None:
    cases = list(array_cases(declared_by(backend), mode, "core", 0))
    sizes = SIZES | (ROWS if mode is EXTEND else {})
    for name, has in OPTIONS.items():
        found = [case for case in cases if has(case)]
        assert not found or {size for size, test in sizes.items() if any(map(test, found))} == set(sizes), name


@pytest.mark.parametrize("mode", [DECODE, EXTEND])
def test_each_layout_meets_each_size(mode: ForwardMode) -> None:
    declared = declared_by("torch_native")
    cases = list(array_cases(declared, mode, "core", 0))
    for size, test in (SIZES | (ROWS if mode is EXTEND else {})).items():
        assert {case.kv_layout for case in cases if test(case)} == declared.kv_pool.kv_layouts, size


@pytest.mark.parametrize("backend", ["torch_native", "triton", "flashinfer_mla"])
def test_large_batches_have_few_heads_and_ids_that_can_be_read(backend: str) -> None:
    declared = declared_by(backend)
    large = [case for mode in ForwardMode for case in array_cases(declared, mode, "core", 0) if case.bs > 32]
    assert large
    assert max(case.heads.q_heads for case in large) <= 6
    assert max(len(case.id) for case in large) < 300
    assert all(parse_case(case.id) == case for case in large)


def test_more_requests_than_a_block_has_threads_are_tried_in_each_mode() -> None:
    for mode in ForwardMode:
        assert max(case.bs for case in array_cases(declared_by("torch_native"), mode, "core", 0)) == 130


def test_a_batch_of_many_requests_has_one_request_that_is_longer_than_all_others_after_them() -> None:
    for case in array_cases(declared_by("torch_native"), DECODE, "core", 0):
        if case.bs > 32 and any(case.prefixes):
            assert case.prefixes.index(max(case.prefixes)) == case.bs - 9
            assert max(case.prefixes) >= 600


def test_steps_of_a_large_batch_are_fewer() -> None:
    few, many = (
        make_schedule(parse_case(f"decode-mha2-d32-bf16-p1-k3x{count}-shuffled-gauss-b{count}prod"))
        for count in (64, 65)
    )
    assert len(many.steps) < len(few.steps)


@pytest.mark.parametrize("mode", [DECODE, ForwardMode.TARGET_VERIFY, EXTEND])
def test_states_have_many_requests_in_one_array_with_server_variants(mode: ForwardMode) -> None:
    declared = declared_by("torch_native_state")
    array = array_of(declared, mode, "core")
    assert list(array.columns["size"]) == ["", "many requests"]
    for word in ("overlap_scheduling", "empty_batches"):
        assert {row["size"] for row in array.rows() if row[word]} == set(array.columns["size"])
    cases = generate(declared, mode, "core")
    kinds = {case.heads.family for case in cases}
    many = [case for case in cases if case.bs >= 40]
    assert {case.heads.family for case in many} == kinds
    # Wide drafts make 130 requests dear, and an array does not promise each kind a narrow draft of many requests.
    assert {case.bs for case in many if case.width <= 4 or mode is EXTEND} == {130}
    assert {case.bs for case in many if case.width > 4 and mode is not EXTEND} <= {40}
    if mode is EXTEND:
        assert any(case.bs == 130 and max(case.new[7:]) <= 3 for case in cases)
    # Keys, nodes and settings of a server meet overlapping schedules in each mode.
    overlaps = [case for case in cases if "overlap_scheduling" in case.variants]
    assert {case.state.padding for case in overlaps if case.state} == declared.state.padding
