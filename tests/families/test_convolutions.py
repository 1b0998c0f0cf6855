"""Layers that compute nothing but a convolution: their answer, their cases, and what a backend may declare of them."""

from __future__ import annotations

import numpy as np
import pytest

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.minimal import minimal_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Bounds, Capabilities, ForwardMode, HeadShapes, State
from attn_testkit.families.recurrent.data import StateStepData, make_state_data
from attn_testkit.families.recurrent.recurrence import recur
from attn_testkit.steps.schedule import make_schedule

CASE = "extend-conv2-d32-bf16-p16-k0.17.5-n6a1.4.9-shuffled-mild_decay-k0w3s32-b3prod"
V2 = ForwardMode.DRAFT_EXTEND_V2
DECLARED = Capabilities(
    eager={"decode", "extend", V2},
    graph={"decode", V2},
    bounds=Bounds(max_q_rows=6, max_topk=1),
    heads=HeadShapes(families={"conv"}, gqa_ratios={1}, head_dims={32}),
    state=State(conv_widths={3}),
)


def by_hand(step: StateStepData, layer: int, request: int) -> np.ndarray:
    """[rows, C]: each output, with a loop over rows and taps."""
    of = step.layers[layer]
    assert of.conv_weight is not None
    taps = of.conv_weight.double().numpy()
    bias = 0.0 if of.conv_bias is None else of.conv_bias.double().numpy()
    rows = step.q[layer, step.row_request == request].double().numpy()
    inputs = np.concatenate([step.windows[layer, request].double().numpy().T, rows])
    return np.stack([sum(taps[:, tap] * inputs[row + tap] for tap in range(3)) + bias for row in range(len(rows))])


def test_outputs_are_those_of_the_convolution_without_an_activation() -> None:
    schedule = make_schedule(parse_case(CASE))
    step = make_state_data(schedule, schedule.steps[0])
    found = recur(step)
    for layer in range(len(step.layers)):
        for request in range(3):
            own = found.out[layer, step.row_request == request].flatten(1).numpy()
            assert np.allclose(own, by_hand(step, layer, request), rtol=1e-12, atol=1e-12)
    # Twice the rounding to bf16, and a little for the sum of the taps.
    share = (found.out_limit / found.out.abs().clamp(min=1e-2)).median()
    assert 2.0**-7 <= float(share) <= 2.0**-7 * 1.01
    assert found.states.shape[-1] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (CASE.replace("k0w3", "k64w3"), "have no keys; their width is 0"),
        (CASE.replace("conv2", "gdn2x2"), "have keys of a width above 0"),
        (CASE.replace("w3", "w1"), "are a convolution of 2 taps or more"),
        (CASE.replace("mild_decay", "unit_keys"), "layers of conv have no state"),
        ("decode-conv2-d32-bf16-p16-k5-shuffled-mild_decay-k0w3s16.stochastic-b1prod", "no state to round"),
        ("draft-extend-conv2-d32-bf16-p16-k5-n2a1-shuffled-mild_decay-k0w3s32-b1prod", "draft model"),
    ],
)  # fmt: skip
def test_a_case_that_cannot_be_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_case(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": {"families": {"conv", "gdn"}}}, "run in draft-extend-v2"),
        ({"graph": {"draft-extend"}}, "a draft model has attention layers"),
        ({"state": {"conv_widths": {1}}}, "State.conv_widths needs such a width"),
        ({"state": {"plain_convolution": False}}, "State.plain_convolution is then True"),
    ],
)
def test_capabilities_that_no_convolution_has_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DECLARED.with_changes(**changes)


def test_a_draft_model_has_cases_and_every_case_has_a_window_and_no_state() -> None:
    for mode in sorted(DECLARED.eager):
        cases = generate(DECLARED, mode, "core")
        assert cases
        assert {(case.state.k_dim, case.state.conv_width) for case in cases if case.state} == {(0, 3)}
    # Fewer rows than the window has columns and one more, as many, and more.
    assert {2, 3, 6} <= {case.width for case in generate(DECLARED, V2, "core")}


def test_a_class_with_other_kinds_has_no_cases_of_a_draft_model() -> None:
    assert generate(TorchNativeStateBackend.capabilities, V2, "core") == ()


def test_the_plainest_case_of_a_draft_is_one_without_keys() -> None:
    """``minimize`` and ``fuzz`` begin with it."""
    verifies = DECLARED.with_changes(eager={"target-verify"}, graph=set())
    case = minimal_case(verifies, ForwardMode.TARGET_VERIFY)
    assert case.state is not None
    assert (case.heads.family, case.state.k_dim) == ("conv", 0)
