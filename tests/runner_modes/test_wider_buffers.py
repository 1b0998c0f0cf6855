"""Selected keys, weights of an indexer and slots of states that are columns of wider buffers."""

from __future__ import annotations

import pytest
import torch
from in_process import check_backend

from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.model import with_columns_behind
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.catalogue import CorpusEntry, entry_of
from cuda_on_cpu import emulated_cuda
from runner_modes.batches import _as_on_host, _whole
from runner_modes.harness import ServerHarness
from runner_modes.static_inputs import make_static_inputs
from runner_modes.step_tensors import STEP_TENSORS

SELECTED = "decode-mqa4-d64-bf16-p16-k9.70.1-shuffled-gauss-sel16-b4prod-wider_buffers"
INDEXED = "extend-mqa4-d64-bf16-p16-k9.70.1-n2a2x3-shuffled-gauss-sel16-idx4-b4prod-wider_buffers"
STATES = "decode-gdn4x2-d64-bf16-p16-k9.7.1-shuffled-mild_decay-k64w4s32-b4prod-wider_buffers"
EXTENDED = "extend-gdn4x2-d64-bf16-p16-k0.3.0-n16a15.16.17-shuffled-mild_decay-k64w4s32-b3prod-wider_buffers"

PROMPTS = "extend-gqa4x2-d64-bf16-p16-k9.70.1-n20a20.7.12-shuffled-gauss-spans-b4prod-wider_buffers"
SPANS_BEFORE = "decode-gqa4x2-d64-bf16-p16-k9.70.1-shuffled-gauss-spans-b4prod-wider_buffers"


@pytest.mark.parametrize(
    ("known_good", "slug", "case"),
    [
        ("sparse-of-columns", "stride-of-selections-is-topk", SELECTED),
        ("indexer-of-columns", "stride-of-weights-is-the-number-of-heads", INDEXED),
        ("states-of-columns", "slots-read-without-their-stride", STATES),
        ("states-of-columns", "slots-read-without-their-stride", EXTENDED),
        ("spans-of-columns", "stride-of-the-table-is-its-columns", PROMPTS),
        ("spans-of-columns", "stride-of-the-table-is-its-columns", SPANS_BEFORE),
        ("spans-of-columns", "stride-of-spans-is-their-number", PROMPTS),
    ],
)
def test_a_stride_that_is_computed_from_the_columns_fails_eager_and_in_graphs(
    known_good: str, slug: str, case: str
) -> None:
    fault: CorpusEntry = entry_of(slug)
    good = check_backend(entry_of(known_good).backend, cases=[case], device="cpu", diagnose="none")
    assert {each.status.value for each in good if each.case == case} == {"passed"}
    found = check_backend(fault.backend, cases=[case], device="cpu", diagnose="none")
    ran = [each for each in found if each.case == case]
    assert {each.status.value for each in ran} == {"failed"}
    assert all({finding.check for finding in each.findings} & set(fault.checks) for each in ran)
    plain = case.removesuffix("-wider_buffers")
    assert not check_backend(fault.backend, cases=[plain], device="cpu", diagnose="none").failures


def test_a_capture_and_a_step_have_all_positions_as_a_span_after_those_of_a_request() -> None:
    schedule = make_schedule(parse_case(PROMPTS))
    with emulated_cuda():
        harness = ServerHarness(entry_of("spans-of-columns").backend, [schedule], torch.device("cuda"))
        static = make_static_inputs(harness, schedule, 1, STEP_TENSORS)
    most = harness.context.max_spans
    rows = static.rows("mm_prefix_range_tensor", most + 3)
    assert rows[:, most:].tolist() == [[[0, 1_000_003]] * 3] * schedule.max_bs
    table = harness.context.req_to_token
    assert table.stride(0) == table.shape[1] + 3
    after = table.as_strided((len(table), 3), (table.stride(0), 1), table.storage_offset() + table.shape[1])
    assert (after == -1).all()


@pytest.mark.parametrize("columns", [0, 3])
def test_columns_after_those_of_a_row_hold_the_fill(columns: int) -> None:
    rows = torch.arange(6, dtype=torch.int32).view(3, 2)
    view = with_columns_behind(rows, columns, 7)
    assert torch.equal(view, rows)
    assert view.stride() == (2 + columns, 1)
    if columns:
        assert (view.as_strided((3, columns), (2 + columns, 1), 2) == 7).all()


def test_first_columns_stay_first_columns_on_the_device_and_other_tensors_are_sent_as_they_are() -> None:
    buffer = torch.arange(12).view(3, 4)
    for tensor in (buffer[:, :2], buffer[:, 0], buffer.view(3, 2, 2)[:, :1]):
        whole = _whole(tensor)
        assert torch.equal(whole.view_as(buffer), buffer)
        moved = _as_on_host(whole.clone(), tensor)
        assert torch.equal(moved, tensor)
        assert moved.stride() == tensor.stride()
    for tensor in (buffer, buffer.mT, buffer[:, 1:], buffer[:2]):
        assert _whole(tensor) is tensor


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_core_has_wider_tables_with_spans_and_without_if_they_are_declared(mode: ForwardMode) -> None:
    cases = generate(entry_of("spans-of-columns").backend.capabilities, mode, "core")
    assert [case.spans is None for case in cases if "wider_buffers" in case.variants] == [True, False]
    others = generate(entry_of("spans-as-ranges-of-requests").backend.capabilities, mode, "core")
    assert not [case for case in others if "wider_buffers" in case.variants]
