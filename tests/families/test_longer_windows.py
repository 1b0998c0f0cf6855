"""Windows of a convolution with more columns than its taps read: data, memory, and who reads or writes which."""

from __future__ import annotations

import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native_state_windows import TorchNativeStateWindowsBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.state import MORE_COLUMNS
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import AttentionBackend, ForwardMode
from attn_testkit.families.by_layer import schedule_of
from attn_testkit.families.recurrent.data import StateStepData, make_state_data
from attn_testkit.families.recurrent.memory import _with_more_columns, as_rows, from_rows, more_columns_in
from attn_testkit.families.recurrent.recurrence import recur, start_of
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import r_longer_windows as faults
from attn_testkit_corpus.faults.longer_windows import LongerWindowsParent

DECODE = "decode-gdn4x1-d64-bf16-p16-k9.3-shuffled-mild_decay-k64w4s32.{}-layers1from0-b3prod"
EXTEND = "extend-gdn4x1-d64-bf16-p16-k30.0x2-n9a2x2.9-shuffled-mild_decay-k64w4s32.{}-layers1from0-b3prod"
LAST, FIRST = "newestlast", "tapsfirst"


def data_of(name: str) -> tuple[Case, StateStepData]:
    case = parse_case(name)
    schedule = make_schedule(case)
    return case, make_state_data(schedule, schedule.steps[0])


@pytest.mark.parametrize("name", [DECODE, EXTEND])
def test_all_columns_are_inputs_if_the_newest_is_the_last(name: str) -> None:
    case, data = data_of(name.format(LAST))
    assert case.state is not None
    more = case.state.more_columns
    assert more in MORE_COLUMNS
    assert (data.history, data.more_columns, data.windows.shape[-1]) == (more, 0, 3 + more)
    begun = ~data.fresh
    assert data.windows[:, begun, :, :more].isnan().all()
    assert (data.windows[:, data.fresh] == 0).all()
    assert not data.windows[..., more:].isnan().any()
    found, first = recur(data), 0
    for request, new in enumerate(data.news):
        own = data.q[:, first : first + new].transpose(1, 2)
        want = torch.cat([data.windows[:, request], own], -1)[..., -(3 + more) :]
        assert torch.equal(found.windows[:, request].nan_to_num(7.0), want.nan_to_num(7.0))
        first += new
    assert not found.out.isnan().any(), "no tap reads a column before the W - 1"


@pytest.mark.parametrize("name", [DECODE, EXTEND])
def test_columns_after_those_of_the_taps_are_not_part_of_a_window(name: str) -> None:
    case, data = data_of(name.format(FIRST))
    assert case.state is not None
    assert (data.history, data.more_columns, data.windows.shape[-1]) == (0, case.state.more_columns, 3)
    assert recur(data).windows.shape[-1] == 3
    assert not start_of(data).windows.isnan().any()
    rows = as_rows(_with_more_columns(data.windows, data), data.states, data.shape.order)
    assert torch.equal(from_rows(rows, data)[0], data.windows)
    more = more_columns_in(rows, data)
    assert more.shape[-1] == data.more_columns
    assert more.isnan().all()


def test_rows_of_memory_have_all_columns_and_are_read_as_they_were_written() -> None:
    _, data = data_of(DECODE.format(LAST))
    windows, states = from_rows(as_rows(data.windows, data.states, data.shape.order), data)
    assert torch.equal(windows.nan_to_num(7.0), data.windows.nan_to_num(7.0))
    assert torch.equal(states, data.states)


def test_layers_without_a_convolution_and_drafts_have_no_longer_window() -> None:
    with pytest.raises(ValueError, match="no window"):
        parse_case(DECODE.format(LAST).replace("w4", "w1"))
    with pytest.raises(ValueError, match="windows are longer anyway"):
        parse_case(f"target-verify-gdn4x1-d64-bf16-p16-k9-t0-shuffled-mild_decay-k64w4s32.{LAST}-b1prod")


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_smoke_has_each_declared_window(mode: ForwardMode) -> None:
    found = generate(TorchNativeStateWindowsBackend.capabilities, mode, "smoke")
    assert {case.state.conv_windows for case in found if case.state} == {"exact", "taps_first", "newest_last"}


def test_core_has_each_number_of_columns_with_each_window() -> None:
    declared = TorchNativeStateWindowsBackend.capabilities
    found = [case for mode in (ForwardMode.DECODE, ForwardMode.EXTEND) for case in generate(declared, mode, "core")]
    shapes = [case.state for case in found if case.state and case.state.has_longer_windows]
    assert {(each.conv_windows, each.more_columns) for each in shapes} == {
        (windows, more) for windows in ("taps_first", "newest_last") for more in MORE_COLUMNS
    }


def test_the_part_of_a_hybrid_model_that_keeps_states_has_the_columns_of_the_whole() -> None:
    case = parse_case(DECODE.format(LAST).replace("layers1from0", "layers2from0hybrid"))
    part = schedule_of(make_schedule(case), "recurrent").case
    assert part.id != case.id
    assert part.state is not None
    assert case.state is not None
    assert part.state.more_columns == case.state.more_columns > 0


def failures(backend: type[AttentionBackend], name: str) -> dict[str, str]:
    found = check_backend(backend, cases=[name], device="cpu", diagnose="none", executions=["eager"])
    assert [each.case for each in found if each.case] == [name]
    return {finding.check: str(finding) for each in found if each.case for finding in each.findings}


@pytest.mark.parametrize("name", [DECODE.format(LAST), DECODE.format(FIRST), EXTEND.format(LAST)])
@pytest.mark.parametrize("backend", [LongerWindowsParent, TorchNativeStateWindowsBackend])
def test_right_backends_pass(backend: type[AttentionBackend], name: str) -> None:
    if backend is TorchNativeStateWindowsBackend:
        name = name.replace("gdn4x1", "gdn2x1").replace("d64", "d32").replace("k64", "k32")
    assert failures(backend, name) == {}


@pytest.mark.parametrize(
    ("backend", "name", "check", "text"),
    [
        (faults.TapsFromTheOtherEnd, DECODE.format(LAST), "conv-window-exact", "inputs are in the last 3 columns"),
        (faults.TapsFromTheOtherEnd, DECODE.format(FIRST), "conv-window-exact", "inputs are in the first 3 columns"),
        (faults.WritesColumnsAfterTheTaps, DECODE.format(FIRST), "conv-window-exact", "only the first 3 columns move"),
        (faults.MovesTheTapsOnly, DECODE.format(LAST), "conv-window-exact", "moves by all of its columns"),
        (faults.ShortPromptLeavesOldColumns, EXTEND.format(LAST), "conv-window-exact", "request 1"),
    ],
)
def test_wrong_columns_are_named(backend: type[AttentionBackend], name: str, check: str, text: str) -> None:
    assert text in failures(backend, name)[check]
