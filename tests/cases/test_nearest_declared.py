"""Capabilities that are narrower than usual: no case is outside of them, and what they still hold is tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.cases.derived_parameters import chosen
from attn_testkit.cases.nearest_declared import nearest_declared
from attn_testkit.catalogue.not_covered import not_covered
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.steps.data import make_layers
from attn_testkit_corpus.faults.f_declared_windows import WINDOWED

ALL = TorchNativeBackend.capabilities
DECODE = parse_case("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-w4-b4prod")
EXTEND = ForwardMode.EXTEND


def core(declared: Capabilities, mode: ForwardMode = ForwardMode.DECODE) -> tuple[Case, ...]:
    return generate(declared, mode, "core")


def test_with_the_usual_declares_a_case_is_what_it_was() -> None:
    assert all(nearest_declared(ALL, case) is case for case in core(ALL))


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("window", [1, 5, 12, 5000])
def test_no_layer_of_a_case_has_a_window_below_the_smallest_that_is_declared(mode: ForwardMode, window: int) -> None:
    declared = ALL.with_changes(windows={"smallest": window})
    sizes = {layer.sliding_window_size for case in core(declared, mode) for layer in make_layers(case)} - {-1}
    assert min(sizes) == window


@pytest.mark.parametrize(("window", "is_tried"), [(1, True), (47, True), (300, True), (16_380, True), (16_384, False)])
def test_the_smallest_window_is_tried_with_a_request_beyond_it_or_said_to_be_not_covered(
    window: int, is_tried: bool
) -> None:
    declared = WINDOWED.with_changes(windows={"smallest": window})
    cases = core(declared)
    assert any(case.window == window and window + 1 < max(case.prefixes) + 1 for case in cases) is is_tried
    assert (("window", window) in not_covered(declared, ForwardMode.DECODE, cases)) is not is_tried


def test_without_windows_there_is_no_smallest_one_to_be_tried() -> None:
    declared = ALL.with_changes(windows={"modes": (), "smallest": 4})
    assert not [name for name, _ in not_covered(declared, ForwardMode.DECODE, core(declared)) if name == "window"]


def windows_of(case: Case) -> list[int]:
    return [layer.sliding_window_size for layer in make_layers(case)]


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_windowed_layers_have_one_window_beside_full_layers_where_one_is_declared(mode: ForwardMode, tier: str) -> None:
    found = [windows_of(case) for case in generate(ALL.with_changes(windows={"layers": "one"}), mode, tier)]
    assert {0, 4, 11} <= {window for windows in found for window in windows}
    assert all(len(set(windows) - {-1}) <= 1 for windows in found)
    # A large batch has one layer.
    windowed = [windows for windows in found if max(windows) >= 0 and len(windows) > 1]
    assert all(-1 in windows for windows in windowed)
    assert {windows.index(-1) for windows in windowed} == {0, 1}, "either layer is the full one"


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_all_layers_have_the_same_window_where_that_is_declared(mode: ForwardMode, tier: str) -> None:
    found = [windows_of(case) for case in generate(ALL.with_changes(windows={"layers": "same"}), mode, tier)]
    assert {-1, 0, 4, 11} <= {windows[0] for windows in found}
    assert all(len(set(windows)) == 1 for windows in found)


def test_by_default_layers_differ_in_windows() -> None:
    found = [set(windows_of(case)) for case in core(ALL)]
    assert any(len(windows - {-1}) > 1 for windows in found)
    assert any(len(windows) > 1 and -1 in windows for windows in found)


@pytest.mark.parametrize(("word", "windows"), [("w4one", {4, -1}), ("w4same", {4})])
def test_how_windows_of_layers_differ_is_a_word_of_the_id(word: str, windows: set[int]) -> None:
    case = parse_case(f"decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-{word}-layers3from5-b4prod")
    assert set(windows_of(case)) == windows
    assert parse_case(case.id) == case
    names = {parameter.name for parameter, _ in chosen(case)}
    assert "other-window" not in names
    assert ("windowed-layer" in names) is (word == "w4one")


def test_the_other_cases_of_an_instance_have_its_windows() -> None:
    for case in core(ALL.with_changes(windows={"layers": "same"})):
        for other in co_residents(case, ALL.graph, 8) if case.multi_mode else []:
            assert make_layers(other) == make_layers(case)


@pytest.mark.parametrize("words", [{"window": -1, "layer_windows": "one"}, {"window": 4, "layer_windows": "all"}])
def test_layers_cannot_share_a_window_that_there_is_not(words: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"layer_windows '(one|all)': one of"):
        replace(DECODE, **words)


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_layers_have_the_usual_scaling_where_no_other_is_declared_and_mla_has_its_own(
    mode: ForwardMode, tier: str
) -> None:
    for case in generate(ALL.with_changes(options={"any_scaling": False}), mode, tier):
        usual = {layer.has_usual_scaling for layer in make_layers(case)}
        assert usual == {case.heads.family != "mla"}
        assert parse_case(case.id) == case


def test_by_default_no_two_layers_have_one_scaling_and_none_the_usual() -> None:
    for case in core(ALL):
        layers = make_layers(case)
        assert len({layer.scaling for layer in layers}) == len(layers)
        assert not any(layer.has_usual_scaling for layer in layers)


def test_mla_is_never_given_the_usual_scaling_of_its_rows() -> None:
    with pytest.raises(ValueError, match="MLA has its own scaling"):
        parse_case("decode-mla2-d32r16-bf16-p16-k5.9-shuffled-gauss-usualscale-b2prod")
