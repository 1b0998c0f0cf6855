"""Claims that are narrower than usual: no case is outside of them, and what they still hold is tried."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.as_claimed import as_claimed
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.catalogue import generate
from attn_testkit.cases.data import make_layers
from attn_testkit.cases.untried import untried
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.faults.f_claimed_windows import WINDOWED

ALL = TorchNativeBackend.capabilities
DECODE = parse_case("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-w4-b4prod")
EXTEND = ForwardMode.EXTEND


def core(claims: Capabilities, mode: ForwardMode = ForwardMode.DECODE) -> tuple[Case, ...]:
    return generate(claims, mode, "core")


def test_with_the_usual_claims_a_case_is_what_it_was() -> None:
    assert all(as_claimed(ALL, case) is case for case in core(ALL))


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("window", [1, 5, 12, 5000])
def test_no_layer_of_a_case_has_a_window_below_the_smallest_that_is_claimed(mode: ForwardMode, window: int) -> None:
    claims = ALL.with_changes(min_window=window)
    sizes = {layer.sliding_window_size for case in core(claims, mode) for layer in make_layers(case)} - {-1}
    assert min(sizes) == window


@pytest.mark.parametrize(("window", "is_tried"), [(1, True), (47, True), (300, True), (16_380, True), (16_384, False)])
def test_the_smallest_window_is_tried_with_a_request_beyond_it_or_said_to_be_untried(
    window: int, is_tried: bool
) -> None:
    claims = WINDOWED.with_changes(min_window=window)
    cases = core(claims)
    assert any(case.window == window and window + 1 < max(case.prefixes) + 1 for case in cases) is is_tried
    assert (("window", window) in untried(claims, ForwardMode.DECODE, cases)) is not is_tried


def test_without_windows_there_is_no_smallest_one_to_be_tried() -> None:
    claims = ALL.with_changes(min_window=4, sliding_window=())
    assert not [name for name, _ in untried(claims, ForwardMode.DECODE, core(claims)) if name == "window"]
