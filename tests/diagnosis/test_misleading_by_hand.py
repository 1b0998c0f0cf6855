"""Hints that once said the opposite of what was wrong: what they say now, and where they stay quiet."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.diagnosis.attended_keys import AttendedKeys
from attn_testkit.diagnosis.hints import Evidence, hints
from attn_testkit.diagnosis.hints.assumed_slots import other_dims, other_sink_of_each
from attn_testkit.diagnosis.hints.missing import missing_keys
from attn_testkit.diagnosis.hints.numbers import is_noise, right_keys
from attn_testkit.diagnosis.hints.query_scales import lost_query_scale
from attn_testkit.diagnosis.hints.values import nothing_computed
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.results.case_result import UNDECLARED_GRAPH, CaseResult, Status, remarks_of
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.query_scales import LARGEST_FP8
from attn_testkit.steps.schedule import Schedule, make_schedule

SINKS = make_schedule(parse_case("decode-gqa3x2-d32-fp32-p4-k40.9.21-shuffled-gauss-sink-b3prod"))
PLAIN = make_schedule(parse_case("decode-gqa3x2-d64-fp32-p4-k40.9.21-shuffled-gauss-b3prod"))
WINDOWED = make_schedule(parse_case("decode-gqa3x2-d32-fp32-p4-k40.9.21-shuffled-gauss-w11-b3prod"))
FP8 = make_schedule(parse_case("decode-gqa3x2-d64-bf16-p4-k40.9.21-shuffled-gauss-kvfp8e4m3-b3prod")).with_numerics(
    matmul_dtype="fp8_e4m3", q_scale="per_token_head"
)


def seen(schedule: Schedule, out: torch.Tensor, step: int = 0) -> Observation:
    copies = copies_of([("attention", str(layer), each.float()) for layer, each in enumerate(out.unbind(0))])
    return Observation(schedule, schedule.steps[step], "", copies)


def evidence(schedule: Schedule, out: torch.Tensor, **more: Any) -> Evidence:
    comparison = Comparison(seen(schedule, out), expect(schedule, schedule.steps[0]))
    return Evidence(schedule, comparison, **{"attended": None, "passed": [], "in_graph": False, **more})


def right(schedule: Schedule) -> torch.Tensor:
    return expect(schedule, schedule.steps[0]).attention.clone()


def attended(length: int, used: set[int] | None = None, **more: Any) -> AttendedKeys:
    keys = frozenset(range(length))
    return AttendedKeys(
        0, 0, keys if used is None else frozenset(used), keys, frozenset(), keys, length, {}, 1.0, **more
    )


# Sinks.


def with_sinks(change: Any) -> torch.Tensor:
    layers = [replace(layer, sinks=change(layer.sinks)) for layer in make_layers(SINKS.case)]
    return attend_with_limit(SINKS, expect(SINKS, SINKS.steps[0]).data, False, layers)[0].out


def test_sinks_of_other_heads_are_named_head_by_head() -> None:
    found = evidence(SINKS, with_sinks(lambda sinks: sinks.roll(-1)))
    assert "the result is right with the sink of head 1 in head 0, of head 2 in head 1" in other_sink_of_each(found)
    assert hints(found)[0].startswith("heads use the sink of another head")


def test_sinks_that_no_head_has_are_nobodys() -> None:
    assert other_sink_of_each(evidence(SINKS, with_sinks(lambda sinks: sinks + math.log(9)))) == ""
    assert other_sink_of_each(evidence(SINKS, right(SINKS))) == ""


# Precision.


def noisy(schedule: Schedule, times: float, seed: int = 5) -> torch.Tensor:
    """Right but for errors of random signs, up to so many limits."""
    expected, random = expect(schedule, schedule.steps[0]), torch.Generator().manual_seed(seed)
    return expected.attention + (2 * torch.rand(expected.attention.shape, generator=random) - 1) * times * (
        expected.attention_limit
    )


@pytest.mark.parametrize("times", [3.0, 9.0, 40.0, 200.0])
def test_noise_of_both_signs_in_all_heads_is_precision_at_any_ratio(times: float) -> None:
    found = evidence(PLAIN, noisy(PLAIN, times), attended=attended(41))
    assert "probably precision" in right_keys(found)
    assert "head mapping" not in right_keys(found)


def test_errors_of_one_sign_or_of_one_head_or_as_large_as_the_values_are_no_noise() -> None:
    expected = expect(PLAIN, PLAIN.steps[0])
    noise = noisy(PLAIN, 40.0) - expected.attention
    assert is_noise(evidence(PLAIN, expected.attention + noise))
    assert not is_noise(evidence(PLAIN, expected.attention + noise.abs()))
    one = torch.zeros_like(noise)
    one[:, :, 0] = noise[:, :, 0]
    assert not is_noise(evidence(PLAIN, expected.attention + one))
    assert not is_noise(evidence(PLAIN, expected.attention.roll(1, 2))), "values of another head"
    assert "head mapping" in right_keys(evidence(PLAIN, expected.attention + one * 1e4, attended=attended(41)))


# Dims, and scales of queries.


def with_queries(schedule: Schedule, change: Any, step: int = 0) -> torch.Tensor:
    data = expect(schedule, schedule.steps[step]).data
    return attend_with_limit(schedule, replace(data, q=change(data.q.clone().float())), False)[0].out


def without_dims(q: torch.Tensor) -> torch.Tensor:
    q[..., 48:] = 0
    return q


def test_dims_are_left_out_only_if_every_row_and_another_step_agree() -> None:
    out, keys = with_queries(PLAIN, without_dims), attended(41)
    said = "dims 48..63 of 64 are left out"
    assert said in other_dims(evidence(PLAIN, out, attended=keys))
    partly = right(PLAIN)
    partly[:, 0] = out[:, 0]
    assert other_dims(evidence(PLAIN, partly, attended=keys)) == "", "rows that are right contradict"
    second = expect(PLAIN, PLAIN.steps[1]).attention
    assert other_dims(evidence(PLAIN, out, attended=keys, passed=[seen(PLAIN, second, 1)])) == "", "a step contradicts"


def test_dims_of_which_the_data_are_zero_are_not_blamed() -> None:
    expected = expect(PLAIN, PLAIN.steps[0])
    queries = expected.data.q.clone()
    queries[..., 16:48] = 0
    sparse = replace(expected, data=replace(expected.data, q=queries))
    out = with_queries(PLAIN, lambda _: without_dims(queries.clone().float()))
    found = replace(evidence(PLAIN, out, attended=attended(41)), comparison=Comparison(seen(PLAIN, out), sparse))
    said = "dims 48..63 of 64 are left out of the product of q and k; without dims 16..63 it is right, too"
    assert other_dims(found).endswith(said)


def scales(q: torch.Tensor) -> torch.Tensor:
    largest = q.abs().amax(-1, keepdim=True)
    return torch.where(largest > 0, largest / LARGEST_FP8, 1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q: q / scales(q), "is not multiplied back into the logits: the result is right without it"),
        (lambda q: q * scales(q), "is multiplied into the logits twice"),
        (lambda q: q * (scales(q) * (q != 0).any(-1, keepdim=True)).roll(1, 1) / scales(q), "that of the token before"),
        (lambda q: q * 0.3, ""),
    ],
)
def test_a_lost_scale_of_queries_is_named_and_no_dims_are(change: Any, said: str) -> None:
    found = evidence(FP8, with_queries(FP8, change), attended=attended(41))
    assert said in lost_query_scale(found)
    assert bool(lost_query_scale(found)) == bool(said)
    assert not said or not any("dims" in text for text in hints(found))


# Keys.


def test_a_prefix_that_ends_where_a_window_begins_has_two_hypotheses() -> None:
    def said(schedule: Schedule, used: set[int], window: int) -> str:
        found = attended(41, used, window=window)
        return missing_keys(evidence(schedule, right(schedule)), found, sorted(found.wanted - found.used))

    both = said(WINDOWED, {40}, 11)
    assert both.startswith("the whole prefix is missing")
    assert "or a window of 0 instead of 11, since this row attends to the same KV tokens then" in both
    assert "window" not in said(PLAIN, {40}, -1)
    assert "instead of" not in said(WINDOWED, set(range(35, 41)), 11), "no window has this width"


def test_a_span_that_ends_with_the_prefix_is_named_next_to_it() -> None:
    request = replace(PLAIN.steps[0].requests[0], spans=((3, 39),))
    step = replace(PLAIN.steps[0], requests=(request, *PLAIN.steps[0].requests[1:]))
    base, found = evidence(PLAIN, right(PLAIN)), attended(41, {40})
    comparison = replace(base.comparison, observed=replace(base.comparison.observed, step=step))
    said = missing_keys(replace(base, comparison=comparison), found, sorted(found.wanted - found.used))
    assert "or a mask of the span 3..39, which ends there" in said


# Zeros.


@pytest.mark.parametrize(
    ("keys", "said"), [(None, True), (attended(41), False), (replace(attended(41), elsewhere={"others": 0.5}), True)]
)
def test_zeros_everywhere_may_be_nan_of_a_wrong_row_unless_a_probe_says_otherwise(
    keys: AttendedKeys | None, said: bool
) -> None:
    reported = nothing_computed(evidence(PLAIN, torch.zeros_like(right(PLAIN)), attended=keys))
    assert reported.startswith("nothing was computed")
    assert ("a wrong row of the request table is read" in reported) is said


# Remarks.


@pytest.mark.parametrize("status", [Status.PASSED, Status.FAILED, Status.CRASHED, Status.KNOWN_FAILURE])
@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_a_mode_is_praised_only_if_none_of_its_case_runs_failed(status: Status, mode: str) -> None:
    praise = UNDECLARED_GRAPH.format(backend="it", mode="extend")
    first = CaseResult("it", "extend", "eager", "a", Status.PASSED, hints=(praise, "another"))
    other = CaseResult("it", mode, "eager", "b", status)
    found = remarks_of([first, other])
    assert found["another"] == 1
    assert found[praise] == (0 if mode == "extend" and status is not Status.PASSED else 1)


# Last pages.


def cut_at(prefixes: str, ends: list[int]) -> Evidence:
    """Requests that attend to KV tokens before ``ends``, in pages of 16. The longest one is examined."""
    schedule = make_schedule(parse_case(f"decode-gqa3x2-d32-fp32-p16-k{prefixes}-shuffled-gauss-b4prod"))
    data = expect(schedule, schedule.steps[0]).data
    before = torch.arange(data.visible.shape[-1]) < torch.tensor(ends)[:, None, None]
    out = attend_with_limit(schedule, replace(data, visible=data.visible & before))[0].out
    found = evidence(schedule, out.nan_to_num(0.0))
    longest = max(found.wrong, key=found.lens.__getitem__)
    of_it = replace(attended(found.lens[longest], set(range(ends[longest]))), request=longest)
    return replace(found, attended=of_it)


def test_a_partly_filled_last_page_that_is_dropped_is_one_cause_in_requests_of_any_length() -> None:
    # Lengths are 38, 50, 10 and 32.
    (text,) = hints(cut_at("37.49.9.31", [32, 48, 10, 32]))
    dropped = "a partly filled last page is probably dropped"
    assert text.startswith(f"{dropped}: in every wrong request its KV tokens are missing")
    assert dropped in hints(cut_at("37.49.9.31", [32, 48, 0, 32]))[0], "those of an only page are missing as well"
    # If all last pages begin at 32, a capacity is as probable.
    confounded = hints(cut_at("37.32.9.31", [32, 32, 10, 32]))
    assert confounded == [text, "the KV tokens of the last page are missing, or a fixed capacity of 32"]
    for other in ([31, 49, 10, 32], [36, 48, 10, 30], [32, 48, 10, 16]):
        assert not any(dropped in hint for hint in hints(cut_at("37.49.9.31", other))), other


def test_last_pages_of_equally_many_tokens_may_be_an_end_that_is_off() -> None:
    # Lengths are 34, 50, 34 and 50.
    (text,) = hints(cut_at("33.49.33.49", [32, 48, 32, 48]))
    assert text == "the KV tokens of the last page are missing"
