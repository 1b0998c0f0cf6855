"""What a row attended to, asked of a backend whose weights are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace as Of
from typing import Any

import pytest
import torch
from wrong_steps import observed, v1, wrong_at

from attn_testkit.cases.case import CODES, parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation
from attn_testkit.diagnosis import attended_keys
from attn_testkit.diagnosis.attended_keys import (
    _misrouted_heads,
    _place_to_ask,
    _read,
    _requests_to_ask,
    find_attended,
    ranges,
)
from attn_testkit.diagnosis.hints import Evidence
from attn_testkit.diagnosis.rerun import Rerunner
from attn_testkit.families.expected import expect
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.foreign_slots import PLACES
from attn_testkit.steps.schedule import Schedule, make_schedule

DECODE = "decode-gqa2x2-d32-fp32-p4-k3.9.40-shuffled-gauss{}-b4prod"
Weights = Callable[[int, int, int], float]
"""(request, KV token, head) -> weight."""


def schedule_of(words: str = "") -> Schedule:
    return make_schedule(parse_case(DECODE.format(words)))


class Backend:
    """Answers with given weights: one-hot values name the KV tokens, and places have a weight each."""

    def __init__(self, schedule: Schedule, weights: Weights, **places: float) -> None:
        self.schedule, self.weights, self.places, self.asked = schedule, weights, places, list[tuple[str, str, Any]]()

    def eager(self, schedule: Schedule, step: Any, *, pattern: str, unowned: Any = None) -> Observation:
        self.asked.append(("eager", pattern, unowned))
        return self._answer(pattern)

    def graph(self, schedule: Schedule, *, pattern: str, unowned: Any = None) -> Any:
        self.asked.append(("graph", pattern, unowned))
        return Of(replay_of=lambda step: self._answer(pattern))

    def _answer(self, pattern: str) -> Observation:
        step, dim = self.schedule.steps[0], self.schedule.case.head_dim
        out = torch.zeros(2, step.bs, 4, dim)
        if pattern == CODES:
            values = expect(self.schedule, step, CODES).data.values
            for request, head in itertools.product(range(step.bs), range(4)):
                weights = [self.weights(request, key, head) for key in range(step.lens[request])]
                mine = values[:, request, : len(weights), head // 2]
                out[:, request, head] = torch.einsum("s,lsd->ld", torch.tensor(weights).double(), mine)
            return observed(self.schedule, out)
        kind, request, rest = pattern.split(".")
        for head in range(4):
            if kind == "place":
                out[:, int(request), head] = self.places.get(rest, 0.0)
                continue
            for key in range(int(rest), min(int(rest) + dim, step.lens[int(request)])):
                out[:, int(request), head, key - int(rest)] = self.weights(int(request), key, head)
        return observed(self.schedule, out)


def even(lens: list[int], of: Callable[[int, int], bool] = lambda key, head: True) -> Weights:
    return lambda request, key, head: 1 / lens[request] if of(key, head) else 0.0


def found(comparison: Comparison, backend: Backend, in_graph: bool = False) -> Any:
    return find_attended(backend, backend.schedule, comparison, in_graph=in_graph)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_right_row_is_asked_in_as_many_runs_as_its_tokens_need(in_graph: bool) -> None:
    schedule = schedule_of()
    backend = Backend(schedule, even(schedule.steps[0].lens))
    reported = found(wrong_at(schedule, (0, 2, 1)), backend, in_graph)
    assert reported.right
    assert (reported.request, reported.row, reported.head, reported.heads, reported.length, reported.window) == (
        2,
        0,
        1,
        (),
        41,
        -1,
    )
    assert reported.total == pytest.approx(1)
    assert reported.text == "request 2 attended to the right KV tokens, 0..40"
    how = "graph" if in_graph else "eager"
    assert backend.asked[:2] == [(how, "probe.2.0", 0.0), (how, "probe.2.32", 0.0)]
    assert {pattern for _, pattern, _ in backend.asked[2:]} == {f"place.2.{name}" for name in PLACES}, (
        "beside 41 tokens, one more would not show in the sum"
    )


@pytest.mark.parametrize(("tokens", "places"), [(25, 0), (26, len(PLACES))])
def test_a_slot_too_many_is_asked_for_where_it_weighs_less_than_rounding(tokens: int, places: int) -> None:
    schedule = make_schedule(parse_case(f"decode-gqa2x2-d32-fp32-p4-k{tokens - 1}.9-shuffled-gauss-b2prod"))
    backend = Backend(schedule, even(schedule.steps[0].lens))
    assert found(wrong_at(schedule, (0, 0, 1)), backend).right
    assert sum(pattern.startswith("place") for _, pattern, _ in backend.asked) == places


def test_weight_that_went_elsewhere_is_asked_for_where_some_is_missing() -> None:
    schedule = schedule_of()
    lens = schedule.steps[0].lens
    backend = Backend(
        schedule, even(lens, lambda key, head: key < 20), tail=0.3, others=0.2, page0=0.0122, unowned=0.0121
    )  # half a token of 41 is 0.01219
    reported = found(wrong_at(schedule, (0, 2, 1)), backend)
    assert reported.elsewhere == pytest.approx({"tail": 0.3, "others": 0.2, "page0": 0.0122})
    assert (sorted(reported.used), sorted(reported.wanted)) == (list(range(20)), list(range(41)))
    assert reported.total == pytest.approx(20 / 41 + 0.5122)
    assert "30% of its weight went to slots after its last" in reported.text
    assert "1.2% of its weight went to page 0" in reported.text
    assert reported.text.startswith("request 2 attended to KV tokens 0..19, expected 0..40")


@pytest.mark.parametrize(("layer", "scale"), [(0, 0.5), (1, 2.0)])
def test_what_no_request_owns_is_multiplied_by_the_reader_of_an_fp8_pool(layer: int, scale: float) -> None:
    case = DECODE.format("-kvfp8e4m3").replace("fp32", "bf16")
    schedule = make_schedule(parse_case(case))
    backend = Backend(schedule, even(schedule.steps[0].lens, lambda key, head: key < 20), tail=0.1, others=0.1)
    reported = found(wrong_at(schedule, (layer, 2, 1)), backend)
    assert reported.elsewhere == pytest.approx({"tail": 0.1 / scale, "others": 0.1})


def test_a_place_that_the_backend_will_not_say_has_no_weight() -> None:
    schedule = schedule_of()
    backend = Backend(schedule, even(schedule.steps[0].lens, lambda key, head: key < 20), tail=torch.nan, page0=0.3)
    reported = found(wrong_at(schedule, (0, 2, 1)), backend)
    assert reported.elsewhere == pytest.approx({"page0": 0.3})


def test_heads_that_attend_to_others_are_named_where_the_rest_is_right() -> None:
    schedule = schedule_of()
    lens = schedule.steps[0].lens
    reported = found(
        wrong_at(schedule, (0, 2, 1)), Backend(schedule, even(lens, lambda key, head: key > 5 or head != 1))
    )
    assert (reported.head, reported.heads) == (1, (1,))
    assert reported.text.startswith("request 2 head 1 attended to KV tokens 6..40, expected 0..40")
    reported = found(wrong_at(schedule, (0, 2, 1)), Backend(schedule, even(lens, lambda key, head: key > 5)))
    assert reported.heads == ()


def test_another_request_is_asked_where_the_headlines_has_hardly_a_token_or_is_right() -> None:
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k1.2.9.20-shuffled-gauss-b4prod"))
    assert schedule.steps[0].lens == [2, 3, 10, 21]
    assert _requests_to_ask(wrong_at(schedule, (0, 0, 0))) == [0]
    assert _requests_to_ask(wrong_at(schedule, (0, 0, 0), (0, 1, 0))) == [1]
    assert _requests_to_ask(wrong_at(schedule, (0, 3, 0, 0), (0, 2, 0, 0), value=9.0)) in ([3, 2], [2])
    assert _requests_to_ask(wrong_at(schedule)) == []
    three = wrong_at(schedule, (0, 1, 0), (0, 2, 0))
    three.out[0, 0, 0] += 99
    assert _requests_to_ask(Comparison(observed(schedule, three.out), three.expected)) == [2], "1 has a prefix of two"
    lens = schedule.steps[0].lens
    comparison = wrong_at(schedule, (0, 2, 0))
    comparison.out[0, 3, 0] += 99
    fresh = Comparison(observed(schedule, comparison.out), comparison.expected)
    assert _requests_to_ask(fresh) == [3, 2]
    only_two = lambda request, key, head: 0.0 if request == 2 and key < 3 else 1 / lens[request]  # noqa: E731
    assert found(fresh, Backend(schedule, only_two)).request == 2, "request 3 attended to the right ones"
    assert found(fresh, Backend(schedule, even(lens))).request == 3
    silent = Backend(schedule, lambda *_: torch.nan)
    assert found(fresh, silent) is None


def test_tokens_that_any_row_of_a_request_sees_are_counted() -> None:
    for prefix, asked in ((2, 0), (3, 1)):
        case = f"target-verify-gqa2x2-d32-fp32-p4-k1.{prefix}-t0.0.1-shuffled-gauss-b2prod"
        schedule = make_schedule(parse_case(case))
        comparison = wrong_at(schedule, (0, 5, 0))
        comparison.out[0, 0, 0] += 99
        assert comparison.expected.data.visible[0].sum(1).tolist() == [2, 3, 3, 4], "its first row has hardly a token"
        assert _requests_to_ask(Comparison(observed(schedule, comparison.out), comparison.expected)) == [asked]


def test_long_requests_are_asked_at_both_ends() -> None:
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k9.300-shuffled-gauss-b2prod"))
    lens = schedule.steps[0].lens
    backend = Backend(schedule, even(lens), tail=0.5)
    reported = found(wrong_at(schedule, (0, 1, 0)), backend)
    assert [p for _, p, _ in backend.asked if p.startswith("probe")] == [
        f"probe.1.{n}" for n in (0, 32, 64, 224, 256, 288)
    ]
    assert (reported.not_asked[0], reported.not_asked[-1], reported.total) == (96, 223, None)
    assert reported.normalised
    assert reported.elsewhere == {"tail": 0.5}
    assert reported.text.startswith(
        "request 1 attended to the right KV tokens of those examined, 0..95, 224..300 (96..223 not examined)"
    )
    exact = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k9.191-shuffled-gauss-b2prod"))
    assert found(wrong_at(exact, (0, 1, 0)), Backend(exact, even(exact.steps[0].lens))).not_asked == []


LONG = "decode-gqa2x2-d32-fp32-p4-k9.300-shuffled-gauss-b2prod"


def test_of_a_long_request_codes_name_the_few_tokens_that_are_wrong_in_one_run() -> None:
    schedule = make_schedule(parse_case(LONG))
    lens = schedule.steps[0].lens
    backend = Backend(schedule, lambda request, key, head: 0.0 if key in (150, 151) else 1 / (lens[request] - 2))
    reported = found(wrong_at(schedule, (0, 1, 0)), backend)
    assert [pattern for _, pattern, _ in backend.asked] == [CODES, *(f"place.1.{name}" for name in PLACES)]
    assert reported.text == "request 1 attended to KV tokens 0..149, 152..300, expected 0..300"
    assert (reported.not_asked, reported.head, reported.heads, reported.right) == ([], 0, (), False)


@pytest.mark.parametrize(("weight", "said"), [(0.49 / 301, False), (0.51 / 301, True)])
def test_what_stands_in_the_place_of_a_token_that_codes_miss_is_asked_for(weight: float, said: bool) -> None:
    schedule = make_schedule(parse_case(LONG))
    backend = Backend(schedule, lambda request, key, head: 0.0 if key == 300 else 1 / 300, page0=weight)
    reported = found(wrong_at(schedule, (0, 1, 0)), backend)
    assert ("page0" in reported.elsewhere) is said
    assert sorted(reported.wanted - reported.used) == [300]


def test_where_codes_find_a_token_twice_no_place_is_asked_for() -> None:
    schedule = make_schedule(parse_case(LONG))
    backend = Backend(schedule, lambda request, key, head: (2 if key == 7 else 1) / 302, page0=1.0)
    reported = found(wrong_at(schedule, (0, 1, 0)), backend)
    assert [pattern for _, pattern, _ in backend.asked] == [CODES]
    assert (sorted(reported.doubled), reported.elsewhere) == ([7], {})


def test_what_codes_cannot_name_is_asked_token_by_token() -> None:
    schedule = make_schedule(parse_case(LONG))
    lens = schedule.steps[0].lens
    # As if every other token had twice its weight.
    backend = Backend(schedule, lambda request, key, head: (key % 2) * 2 / lens[request])
    reported = found(wrong_at(schedule, (0, 1, 0)), backend)
    assert len(backend.asked) > 6
    assert 1 in reported.used
    assert 2 not in reported.used


@pytest.mark.parametrize(
    ("length", "wanted", "starts"),
    [
        (1, range(1), [0]),
        (192, range(192), [0, 32, 64, 96, 128, 160]),
        (193, range(193), [0, 32, 64, 128, 160, 192]),
        (400, range(200, 211), [0, 32, 192, 352, 384]),
        (400, range(192, 211), [0, 32, 160, 192, 352, 384]),
        (400, range(200, 224), [0, 32, 192, 224, 352, 384]),
        (400, range(100, 300), [0, 32, 96, 288, 352, 384]),
        (400, (), [0, 32, 64, 320, 352, 384]),
    ],
)
def test_what_a_row_should_attend_to_is_asked_about_from_edge_to_edge(
    length: int, wanted: Any, starts: list[int]
) -> None:
    """A window of 12 in a long request would be missed by whoever asks at the request's ends."""
    found = attended_keys._starts(length, 32, frozenset(wanted))
    assert len(found) <= 6
    assert set(starts) <= set(found)
    assert found == sorted(set(found))


