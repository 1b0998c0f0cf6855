"""What a case decides without saying so: every value of every choice meets every value of the others."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.backends.torch_native_ranks import TorchNativeRanksBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import Case, Heads, parse_case
from attn_testkit.cases.derived_parameters import DERIVED_PARAMETERS, DerivedParameter, chosen, derived
from attn_testkit.cases.rows import Decode
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.data import draft_topk, make_layers
from attn_testkit.steps.schedule import make_schedule

CAPABILITIES = TorchNativeBackend.capabilities.with_changes(lse=None)
"""What the first release declared, and what came with modes: cases with keys in parts would follow these."""
CORE = [case for mode in ForwardMode for case in generate(CAPABILITIES, mode, "core")]
OF_FORMATS = [*generate(TorchNativeFormatsBackend.capabilities, ForwardMode.DECODE, "core")]
STATES = [case for mode in ForwardMode for case in generate(TorchNativeStateBackend.capabilities, mode, "core")]
OF_STATES = {"rows-behind"}
"""Choices that only layers with a state have."""
RANKS = [case for mode in ForwardMode for case in generate(TorchNativeRanksBackend.capabilities, mode, "core")]
OF_RANKS = {"rank-order"}
"""Choices that only ranks with pools of their own have."""
OF_SOME = {**dict.fromkeys(OF_STATES, STATES), **dict.fromkeys(OF_RANKS, RANKS)}
CLOSED = [each for each in DERIVED_PARAMETERS if each.values and each.name not in OF_SOME]
ENOUGH = 5.0
"""A pair of values is looked for where so many cases should have it."""
CERTAIN = 6.0
"""Where a case must have it. Of 20 cases that should have it 5 times, one set in 300 has none by chance, and there are
hundreds of pairs."""

FEW_CASES = {
    ("kv-memory", "draft-topk"): "draft-extend has no such k and v",
    ("kv-memory", "num-tokens-per-req"): "speculative modes have no such k and v, but in mixed cases",
    ("capped-layer", "last-chunk"): "a soft cap in a few of the cases in chunks, of one mode",
    ("shared-prefixes", "draft-topk"): "one layout of five in one mode",
    ("shared-prefixes", "chunked-requests"): "one layout of five in one mode",
    ("shared-prefixes", "last-chunk"): "one layout of five in one mode",
    ("shared-prefixes", "layout-turns"): "requests that share pages do so in every step",
    ("draft-topk", "chunked-requests"): "draft-extend has no chunks",
    ("draft-topk", "last-chunk"): "draft-extend has no chunks",
    ("chunked-requests", "num-tokens-per-req"): "speculative modes have no chunks, but in mixed cases",
    ("last-chunk", "num-tokens-per-req"): "speculative modes have no chunks, but in mixed cases",
}
FEW_OF_ONE = {
    "tiles-of-zeros": "no pool of these cases has rows with scales",
    "draft-depth": "one mode, and accepted counts that a tree less deep than a chain allows",
    "narrowest-layer": "layers whose options vary, in half of the array",
    "richest-layer": "layers whose options vary, in half of the array",
}
"""Choices that too few cases have for most pairs."""


def pairs(
    a: DerivedParameter, b: DerivedParameter, cases: list[Case] = CORE
) -> tuple[Counter[tuple[int, int]], dict[tuple[int, int], float]]:
    """How often core has each pair of values, and how often it should."""
    both = [case for case in cases if a.applies(case) and b.applies(case)]
    counts = Counter((case.derived(a.name), case.derived(b.name)) for case in both)
    return counts, {
        (i, j): len(both) * x.weight * y.weight / (a.total * b.total)
        for i, x in enumerate(a.values)
        for j, y in enumerate(b.values)
    }


@pytest.mark.parametrize(("a", "b"), [*combinations(CLOSED, 2)], ids=lambda parameter: parameter.name)
def test_every_value_of_a_choice_meets_every_value_of_another_about_as_often_as_chance_has_it(
    a: DerivedParameter, b: DerivedParameter
) -> None:
    counts, expected = pairs(a, b)
    enough = {values: mean for values, mean in expected.items() if mean >= ENOUGH}
    listed = (a.name, b.name) in FEW_CASES
    if a.name not in FEW_OF_ONE and b.name not in FEW_OF_ONE:
        assert bool(enough) is not listed, f"{sum(counts.values())} cases have both: should FEW_CASES list the pair?"
    for values, mean in enough.items():
        assert counts[values] >= 1 or mean < CERTAIN, f"{a.name} and {b.name} never have the values {values}"
        assert abs(counts[values] - mean) < 4 * mean**0.5, f"{values}: {counts[values]} times, expected {mean:.1f}"


@pytest.mark.parametrize("name", ["grad-mode", "qkv-memory", "pool-address", "second-step-memory"])
@pytest.mark.parametrize("own", sorted(OF_SOME))
def test_every_value_of_a_choice_of_some_cases_meets_every_value_of_another(own: str, name: str) -> None:
    by_name = {parameter.name: parameter for parameter in DERIVED_PARAMETERS}
    counts, expected = pairs(by_name[own], by_name[name], OF_SOME[own])
    assert not any(by_name[own].applies(case) for case in CORE)
    for values, mean in expected.items():
        assert counts[values] >= 1 or mean < CERTAIN
        assert abs(counts[values] - mean) < 4 * mean**0.5, f"{values}: {counts[values]} times, expected {mean:.1f}"


@pytest.mark.parametrize("parameter", CLOSED, ids=lambda parameter: parameter.name)
def test_core_has_every_value_of_every_choice(parameter: DerivedParameter) -> None:
    cases = OF_FORMATS if parameter.name == "tiles-of-zeros" else CORE
    counts = Counter(case.derived(parameter.name) for case in cases if parameter.applies(case))
    assert set(counts) == set(range(len(parameter.values)))


def test_an_eager_step_before_graphs_meets_a_window_in_both_layers() -> None:
    """One bit decided both, once, and they never met."""
    met = [
        case
        for case in CORE
        if case.window >= 0
        and not case.layers.varied
        and case.layers.count > 1
        and case.derived("eager-before-graphs")
        and case.derived("other-window")
    ]
    assert all(layer.sliding_window_size >= 0 for case in met for layer in make_layers(case))
    assert len(met) > 10


def test_a_choice_is_a_function_of_the_id_and_of_its_own_name() -> None:
    case = Case(Decode(), Heads("gqa", 8, 2), 64, "bf16", 16, (0, 15, 15, 17), bucket=6, padding="nan")
    seeds = [case.with_seed(seed) for seed in range(64)]
    values = {
        parameter.name: [derived(c, parameter.name, None if parameter.values else 2) for c in seeds]
        for parameter in DERIVED_PARAMETERS
        if parameter.applies(case)
    }
    assert len(set(map(tuple, values.values()))) == len(values), "no two choices follow each other"
    again = [parse_case(c.id).derived("grad-mode") for c in seeds]
    assert again == values["grad-mode"]
    # Stored failures are rebuilt from their ids: what an id decides is as stable as the id.
    assert "".join(map(str, again[:16])) == "1100110010100110"


def test_weights_are_what_the_table_says() -> None:
    case = Case(Decode(), Heads("mha", 2, 2), 64, "bf16", 16, (5, 9), bucket=2)
    counts = Counter(case.with_seed(seed).derived("isolated-request") for seed in range(4000))
    assert [round(counts[i] / 500, 0) for i in range(4)] == [5, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "n", "message"),
    [
        ("grad-mod", None, r"no choice 'grad-mod' \(did you mean 'grad-mode'\?\); there are: grad-mode, qkv-memory"),
        ("grad-mode", 3, "'grad-mode' has 2 values, but was read with n = 3"),
        ("undeclared", None, "'undeclared' needs the number of its values, at least 1; it was read with n = None"),
        ("undeclared", 0, "was read with n = 0"),
        ("windowed-layer", None, "'windowed-layer' does not apply to decode-mha2-"),
        ("draft-topk", None, "'draft-topk' does not apply"),
    ],
)
def test_what_cannot_be_picked_is_said(name: str, n: int | None, message: str) -> None:
    case = Case(Decode(), Heads("mha", 2, 2), 64, "bf16", 16, (5, 9), bucket=2)
    with pytest.raises(ValueError, match=message):
        case.derived(name, n)
    assert case.derived("grad-mode", 2) == case.derived("grad-mode")
    assert {case.with_seed(seed).derived("undeclared", 3) for seed in range(40)} == {0, 1, 2}


def test_every_choice_is_read_somewhere_and_no_bit_of_a_seed_is() -> None:
    root = Path(__file__).resolve().parents[2]
    code = "".join(
        path.read_text() for room in ("attn_testkit", "runner_modes") for path in (root / room).rglob("*.py")
    )
    for parameter in DERIVED_PARAMETERS:
        assert f'derived("{parameter.name}"' in code or parameter.name == "second-step", parameter.name
    assert not re.findall(r"\.digest *(?:>>|&|%|//)", code), "a seed is the digest; a choice is not a bit of it"


def test_what_a_choice_says_is_what_is_built() -> None:
    for case in CORE:
        values = {parameter.name: case.derived(parameter.name) for parameter, value in chosen(case) if value}
        schedule, layers = make_schedule(case), make_layers(case)
        longest = max(len(r.table_slots) for step in (*schedule.steps, schedule.oversized) for r in step.requests)
        room = schedule.max_context_len - longest
        assert case.inference_mode == bool(values["grad-mode"])
        assert schedule.second.stored == bool(values.get("second-step-stored"))
        assert schedule.second.other_strides == bool(values["second-step-memory"])
        if values["context-room"]:
            assert 0 <= room < case.width
        else:
            assert room > case.page_size
            assert schedule.max_context_len % case.page_size == 0
        if case.layers.varied:
            by_layer = [(layer.sliding_window_size, layer.logit_cap > 0) for layer in layers]
            # Windows go in four turns. Only one is wider than 4000, so the fourth has that of the first.
            wraps = case.window == 4000
            assert len(set(by_layer)) >= 1 + (case.window >= 0) + bool(case.logit_cap) - wraps
            if "narrowest-layer" in values:
                windows = [window for window, _ in by_layer]
                assert values["narrowest-layer"] == 3 or windows[values["narrowest-layer"]] == case.window
                assert min({case.window, *windows} - {-1}) == case.window
            if "richest-layer" in values and values["richest-layer"] < 3:
                assert by_layer[values["richest-layer"]][1]
            continue
        if case.window >= 0 and len(layers) > 1:
            own, other = values["windowed-layer"], 1 - values["windowed-layer"]
            assert layers[own].sliding_window_size == case.window
            assert layers[other].sliding_window_size == (2 * case.window + 3 if values["other-window"] else -1)
        if case.logit_cap and len(layers) > 1:
            assert [bool(layer.logit_cap) for layer in layers].index(True) == values["capped-layer"]
        if "draft-depth" in values:
            assert (schedule.spec_steps < case.width - 1) == bool(values["draft-depth"])
        assert draft_topk(case) == {None: 0, 0: 1, 1: 3}[values.get("draft-topk")]


def test_the_second_eager_step_is_the_one_that_was_chosen() -> None:
    labels = next(parameter for parameter in DERIVED_PARAMETERS if parameter.name == "second-step").values
    for case in CORE:
        # Requests with an encoder have other encoders in the second step.
        schedule, wanted = make_schedule(case), labels[0 if case.encoder_len else case.derived("second-step")].words
        steps = {step.label: step for step in (*schedule.steps, schedule.oversized)}
        equal = len(set(case.prefixes)) == 1
        if wanted == labels[0].words:
            assert schedule.second.index == len(schedule.steps) + 1
            decoders = [[r.decoder_prefix + r.new for r in s.requests] for s in (schedule.second, schedule.steps[0])]
            assert decoders[0] == decoders[1]
        else:
            expected = steps.get(wanted, steps["same lengths, other requests"])
            assert replace(schedule.second, name=expected.name, stored=False).requests is expected.requests
            # A batch of many requests has fewer steps.
            assert wanted in steps or equal or case.bucket > 64
