"""What a row attended to, asked of a backend whose weights are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace as Of
from typing import Any

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.data import make_step_data
from attn_testkit.cases.schedule import Schedule, make_schedule
from attn_testkit.checks import Judgement
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.diagnosis import attended_keys
from attn_testkit.diagnosis.attended_keys import (
    _heads_astray,
    _place_to_ask,
    _read,
    _requests_to_ask,
    find_attended,
    ranges,
)
from attn_testkit.diagnosis.hints import Evidence
from attn_testkit.diagnosis.hints.numbers import right_keys
from attn_testkit.diagnosis.rerun import Rerunner
from attn_testkit.diagnosis.swapped_rows import find_swapped
from attn_testkit.oracle.expect import expect

DECODE = "decode-gqa2x2-d32-fp32-p4-k3.9.40-shuffled-gauss{}-b4prod"
Weights = Callable[[int, int, int], float]
"""(request, KV token, head) -> weight."""


def schedule_of(words: str = "") -> Schedule:
    return make_schedule(parse_case(DECODE.format(words)))


def observed(schedule: Schedule, out: torch.Tensor, replay: bool = False) -> Observation:
    copies = copies_of([("attention", str(i), each) for i, each in enumerate(out.float().unbind(0))])
    return Observation(schedule, schedule.steps[0], "", copies, replay=replay)


def wrong_at(schedule: Schedule, *places: tuple[int, ...], value: float = 9.0) -> Judgement:
    """Wrong in every value of (layer, row, head)."""
    expected = expect(schedule, schedule.steps[0])
    out = expected.attention.float().clone()
    for place in places:
        out[place] += value
    return Judgement(observed(schedule, out), expected)


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


def found(judgement: Judgement, backend: Backend, in_graph: bool = False) -> Any:
    return find_attended(backend, backend.schedule, judgement, in_graph=in_graph)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_right_row_is_asked_in_as_many_runs_as_its_tokens_need(in_graph: bool) -> None:
    schedule = schedule_of()
    backend = Backend(schedule, even(schedule.steps[0].lens))
    told = found(wrong_at(schedule, (0, 2, 1)), backend, in_graph)
    assert told.right
    assert (told.request, told.row, told.head, told.heads, told.length, told.window) == (2, 0, 1, (), 41, -1)
    assert told.total == pytest.approx(1)
    assert told.text == "request 2 attended to the right KV tokens, 0..40"
    how = "graph" if in_graph else "eager"
    assert backend.asked == [(how, "probe.2.0", 0.0), (how, "probe.2.32", 0.0)], "no weight is missing"


def test_weight_that_went_elsewhere_is_asked_for_where_some_is_missing() -> None:
    schedule = schedule_of()
    lens = schedule.steps[0].lens
    backend = Backend(
        schedule, even(lens, lambda key, head: key < 20), tail=0.3, others=0.2, page0=0.021, unowned=0.019
    )
    told = found(wrong_at(schedule, (0, 2, 1)), backend)
    assert told.elsewhere == pytest.approx({"tail": 0.3, "others": 0.2, "page0": 0.021})
    assert (sorted(told.used), sorted(told.wanted)) == (list(range(20)), list(range(41)))
    assert told.total == pytest.approx(20 / 41 + 0.521)
    assert "30% of its weight went to slots behind its last" in told.text
    assert told.text.startswith("request 2 attended to KV tokens 0..19, expected 0..40")


@pytest.mark.parametrize(("layer", "scale"), [(0, 0.5), (1, 2.0)])
def test_what_no_request_owns_is_multiplied_by_the_reader_of_an_fp8_pool(layer: int, scale: float) -> None:
    case = DECODE.format("-kvfp8e4m3").replace("fp32", "bf16")
    schedule = make_schedule(parse_case(case))
    backend = Backend(schedule, even(schedule.steps[0].lens, lambda key, head: key < 20), tail=0.1, others=0.1)
    told = found(wrong_at(schedule, (layer, 2, 1)), backend)
    assert told.elsewhere == pytest.approx({"tail": 0.1 / scale, "others": 0.1})


def test_a_place_that_the_backend_will_not_say_has_no_weight() -> None:
    schedule = schedule_of()
    backend = Backend(schedule, even(schedule.steps[0].lens, lambda key, head: key < 20), tail=torch.nan, page0=0.3)
    told = found(wrong_at(schedule, (0, 2, 1)), backend)
    assert told.elsewhere == pytest.approx({"page0": 0.3})


def test_heads_that_attend_to_others_are_named_where_the_rest_is_right() -> None:
    schedule = schedule_of()
    lens = schedule.steps[0].lens
    told = found(wrong_at(schedule, (0, 2, 1)), Backend(schedule, even(lens, lambda key, head: key > 5 or head != 1)))
    assert (told.head, told.heads) == (1, (1,))
    assert told.text.startswith("request 2 head 1 attended to KV tokens 6..40, expected 0..40")
    told = found(wrong_at(schedule, (0, 2, 1)), Backend(schedule, even(lens, lambda key, head: key > 5)))
    assert told.heads == ()


def test_another_request_is_asked_where_the_headlines_has_hardly_a_token_or_is_right() -> None:
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k1.2.9.20-shuffled-gauss-b4prod"))
    assert schedule.steps[0].lens == [2, 3, 10, 21]
    assert _requests_to_ask(wrong_at(schedule, (0, 0, 0))) == [0]
    assert _requests_to_ask(wrong_at(schedule, (0, 0, 0), (0, 1, 0))) == [1]
    assert _requests_to_ask(wrong_at(schedule, (0, 3, 0, 0), (0, 2, 0, 0), value=9.0)) in ([3, 2], [2])
    assert _requests_to_ask(wrong_at(schedule)) == []
    three = wrong_at(schedule, (0, 1, 0), (0, 2, 0))
    three.out[0, 0, 0] += 99
    assert _requests_to_ask(Judgement(observed(schedule, three.out), three.expected)) == [1]
    lens = schedule.steps[0].lens
    judgement = wrong_at(schedule, (0, 2, 0))
    judgement.out[0, 3, 0] += 99
    fresh = Judgement(observed(schedule, judgement.out), judgement.expected)
    assert _requests_to_ask(fresh) == [3, 2]
    only_two = lambda request, key, head: 0.0 if request == 2 and key < 3 else 1 / lens[request]  # noqa: E731
    assert found(fresh, Backend(schedule, only_two)).request == 2, "request 3 attended to the right ones"
    assert found(fresh, Backend(schedule, even(lens))).request == 3
    silent = Backend(schedule, lambda *_: torch.nan)
    assert found(fresh, silent) is None


def test_tokens_that_any_row_of_a_request_sees_are_counted() -> None:
    schedule = make_schedule(parse_case("target-verify-gqa2x2-d32-fp32-p4-k1.9-t0.0.1-shuffled-gauss-b2prod"))
    judgement = wrong_at(schedule, (0, 5, 0))
    judgement.out[0, 0, 0] += 99
    assert judgement.expected.data.visible[0].sum(1).tolist() == [2, 3, 3, 4], "its first row has hardly a token"
    assert _requests_to_ask(Judgement(observed(schedule, judgement.out), judgement.expected)) == [0]


def test_long_requests_are_asked_at_both_ends() -> None:
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k9.300-shuffled-gauss-b2prod"))
    lens = schedule.steps[0].lens
    backend = Backend(schedule, even(lens), tail=0.5)
    told = found(wrong_at(schedule, (0, 1, 0)), backend)
    assert [p for _, p, _ in backend.asked if p.startswith("probe")] == [
        f"probe.1.{n}" for n in (0, 32, 64, 224, 256, 288)
    ]
    assert (told.not_asked[0], told.not_asked[-1], told.total) == (96, 223, None)
    assert told.normalised
    assert told.elsewhere == {"tail": 0.5}
    assert told.text.startswith(
        "request 1 attended to the right KV tokens of those asked about, 0..95, 224..300 (96..223 not asked about)"
    )
    exact = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k9.191-shuffled-gauss-b2prod"))
    assert found(wrong_at(exact, (0, 1, 0)), Backend(exact, even(exact.steps[0].lens))).not_asked == []


def test_with_sinks_nobody_knows_the_sum() -> None:
    schedule = schedule_of("-sink")
    told = found(wrong_at(schedule, (0, 2, 1)), Backend(schedule, even(schedule.steps[0].lens)))
    assert (told.total, told.right) == (None, True)


def test_the_layer_that_sees_most_is_asked() -> None:
    schedule = schedule_of("-w4")
    windows = [layer.sliding_window_size for layer in attended_keys.make_layers(schedule.case)]
    most = max(range(2), key=lambda i: windows[i] if windows[i] >= 0 else 10**6)
    told = found(wrong_at(schedule, (0, 2, 1), (1, 2, 3)), Backend(schedule, even(schedule.steps[0].lens)))
    assert told.window == windows[most]
    assert told.head == (1, 3)[most]
    narrow = found(wrong_at(schedule, (1 - most, 2, 1)), Backend(schedule, even(schedule.steps[0].lens)))
    assert narrow.window == windows[1 - most] == 4
    assert sorted(narrow.wanted) == list(range(36, 41))


def test_the_first_wrong_row_of_the_request_is_asked_in_the_layer_and_head_that_is_wrong() -> None:
    schedule = v1()
    judgement = wrong_at(schedule, (1, 4, 3, 7), (0, 0, 1))
    assert judgement.expected.data.row_request.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert _place_to_ask(schedule, judgement, 1) == (1, 4, 3)
    assert _place_to_ask(schedule, judgement, 0) == (0, 0, 1)


@pytest.mark.parametrize(("windows", "layer"), [((0, -1), 1), ((-1, 0), 0), ((0, 3), 1), ((4, 3), 0), ((-1, -1), 0)])
def test_a_layer_without_a_window_sees_most_and_one_of_the_row_alone_least(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int, int], layer: int
) -> None:
    monkeypatch.setattr(attended_keys, "make_layers", lambda case: [Of(sliding_window_size=n) for n in windows])
    schedule = schedule_of()
    assert _place_to_ask(schedule, wrong_at(schedule, (0, 2, 1), (1, 2, 1)), 2)[0] == layer


def test_nan_is_asked_about_before_other_wrong_values() -> None:
    schedule = schedule_of()
    judgement = wrong_at(schedule, (0, 2, 1))
    judgement.out[1, 2, 3] = torch.nan
    fresh = Judgement(observed(schedule, judgement.out), judgement.expected)
    assert found(fresh, Backend(schedule, even(schedule.steps[0].lens))).head == 3


@pytest.mark.parametrize(
    ("weights", "used", "doubled"),
    [
        ({0: 0.5, 1: 0.5}, {0, 1}, set()),
        ({0: 0.4, 1: 0.1, 2: 0.5}, {0, 2}, set()),
        ({0: 0.4, 1: 0.1}, {0}, set()),
        ({0: 0.4, 1: 0.101}, {0, 1}, set()),
        ({0: 0.25, 1: 0.25, 2: 0.5}, {0, 1, 2}, {2}),
        ({0: 0.25, 1: 0.25, 2: 0.375}, {0, 1, 2}, set()),
        ({0: 0.25, 1: 0.25, 2: 0.376}, {0, 1, 2}, {2}),
        ({0: 1.1e-6, 1: 1e-6}, {0}, set()),
        ({0: 1e-6, 1: 0.0}, set(), set()),
        ({}, set(), set()),
    ],
)
def test_what_counts_as_used_and_as_counted_twice(weights: dict[int, float], used: set[int], doubled: set[int]) -> None:
    told = _read(1, 2, weights, frozenset(range(9)), {"tail": 0.1}, 0.9)
    assert (told.used, told.doubled) == (used, doubled)
    assert (told.request, told.row, told.looked_at, told.length, told.total) == (1, 2, set(weights), len(weights), 0.9)
    assert told.wanted == set(weights)
    assert (told.head, told.heads, told.window) == (0, (), -1), "until somebody says which head was asked"
    assert not told.right
    assert ("counted more than once" in told.text) is bool(doubled)
    assert not doubled or f"; KV tokens {ranges(sorted(doubled))} counted more than once" in told.text


def test_heads_are_astray_where_others_are_not() -> None:
    keys, wanted = [0, 1, 2], frozenset({0, 1})
    right, wrong, small = [0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.5, 0.5, 0.125]
    assert _heads_astray(torch.tensor([right, wrong, small]), keys, wanted) == (1,)
    assert _heads_astray(torch.tensor([right, [0.5, 0.5, 0.126]]), keys, wanted) == (1,)
    assert _heads_astray(torch.tensor([wrong, wrong]), keys, wanted) == ()
    assert _heads_astray(torch.tensor([right, [0.0, 0.0, 0.0]]), keys, wanted) == (1,)
    tiny = torch.tensor([wrong, [1.1e-6, 1.1e-6, 0.9e-6], [0.9e-6, 0.9e-6, 0.0]])
    assert _heads_astray(tiny, keys, wanted) == (0, 2), "what is so small is not looked at"


def test_ranges_of_tokens() -> None:
    assert (ranges([]), ranges([3]), ranges([0, 1, 2, 7])) == ("none", "3", "0..2, 7")
    assert ranges(range(0, 12, 2)) == "0, 2, 4, 6, 8, 10"
    assert ranges(range(0, 14, 2)) == "0, 2, 4, 6, 8, 10 and 1 more runs"
    assert ranges(range(0, 16, 2)) == "0, 2, 4, 6, 8, 10 and 2 more runs"


# Swapped rows: what comes back belongs to somebody else.

V1 = "draft-extend-gqa2x2-d32-fp32-p4-k5.9.14-n3a2.3x2-shuffled-{}-b3prod"


def v1(data: str = "gauss") -> Schedule:
    return make_schedule(parse_case(V1.format(data)))


def with_rows(schedule: Schedule, change: Callable[[torch.Tensor, Any], None]) -> Judgement:
    expected = expect(schedule, schedule.steps[0])
    out = expected.attention.float().clone()
    change(out, expected)
    return Judgement(observed(schedule, out), expected)


def swaps(judgement: Judgement, rerunner: Any = None) -> list[str]:
    schedule = judgement.observed.schedule
    return [row.text for row in find_swapped(rerunner, schedule, judgement, in_graph=False)]


def test_rows_that_hold_each_others_results_are_named() -> None:
    def swap(out: torch.Tensor, expected: Any) -> None:
        out[:, [0, 3]] = out[:, [3, 0]]

    assert swaps(with_rows(v1(), swap)) == [
        "request 0 holds the result of request 1 row 1",
        "request 1 row 1 holds the result of request 0",
    ]


def test_one_layer_that_is_swapped_is_enough_and_zeros_are_nobodys() -> None:
    def one_layer(out: torch.Tensor, expected: Any) -> None:
        out[1, 0] = out[1, 1]

    def zeros(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] = 0.0

    def noise(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] += 3.0

    assert swaps(with_rows(v1(), one_layer)) == ["request 0 holds the result of request 0 row 1"]
    assert swaps(with_rows(v1(), zeros)) == swaps(with_rows(v1(), noise)) == []


def test_a_copy_of_a_wrong_row_of_another_request_is_seen_and_of_its_own_is_not() -> None:
    def copied(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] += 3.0
        out[:, 5] = out[:, 0]

    def its_own(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] += 3.0
        out[:, 1] = out[:, 0]

    assert swaps(with_rows(v1(), copied)) == [
        "request 0 holds the same values as request 2",
        "request 2 holds the same values as request 0",
    ]
    assert swaps(with_rows(v1(), its_own)) == []


def computed_with(schedule: Schedule, other: int, keys: int) -> list[str]:
    """What is said where row 0 of request 0 saw the first KV tokens of another request."""
    data = make_step_data(schedule, schedule.steps[0])

    def foreign(out: torch.Tensor, expected: Any) -> None:
        visible, positions = torch.zeros_like(data.visible), torch.zeros_like(data.query_positions)
        visible[other, 0] = torch.arange(visible.shape[2]) < keys
        positions[other, 0] = keys - 1
        supposed = replace(
            data, q=data.q[:, :1], row_request=torch.tensor([other]), row_offset=torch.tensor([0]), visible=visible,
            key_positions=torch.arange(visible.shape[2]).expand(len(visible), -1), query_positions=positions,
        )  # fmt: skip
        out[:, 0] = _attend(schedule, supposed)

    return swaps(with_rows(schedule, foreign))


@pytest.mark.parametrize("words", ["", "-w4"])
@pytest.mark.parametrize(("other", "keys"), [(1, 12), (1, 11), (1, 9), (2, 17), (2, 14), (1, 7), (1, 6)])
def test_a_row_that_was_computed_with_tokens_of_another_request(other: int, keys: int, words: str) -> None:
    schedule = v1("gauss" + words)
    assert schedule.steps[0].lens == [7, 12, 17]
    assert computed_with(schedule, other, keys) == [
        f"request 0 was computed with KV tokens 0..{keys - 1} of request {other}"
    ]


def test_tokens_of_another_requests_tree_are_counted_one_after_the_other() -> None:
    words = "target-verify-gqa2x2-d32-fp32-p4-k5.9-t0.0.1-shuffled-gauss-w4-b2prod"
    schedule = make_schedule(parse_case(words))
    assert schedule.steps[0].lens == [9, 13]
    assert computed_with(schedule, 1, 13) == ["request 0 was computed with KV tokens 0..12 of request 1"]


def test_a_wrong_length_in_a_prefix_that_requests_share_is_no_swap() -> None:
    words = "draft-extend-gqa2x2-d32-fp32-p4-k22x2-n3a1x2-shared-gauss-b2prod"
    schedule = make_schedule(parse_case(words))
    assert [request.shared for request in schedule.steps[0].requests] == [20, 20]
    assert computed_with(schedule, 1, 20) == computed_with(schedule, 0, 20) == []


@pytest.mark.parametrize(("other", "keys"), [(1, 8), (2, 13), (1, 13)])
def test_lengths_that_no_row_of_either_request_would_have_are_not_looked_for(other: int, keys: int) -> None:
    """Three rows see at most three tokens fewer than the request has, and none more than it has."""
    assert computed_with(v1(), other, keys) == []


def test_the_first_token_of_another_request_alone_is_looked_for() -> None:
    schedule = make_schedule(parse_case("draft-extend-gqa2x2-d32-fp32-p4-k5.1.14-n3a2.1.3-shuffled-gauss-b3prod"))
    assert schedule.steps[0].lens == [7, 2, 17]
    assert computed_with(schedule, 1, 1) == ["request 0 was computed with KV tokens 0..0 of request 1"]


def test_a_swapped_row_may_be_right_in_some_of_its_values() -> None:
    schedule = v1()
    expected = expect(schedule, schedule.steps[0])
    right = expected.attention.clone()
    right[:, 3, 0, 0] = right[:, 0, 0, 0]
    out = right.float().clone()
    out[:, [0, 3]] = out[:, [3, 0]]
    judgement = Judgement(observed(schedule, out), replace(expected, attention=right))
    assert not judgement.wrong[:, 0, 0, 0].any()
    assert swaps(judgement) == [
        "request 0 holds the result of request 1 row 1",
        "request 1 row 1 holds the result of request 0",
    ]


def test_of_many_wrong_rows_the_first_dozen_is_compared() -> None:
    lens = ".".join(str(n) for n in range(5, 19))
    schedule = make_schedule(parse_case(f"decode-gqa2x2-d32-fp32-p4-k{lens}-shuffled-gauss-b14prod"))

    def turn(out: torch.Tensor, expected: Any) -> None:
        out[:] = out.roll(1, 1)

    found = swaps(with_rows(schedule, turn))
    assert found == [f"request {i} holds the result of request {(i - 1) % 14}" for i in range(12)]


def _attend(schedule: Schedule, data: Any) -> torch.Tensor:
    from attn_testkit.oracle.attention import attend

    return attend(data, attended_keys.make_layers(schedule.case)).out[:, 0].float()


def test_where_all_queries_are_alike_other_numbers_are_asked_for() -> None:
    schedule = v1("mean")
    other = expect(schedule, schedule.steps[0], "gauss")
    out = other.attention.float().clone()
    out[:, [0, 3]] = out[:, [3, 0]]
    asked: list[Any] = []

    class Asked:
        def eager(self, schedule: Schedule, step: Any, *, pattern: str) -> Observation:
            asked.append(("eager", pattern))
            return observed(schedule, out)

        def graph(self, schedule: Schedule, *, pattern: str) -> Any:
            asked.append(("graph", pattern))
            return Of(replay_of=lambda step: observed(schedule, out) if step is schedule.steps[0] else None)

    def off(out: torch.Tensor, expected: Any) -> None:
        out += 3.0

    judgement = with_rows(schedule, off)
    assert swaps(judgement) == []
    for how in ("eager", "graph"):
        assert len(find_swapped(Asked(), schedule, judgement, in_graph=how == "graph")) == 2  # type: ignore[arg-type]
        assert asked.pop() == (how, "gauss")
    silent = Of(graph=lambda *_, **__: None, eager=lambda *_, **__: None)
    for in_graph in (False, True):
        assert find_swapped(silent, schedule, judgement, in_graph=in_graph) == ()  # type: ignore[arg-type]


# Right KV tokens, wrong numbers.


def numbers(words: str = "", data: str = "gauss", errors: float = 9.0, total: float = 1.0, **fields: Any) -> str:
    schedule = make_schedule(parse_case(DECODE.format(words).replace("gauss", data)))
    judgement = wrong_at(schedule, (0, 2, 1), value=errors)
    every = frozenset(range(41))
    told = attended_keys.AttendedKeys(2, 0, every, every, frozenset(), every, 41, {}, total)
    return right_keys(Evidence(schedule, judgement, told, [], in_graph=False, **fields))


def test_evidence_says_nothing_that_was_not_found() -> None:
    schedule = schedule_of()
    plain = Evidence(schedule, wrong_at(schedule, (0, 2, 1)), None, [], in_graph=False)
    assert (plain.swapped, plain.right_when_fresh, plain.reads_foreign, plain.before) == ((), False, False, None)
    assert replace(plain, right_when_fresh=True).before is schedule.steps[0]
    assert (plain.wrong, plain.rows, plain.lens) == ([2], [2], [4, 10, 41])


@pytest.mark.parametrize(
    ("words", "data", "there", "absent"),
    [
        ("", "gauss", ["scale", "head mapping"], ["soft cap", "sinks", "FP8", "row order"]),
        ("-cap1.5", "gauss", ["scale, soft cap, head mapping"], ["sinks"]),
        ("-sink", "gauss", ["scale, sinks"], ["soft cap"]),
        ("", "peaked", ["overflow or saturation of large logits"], ["minus infinity"]),
        ("", "negative", ["a finite value that stands for minus infinity"], []),
        ("", "cliff", ["logits of this case climb and fall by hundreds"], []),
    ],
)
def test_suspects_are_what_the_case_has(words: str, data: str, there: list[str], absent: list[str]) -> None:
    told = numbers(words, data)
    assert told.startswith("the right KV tokens, wrong softmax weights or values: look at ")
    for text in there:
        assert text in told
    for text in absent:
        assert text not in told


def test_a_sum_that_is_not_one_says_so() -> None:
    assert numbers(total=0.5).startswith(
        "weights of the right KV tokens sum to 0.5 instead of 1: look at a denominator"
    )
    assert "(a soft cap comes before the mask)" in numbers("-cap1.5", total=0.5)
    assert numbers(reads_foreign=True) == ""


def test_a_rerunner_is_what_is_asked() -> None:
    assert {"eager", "graph"} <= set(vars(Rerunner)), "what these tests stand in for"