def test_own_are_tokens_of_the_request_alone() -> None:
    schedule = schedule_of()
    lens = schedule.steps[0].lens
    fewer = lambda request, key, head: 1 / 20 if key < 20 else 0.0  # noqa: E731
    assert found(wrong_at(schedule, (0, 2, 1)), Backend(schedule, fewer)).own
    assert not found(wrong_at(schedule, (0, 2, 1)), Backend(schedule, even(lens, lambda key, head: key < 20))).own
    assert not found(wrong_at(schedule, (0, 2, 1)), Backend(schedule, lambda *_: 0.0, tail=1.0)).own


def test_with_sinks_nobody_knows_the_sum() -> None:
    schedule = schedule_of("-sink")
    reported = found(wrong_at(schedule, (0, 2, 1)), Backend(schedule, even(schedule.steps[0].lens)))
    assert (reported.total, reported.right) == (None, True)


def test_the_layer_that_sees_most_is_asked() -> None:
    schedule = schedule_of("-w4")
    windows = [layer.sliding_window_size for layer in attended_keys.make_layers(schedule.case)]
    most = max(range(2), key=lambda i: windows[i] if windows[i] >= 0 else 10**6)
    reported = found(wrong_at(schedule, (0, 2, 1), (1, 2, 3)), Backend(schedule, even(schedule.steps[0].lens)))
    assert reported.window == windows[most]
    assert reported.head == (1, 3)[most]
    narrow = found(wrong_at(schedule, (1 - most, 2, 1)), Backend(schedule, even(schedule.steps[0].lens)))
    assert narrow.window == windows[1 - most] == 4
    assert sorted(narrow.wanted) == list(range(36, 41))


