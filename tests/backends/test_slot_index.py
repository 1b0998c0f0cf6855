"""Adapters of kernels that find keys by slot: short, and conformant where their capabilities are honest."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from in_process import check_backend
from ragged_prefill import RaggedPrefillBackend

import attn_testkit.examples.slot_index as adapter
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import AttentionLayer, DraftDecodeInput, ForwardMode, KernelPlan
from attn_testkit.contract.kernel_plan import KernelStep
from attn_testkit.examples.slot_index import SlotIndexBackend
from attn_testkit.results.case_result import Status

LAYER = AttentionLayer(0, 4, 2, 64, 64, 1.0, k_scale=0.25, v_scale=2.0)
TABLE = torch.tensor([[8, 9, 10, 11, 0, 1], [12, 13, 14, 15, 4, 5]], dtype=torch.int32)


def step(lens: list[int], rows: list[int]) -> KernelStep:
    offsets = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    return KernelStep(TABLE, torch.tensor(lens, dtype=torch.int32), offsets, max(rows), None, 2)


def plan_of(made: KernelStep) -> KernelPlan:
    return KernelPlan(made, LAYER, torch.tensor([9, 13, 14]), max_kv_len=6)


def test_slots_are_packed_and_bounded_by_the_lengths() -> None:
    plan = plan_of(step([2, 3], [1, 2]))
    assert plan.kv_indptr.tolist() == [0, 2, 5]
    assert plan.kv_indices.tolist() == [8, 9, 12, 13, 14] + [0] * 7
    assert plan.prefix_lens.tolist() == [1, 1]
    assert plan.prefix_indptr.tolist() == [0, 1, 2]
    assert plan.prefix_indices.tolist() == [8, 12] + [0] * 10
    assert (plan.kv_indptr.dtype, plan.kv_indices.dtype) == (torch.int32, torch.int64)
    assert plan.slot_table is TABLE
    assert plan.page_table.tolist() == [[4, 5, 0], [6, 7, 2]]
    assert (plan.page_table.dtype, plan.prefix_lens.dtype) == (torch.int32, torch.int32)


def test_a_context_may_be_filled_to_the_last_token_and_a_padded_request_has_no_prefix() -> None:
    plan = plan_of(step([6, 1], [1, 4]))
    assert plan.kv_indices.tolist() == [8, 9, 10, 11, 0, 1, 12, 0, 0, 0, 0, 0]
    assert plan.prefix_lens.tolist() == [5, 0], "a padded request of a draft-extend has fewer keys than rows"
    assert plan.prefix_indptr.tolist() == [0, 5, 5]


def test_a_branch_of_a_draft_is_a_request_with_slots_of_its_own() -> None:
    spec = DraftDecodeInput(topk=2, num_steps=2, out_cache_loc=torch.tensor([9, 0, 11, 0]), step=0)
    table = torch.tensor([[8, 9, 10, 11, 12, 13]], dtype=torch.int32)
    made = KernelStep(table, torch.tensor([2, 2]).int(), torch.arange(3).int(), 1, None, 1, spec, torch.tensor([1]))
    plan = KernelPlan(made, LAYER, torch.tensor([9, 11]), max_kv_len=6)
    assert plan.slot_table[:, :2].tolist() == [[8, 9], [8, 11]]
    assert plan.kv_indices[:4].tolist() == [8, 9, 8, 11]
    assert plan.page_table[:, :2].tolist() == [[8, 9], [8, 11]]


def test_what_nobody_asks_for_is_not_made_and_layers_share_what_is() -> None:
    made = step([2, 3], [1, 2])
    assert set(vars(made)) == {field.name for field in fields(made)}
    plan_of(made).page_table  # noqa: B018 - it is the asking that makes it
    assert set(vars(made)) == {*(field.name for field in fields(made)), "page_table"}
    assert plan_of(made).page_table is plan_of(made).page_table
    assert plan_of(made).kv_indices is plan_of(made).kv_indices


def test_scales_are_tensors_of_the_layer() -> None:
    plan = plan_of(step([2, 3], [1, 2]))
    for scale, value in ((plan.k_scale, 0.25), (plan.v_scale, 2.0)):
        assert (scale.tolist(), scale.dtype) == ([value], torch.float32)


def test_the_adapter_is_30_lines_after_its_imports() -> None:
    assert len(Path(adapter.__file__).read_text().partition("\nclass ")[2].splitlines()) <= 30


@pytest.mark.parametrize(("mode", "execution"), [("extend", "graph"), ("draft-decode", "eager")])
def test_a_slot_index_kernel_conforms(mode: str, execution: str) -> None:
    found = check_backend(SlotIndexBackend, device="cpu", modes=[mode], executions=[execution], tier="smoke")
    assert found.ok, found


def test_a_slot_index_kernel_conforms_in_core_where_requests_are_short() -> None:
    core = generate(SlotIndexBackend.capabilities, ForwardMode.DECODE, "core")
    cases = [case.id for case in core if sum(case.prefixes) < 600][::2]
    assert len(cases) > 25
    found = check_backend(SlotIndexBackend, device="cpu", cases=cases, executions=["eager"])
    assert found.ok, found


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("mode", ["extend", "draft-extend"])
def test_a_prefill_kernel_that_reads_new_rows_where_they_are_conforms(mode: str, execution: str) -> None:
    smoke = generate(RaggedPrefillBackend.capabilities, ForwardMode(mode), "smoke")
    # A graph of them reads the same tables as an eager step, and takes six times as long.
    cases = [case.id for case in smoke][: 3 if execution == "graph" else None]
    found = check_backend(RaggedPrefillBackend, device="cpu", cases=cases, executions=[execution])
    assert found.ok, found
    assert sum(row.status is Status.PASSED for row in found) == len(cases)


class SaysNothing(RaggedPrefillBackend):
    capabilities = RaggedPrefillBackend.capabilities.with_changes(
        precision={"new_rows_as_given": ()}, kv_pool={"kv_dtypes": {"fp8_e4m3"}}
    )


def test_without_the_capability_it_is_reported_what_to_declare() -> None:
    cases = [case.id for case in generate(SaysNothing.capabilities, ForwardMode.EXTEND, "smoke")][:2]
    found = check_backend(SaysNothing, device="cpu", cases=cases, executions=["eager"])
    assert not found.ok
    assert any("declare new_rows_as_given={'extend'}" in finding.hint for row in found for finding in row.findings)
