"""Zeros, NaN, another layer's results, and a KV pool that is wrong itself: what just fits a hint, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from wrong_steps import observed, v1

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.comparison import BITS
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.diagnosis.attended_keys import AttendedKeys
from attn_testkit.diagnosis.hints import Evidence, hints
from attn_testkit.diagnosis.hints.keys import stored_elsewhere
from attn_testkit.diagnosis.hints.numbers import computed_nan
from attn_testkit.diagnosis.hints.values import (
    nan_became_zero,
    nothing_computed,
    one_row_each,
    rows_of_other_layers,
)
from attn_testkit.diagnosis.misrouted_rows import MisroutedRow
from attn_testkit.families.expected import expect
from attn_testkit.steps.data import new_kv
from attn_testkit.steps.schedule import Schedule, make_schedule

WINDOW = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k5.6.20-shuffled-gauss-w4-b3prod"))
SHORT = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k3.4.5-shuffled-gauss-w4-b3prod"))


def evidence(out: torch.Tensor, schedule: Schedule | None = None, **more: Any) -> Evidence:
    schedule = schedule or v1()
    comparison = Comparison(observed(schedule, out), expect(schedule, schedule.steps[0]))
    return Evidence(schedule, comparison, None, [], **{"in_graph": False, **more})


def right(schedule: Schedule | None = None) -> torch.Tensor:
    schedule = schedule or v1()
    return expect(schedule, schedule.steps[0]).attention.float().clone()


def test_rows_of_zeros_are_computed_by_nothing_and_the_text_says_how_far_that_goes() -> None:
    out = right()
    assert nothing_computed(evidence(out)) == "", "nothing is wrong"
    out[:, 1] = 0.0
    assert nothing_computed(evidence(out)).startswith(
        "the wrong rows were never computed (they are all zeros): probably a grid or"
    )
    assert "captured batch" in nothing_computed(evidence(out, in_graph=True, of_capture=True))
    assert "does not follow the batch" in nothing_computed(evidence(out, in_graph=True, of_capture=False))
    assert "nothing was computed, the output is all zeros, in every layer: a choice" in nothing_computed(
        evidence(torch.zeros_like(out))
    )
    some = out.clone()
    some[0, 1, 0, 0] = 9.0
    assert nothing_computed(evidence(some)) == "", "a value of the row is no 0"
    other = out.clone()
    other[0, 2] += 9.0
    assert nothing_computed(evidence(other)) == "", "another wrong row has numbers"


@pytest.mark.parametrize(("place", "read"), [("tail", True), ("unowned", True), ("others", False)])
def test_zeros_of_a_row_that_reads_nan_are_no_missing_work(place: str, read: bool) -> None:
    keys, out = frozenset(range(4)), right()
    out[:, 1] = 0.0
    attended = AttendedKeys(1, 0, keys, keys, frozenset(), keys, 4, {place: 0.1}, 1.0)
    found = replace(evidence(out), attended=attended)
    assert (nothing_computed(found) == "") is read
    assert nan_became_zero(found).startswith("the zeros come from a NaN that was read") is read
    first = hints(found)[0]
    assert first.startswith("the wrong rows were never computed") is not read
    if place == "tail":
        assert first.startswith("slots after the last KV token are read")
    assert nan_became_zero(evidence(out)) == "", "nothing else was read"
    other = right() + 9.0
    assert nan_became_zero(replace(evidence(other), attended=attended)) == "", "the rows have numbers"
    later = replace(found, right_when_fresh=True)
    assert nothing_computed(later) != "", "it was asked on a fresh instance, where it is right"


def test_zeros_at_every_replay_are_a_counter_that_no_replay_resets() -> None:
    schedule, said = v1(), "and no replay of the case is right: probably a counter, a semaphore or a work list"
    zeros = torch.zeros_like(right())
    step_of, replayed = expect(schedule, schedule.steps[0]), observed(schedule, zeros, replay=True)

    def reported(passed: bool | None, out: torch.Tensor = zeros, in_graph: bool = True) -> str:
        """``passed``: whether the step that is right is a replay; None: none is."""
        seen = [] if passed is None else [observed(schedule, right(), replay=passed)]
        comparison = Comparison(replace(replayed, copies=observed(schedule, out).copies), step_of)
        return nothing_computed(Evidence(schedule, comparison, None, seen, in_graph=in_graph))

    assert said in reported(False)
    assert said in reported(None)
    assert said not in reported(True), "another replay is right"
    assert "other steps of the case are right" in reported(True)
    assert said not in reported(False, in_graph=False), "in eager it is wrong too"
    some = right()
    some[:, 1] = 0.0
    assert said not in reported(False, some), "other rows are computed"


def test_zeros_in_all_layers_but_the_first_are_what_the_first_used_up() -> None:
    out = right()
    out[1, 1] = 0.0
    assert nothing_computed(evidence(out)).endswith("all zeros in every layer but the first")
    out[0, 2] = 0.0
    assert nothing_computed(evidence(out)).startswith("the wrong rows were never computed (they are all zeros)")


def test_nan_that_is_computed_is_reported_by_the_window_or_the_parts_of_the_case() -> None:
    def reported(schedule: Schedule, *wrong: int, **more: Any) -> str:
        out = right(schedule)
        out[:, list(wrong)] = torch.nan
        return computed_nan(evidence(out, schedule, **{"computes_nan": True, **more}))

    assert reported(WINDOW, 1, 2).endswith("only requests longer than it are wrong")
    assert reported(WINDOW, 1, 2, computes_nan=False) == "", "whether something foreign was read is not known"
    assert reported(SHORT, 0, 1, 2).endswith("; or an overflow"), "a request of no more than the window is wrong"
    assert reported(SHORT, 2).endswith("only requests longer than it are wrong")
    assert reported(SHORT, 1).endswith("; or an overflow"), "with the row's own, 5 KV tokens are the window of 4"
    parts = make_schedule(parse_case("decode-gqa2x2-d64-bf16-p4-k11.1-shuffled-gauss-lsetokens3-b2prod"))
    assert "in this case some requests have no KV token in one of the splits" in reported(parts, 0)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ([0, 1, 2, 3], "only rows 0-3 of the output are written, as many as there are requests"),
        ([0, 1, 2], ""),
        ([1, 2, 3, 4], ""),
        ([0, 1, 2, 3, 4], ""),
    ],
)
def test_as_many_rows_as_requests_are_a_grid_of_one_row_each(written: list[int], text: str) -> None:
    out = right()
    assert v1().steps[0].bs == 3
    schedule = make_schedule(parse_case("draft-extend-gqa2x2-d32-fp32-p4-k5.9.14.3-n3a2.3x3-shuffled-gauss-b4prod"))
    out = right(schedule)
    left = [row for row in range(out.shape[1]) if row not in written]
    out.view(BITS[4])[:, left] = -1
    said = one_row_each(evidence(out, schedule))
    assert said.endswith(text)
    assert bool(said) is bool(text)


def test_one_row_each_is_all_that_a_decode_has() -> None:
    out = right(WINDOW)
    assert one_row_each(evidence(out, WINDOW)) == ""
    lone = make_schedule(parse_case("draft-extend-gqa2x2-d32-fp32-p4-k5-n3a3-shuffled-gauss-b1prod"))
    out = right(lone)
    out.view(BITS[4])[:, 1:] = -1
    assert "only row 0 of the output is written" in one_row_each(evidence(out, lone))


def test_a_row_with_a_result_of_another_layer_says_whose() -> None:
    out, want = right(), right()
    out[0, 2] = want[1, 0]
    text = rows_of_other_layers(evidence(out))
    assert text == (
        "outputs of layers share memory or overlap: request 1 row 0 of layer 0 holds the result of request 0 "
        "row 0 of layer 1"
    )
    out[0, 3] = want[1, 1]
    assert "of layer 1 and so on" in rows_of_other_layers(evidence(out))
    misrouted = (MisroutedRow(1, 0, 0, 0),)
    assert rows_of_other_layers(evidence(out, misrouted=misrouted)) == "", "it is known to be a row of its own layer"
    out[0, 4] += 9.0
    assert rows_of_other_layers(evidence(out)) == "", "a wrong row is nobody's"
    codes = make_schedule(parse_case("decode-gqa2x2-d64-fp32-p16-k4097.300.33-reversed-plus_minus_one-b4prod"))
    found = evidence(right(codes), codes)
    found.comparison.key_ratio[0, 1] = 2.0
    assert found.comparison.wrong_rows == (1,)
    assert rows_of_other_layers(found) == "", "its layers have the same numbers, and a count alone is wrong"
    own = right()
    own[0, 2] = want[0, 0]
    assert rows_of_other_layers(evidence(own)) == "", "of the same layer"
    assert rows_of_other_layers(evidence(right())) == ""


def pooled(change: Any, wrong: tuple[int, ...], schedule: Schedule | None = None) -> Evidence:
    """A step whose KV pool was changed as ``change(slots, rows, step)`` makes of what was due."""
    schedule = schedule or v1()
    step, expected = schedule.steps[0], expect(schedule, schedule.steps[0])
    slots, rows = new_kv(expected.data)
    slots, rows = change(slots.clone(), rows.view(BITS[rows.dtype.itemsize]).clone(), step)
    out = right(schedule)
    flat = [row for row, request in enumerate(expected.data.row_request.tolist()) if request in wrong]
    out[:, flat] += 9.0
    attention = [("attention", str(layer), each) for layer, each in enumerate(out.unbind(0))]
    copies = copies_of([*attention, ("pool", "slots", slots), ("pool", "rows", rows)])  # type: ignore[list-item]
    seen = Observation(schedule, step, "", copies)
    return Evidence(schedule, Comparison(seen, expected), None, [], in_graph=False)


def as_due(slots: torch.Tensor, rows: torch.Tensor, step: Any) -> Any:
    return slots, rows


def not_stored(slots: torch.Tensor, rows: torch.Tensor, step: Any) -> Any:
    """The last token of request 1."""
    kept = slots != int(step.requests[1].slots[-1])
    return slots[kept], rows[:, :, kept]


def other_bits(slots: torch.Tensor, rows: torch.Tensor, step: Any) -> Any:
    """In one layer, of the first new token of request 1."""
    request = step.requests[1]
    rows[0, 0, slots == int(request.slots[request.prefix])] += 1
    return slots, rows


def overwritten(slots: torch.Tensor, rows: torch.Tensor, step: Any) -> Any:
    """Tokens 0 and 2 of request 1, which are earlier ones."""
    hit = torch.from_numpy(step.requests[1].slots[[0, 2]])
    return torch.cat([slots, hit]), torch.cat([rows, rows[:, :, :2]], 2)


def of_nobody(slots: torch.Tensor, rows: torch.Tensor, step: Any) -> Any:
    return torch.cat([slots, torch.zeros(1, dtype=torch.int64)]), torch.cat([rows, rows[:, :, :1]], 2)


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        (not_stored, "KV token 11 of request 1 does not match"),
        (other_bits, "KV token 9 of request 1 does not match"),
        (overwritten, "KV tokens 0, 2 of request 1 do not match"),
        (as_due, ""),
        (of_nobody, ""),
    ],
)
def test_kv_tokens_that_do_not_lie_as_stored_are_named_where_their_request_is_wrong(change: Any, tokens: str) -> None:
    text = stored_elsewhere(pooled(change, (1,)))
    assert text.endswith("what was stored") is bool(tokens)
    assert f"fix writes-own-kv first: {tokens}" in text or not tokens
    assert bool(text) is bool(tokens)
    assert stored_elsewhere(pooled(change, ())) == "", "no number is wrong"
    assert stored_elsewhere(pooled(change, (0, 1))) == "", "request 0 is wrong for another reason"


@pytest.mark.parametrize(
    ("used", "total", "said"),
    [
        (range(12), 1.0, True),
        (range(11), 0.92, True),
        (range(11), 1.0, False),
        (range(11), None, True),
    ],
)
def test_a_token_without_any_weight_was_not_read_whatever_lies_there(
    used: range, total: float | None, said: bool
) -> None:
    every = frozenset(range(12))
    attended = AttendedKeys(1, 2, frozenset(used), every, frozenset(), every, 12, {}, total)
    assert bool(stored_elsewhere(replace(pooled(not_stored, (1,)), attended=attended))) is said


def test_where_the_pool_was_not_looked_at_or_nothing_was_to_be_stored_it_is_not_blamed() -> None:
    known = pooled(not_stored, (1,))
    assert hints(known) == [stored_elsewhere(known)], "and nothing else, as it follows"
    step = replace(known.step, stored=True)
    stored = replace(known, comparison=Comparison(replace(known.observed, step=step), known.expected))
    assert stored_elsewhere(stored) == ""
    out = right()
    out[:, 0] += 9.0
    assert stored_elsewhere(evidence(out)) == ""