def test_the_first_wrong_row_of_the_request_is_asked_in_the_layer_and_head_that_is_wrong() -> None:
    schedule = v1()
    comparison = wrong_at(schedule, (1, 4, 3, 7), (0, 0, 1))
    assert comparison.expected.data.row_request.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert _place_to_ask(schedule, comparison, 1) == (1, 4, 3)
    assert _place_to_ask(schedule, comparison, 0) == (0, 0, 1)


@pytest.mark.parametrize(("windows", "layer"), [((0, -1), 1), ((-1, 0), 0), ((0, 3), 1), ((4, 3), 0), ((-1, -1), 0)])
def test_a_layer_without_a_window_sees_most_and_one_of_the_row_alone_least(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int, int], layer: int
) -> None:
    monkeypatch.setattr(attended_keys, "make_layers", lambda case: [Of(sliding_window_size=n) for n in windows])
    schedule = schedule_of()
    assert _place_to_ask(schedule, wrong_at(schedule, (0, 2, 1), (1, 2, 1)), 2)[0] == layer


def test_nan_is_asked_about_before_other_wrong_values() -> None:
    schedule = schedule_of()
    comparison = wrong_at(schedule, (0, 2, 1))
    comparison.out[1, 2, 3] = torch.nan
    fresh = Comparison(observed(schedule, comparison.out), comparison.expected)
    assert found(fresh, Backend(schedule, even(schedule.steps[0].lens))).head == 3


def test_the_first_wrong_row_of_the_layer_that_sees_most_is_asked_about() -> None:
    schedule = make_schedule(parse_case("draft-extend-gqa2x2-d32-fp32-p4-k5.9-n3a3x2-shuffled-gauss-w4one-b2prod"))
    windowed = [layer.sliding_window_size >= 0 for layer in make_layers(schedule.case)].index(True)
    whole = 1 - windowed
    comparison = wrong_at(schedule, (windowed, 0, 1), (whole, 2, 3), (whole, 1, 2))
    assert _place_to_ask(schedule, comparison, 0) == (whole, 1, 2), "row 0 is wrong behind a window alone"
    assert _place_to_ask(schedule, wrong_at(schedule, (windowed, 0, 1)), 0) == (windowed, 0, 1)


@pytest.mark.parametrize(
    ("weights", "used", "doubled"),
    [
        ({0: 0.5, 1: 0.5}, {0, 1}, set()),
        ({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, {0, 1, 2, 3}, {1, 2, 3}),
        ({0: 0.5, 1: 0.01}, {0}, set()),
        ({0: 0.5, 1: 0.0101}, {0, 1}, {0}),
        ({0: 0.4, 9: 0.1}, {0}, set()),
        ({0: 0.4, 9: 0.101}, {0, 9}, {0}),
        ({0: 0.25, 1: 0.25, 2: 0.5}, {0, 1, 2}, {2}),
        ({0: 0.25, 1: 0.25, 2: 0.3125}, {0, 1, 2}, set()),
        ({0: 0.25, 1: 0.25, 2: 0.3126}, {0, 1, 2}, {2}),
        ({0: 0.2, 1: 0.3, 2: 0.3, 3: 0.3}, {0, 1, 2, 3}, {1, 2, 3}),
        ({0: 1.1e-6, 1: 1e-6}, {0}, set()),
        ({0: 1e-6, 1: 0.0}, set(), set()),
        ({}, set(), set()),
    ],
)
def test_what_counts_as_used_and_as_counted_twice(weights: dict[int, float], used: set[int], doubled: set[int]) -> None:
    reported = _read(1, 2, weights, frozenset(range(9)), {"tail": 0.1}, 0.9)
    assert (reported.used, reported.doubled) == (used, doubled)
    assert (reported.request, reported.row, reported.looked_at, reported.length, reported.total) == (
        1,
        2,
        set(weights),
        len(weights),
        0.9,
    )
    assert reported.wanted == set(weights) - {9}
    assert (reported.head, reported.heads, reported.window) == (0, (), -1), "until somebody says which head was asked"
    assert not reported.right
    assert ("counted more than once" in reported.text) is bool(doubled)
    assert not doubled or f"; KV tokens {ranges(sorted(doubled))} counted more than once" in reported.text


def test_heads_are_astray_where_others_are_not() -> None:
    wanted = torch.tensor([[True, True, False]])
    right, wrong, small = [0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.5, 0.5, 0.125]
    assert _misrouted_heads(torch.tensor([right, wrong, small]), wanted) == (1,)
    assert _misrouted_heads(torch.tensor([right, [0.5, 0.5, 0.126]]), wanted) == (1,)
    assert _misrouted_heads(torch.tensor([wrong, wrong]), wanted) == ()
    assert _misrouted_heads(torch.tensor([right, [0.0, 0.0, 0.0]]), wanted) == (1,)
    tiny = torch.tensor([wrong, [1.1e-6, 1.1e-6, 0.9e-6], [0.9e-6, 0.9e-6, 0.0]])
    assert _misrouted_heads(tiny, wanted) == (0, 2), "what is so small is not looked at"
    of_each = torch.tensor([[True, True, False], [True, False, True]])
    assert _misrouted_heads(torch.tensor([right, right]), of_each) == (1,), "each head has tokens of its own"


def test_ranges_of_tokens() -> None:
    assert (ranges([]), ranges([3]), ranges([0, 1, 2, 7])) == ("none", "3", "0..2, 7")
    assert ranges(range(0, 12, 2)) == "0, 2, 4, 6, 8, 10"
    assert ranges(range(0, 14, 2)) == "0, 2, 4, 6, 8, 10 and 1 more runs"
    assert ranges(range(0, 16, 2)) == "0, 2, 4, 6, 8, 10 and 2 more runs"


def test_evidence_says_nothing_that_was_not_found() -> None:
    schedule = schedule_of()
    plain = Evidence(schedule, wrong_at(schedule, (0, 2, 1)), None, [], in_graph=False)
    assert (plain.misrouted, plain.right_when_fresh, plain.reads_foreign, plain.before) == ((), False, False, None)
    assert replace(plain, right_when_fresh=True).before is schedule.steps[0]
    alone = replace(plain, right_when_alone=True)
    assert alone.before is None, "it is the first"
    assert len(schedule.steps) > 2
    later = replace(alone, comparison=Comparison(replace(plain.observed, step=schedule.steps[2]), plain.expected))
    assert later.before is schedule.steps[1]
    assert (plain.wrong, plain.rows, plain.lens) == ([2], [2], [4, 10, 41])


def test_a_rerunner_is_what_is_asked() -> None:
    assert {"eager", "graph"} <= set(vars(Rerunner)), "what these tests stand in for"
