"""A step that is right for something else than its layers have: each mistake is named, and no other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from wrong_steps import assumed

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.diagnosis.attended_keys import AttendedKeys
from attn_testkit.diagnosis.hints import Evidence, hints
from attn_testkit.diagnosis.hints.evidence import Supposed
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import Schedule, make_schedule

CASE = "decode-gqa3x2-d32-fp32-p4-k40.9.21-shuffled-gauss-kvfp8e4m3-w11-cap1.5-sink-b4prod"
SCHEDULE = make_schedule(parse_case(CASE))


def evidence(out: torch.Tensor, schedule: Schedule = SCHEDULE, **more: Any) -> Evidence:
    copies = copies_of([("attention", str(layer), each.float()) for layer, each in enumerate(out.unbind(0))])
    step = schedule.steps[0]
    seen = Observation(schedule, step, "", copies)
    values = {"attended": None, "passed": [], "in_graph": False, **more}
    return Evidence(schedule, Comparison(seen, expect(schedule, step)), **values)


def attended(*layer_changes: Any, schedule: Schedule = SCHEDULE, **data_changes: Any) -> torch.Tensor:
    """[L, T, Hq, Dv]: what a backend gives that has each layer's ``layer_changes``, and other numbers."""
    layers = list(make_layers(schedule.case))
    for change in layer_changes:
        layers = [change(layer) for layer in layers]
    data = expect(schedule, schedule.steps[0]).data
    data = replace(data, **{name: change(data) for name, change in data_changes.items()})
    return attend_with_limit(schedule, data, False, layers)[0].out


def sinks(change: Any) -> Any:
    return lambda layer: layer if layer.sinks is None else replace(layer, sinks=change(layer.sinks))


def heads(kv_head: Any) -> Any:
    return {
        name: lambda data, name=name: getattr(data, name)[:, :, :, kv_head(torch.arange(6))]
        for name in ("stored_keys", "stored_values")
    }


def scales(*which: int | None) -> Any:
    """Scale 0 is of keys, 1 of values, None is 1."""
    return lambda data: torch.stack(
        [torch.ones_like(data.kv_scales[0]) if index is None else data.kv_scales[index] for index in which]
    )


MISTAKES = [
    ("no cap", attended(lambda layer: replace(layer, logit_cap=0.0)), "right without a soft cap"),
    (
        "cap before scale",
        attended(lambda layer: replace(layer, logit_cap=layer.logit_cap * layer.scaling)),
        "right with a soft cap of unscaled products",
    ),
    ("no sinks", attended(lambda layer: replace(layer, sinks=None)), "right without sinks"),
    ("sinks in base 2", attended(sinks(lambda s: s * math.log(2))), "right with sinks in base 2"),
    (
        "sinks by group",
        attended(sinks(lambda s: s.view(2, 3)[:, :1].expand(2, 3).reshape(-1))),
        "right with the sink of a group's first head",
    ),
    ("sink twice", attended(sinks(lambda s: s + math.log(2))), "right for a sink that counts 2 times"),
    ("sink eight times", attended(sinks(lambda s: s + math.log(8))), "right for a sink that counts 8 times"),
    ("sink nine times", attended(sinks(lambda s: s + math.log(9))), ""),
    (
        "scale twice",
        attended(lambda layer: replace(layer, scaling=layer.scaling**2)),
        "the scale is applied twice: the result is right with the square",
    ),
    ("no scale", attended(lambda layer: replace(layer, scaling=1.0)), "right without a scale"),
    (
        "scale of heads",
        attended(lambda layer: replace(layer, scaling=6**-0.5)),
        "right with a scale of 1/sqrt(6)",
    ),
    (
        "sinks of padded groups",
        attended(sinks(lambda s: s[[0, 1, 2, 4, 5, 5]])),
        "heads of a group are padded to a power of two, but sinks are not",
    ),
    ("no k_scale", attended(kv_scales=scales(None, 1)), "keys of the FP8 pool are not multiplied by k_scale"),
    ("no v_scale", attended(kv_scales=scales(0, None)), "values of the FP8 pool are not multiplied by v_scale"),
    ("neither", attended(kv_scales=scales(None, None)), "k_scale and v_scale do not reach the kernel"),
    ("k_scale for v", attended(kv_scales=scales(0, 0)), "right with k_scale in place of v_scale"),
    ("v_scale for k", attended(kv_scales=scales(1, 1)), "right with v_scale in place of k_scale"),
    ("round robin", attended(**heads(lambda h: h % 2)), "right for query head h with KV head h % 2"),
    ("power of two", attended(**heads(lambda h: h // 4)), "right for query head h with KV head h // 4"),
    ("head 0", attended(**heads(lambda h: h * 0)), "right for every query head with KV head 0"),
    ("clamped", attended(**heads(lambda h: h.clamp(max=1))), "right for query head h with KV head h, or the last one"),
    (
        "KV of layer 0",
        attended(
            stored_keys=lambda data: data.stored_keys[:1].expand_as(data.stored_keys),
            stored_values=lambda data: data.stored_values[:1].expand_as(data.stored_values),
        ),
        "right with the KV tokens of layer 0 in all layers",
    ),
    (
        "keys of layer 1",
        attended(stored_keys=lambda data: data.stored_keys[1:].expand_as(data.stored_keys)),
        "right with the keys of layer 1 in all layers",
    ),
    (
        "values of layer 0",
        attended(stored_values=lambda data: data.stored_values[:1].expand_as(data.stored_values)),
        "right with the values of layer 0 in all layers",
    ),
]


@pytest.mark.parametrize(("out", "text"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_named_by_what_the_numbers_are_right_for(out: torch.Tensor, text: str) -> None:
    reported = assumed(evidence(out))
    assert text in reported
    assert bool(reported) is bool(text)


@pytest.mark.parametrize(
    ("case", "count", "what"),
    [
        ("decode-gqa3x2-d80-fp32-p4-k40.9-shuffled-gauss-b2prod", 128, "the head dim, padded to a power of two"),
        ("decode-gqa3x2-d80-fp32-p4-k40.9-shuffled-gauss-b2prod", 2, "the number of KV heads"),
        ("decode-mla16-d512r64-fp32-p4-k40.9-shuffled-gauss-b2prod", 512, "v_head_dim"),
        ("decode-mla16-d512r64-fp32-p4-k40.9-shuffled-gauss-b2prod", 576, "head_dim"),
    ],
)
def test_a_scale_of_another_number_than_the_head_dim_says_which(case: str, count: int, what: str) -> None:
    schedule = make_schedule(parse_case(case))
    out = attended(lambda layer: replace(layer, scaling=count**-0.5), schedule=schedule)
    said = assumed(evidence(out, schedule))
    if what == "head_dim":
        assert said.startswith("logits are scaled by 1/sqrt(head_dim), but these layers have another scaling")
    else:
        taken = f"the scale is computed from {what}: use layer.scaling"
        assert said == f"{taken}. The result is right with a scale of 1/sqrt({count})"


def test_rows_that_are_right_need_not_have_the_mistake_and_each_row_counts_its_sink_for_itself() -> None:
    whole = expect(SCHEDULE, SCHEDULE.steps[0]).attention
    out = whole.clone()
    out[:, 0] = attended(lambda layer: replace(layer, logit_cap=0.0))[:, 0]
    assert assumed(evidence(out)).endswith("right without a soft cap")
    out[:, 1] = attended(sinks(lambda s: s + math.log(2)))[:, 1]
    assert assumed(evidence(out)) == "", "two rows, and each has a mistake of its own"
    for row, often in ((0, 3), (1, 2), (2, 3)):
        out[:, row] = attended(sinks(lambda s, often=often: s + math.log(often)))[:, row]
    assert assumed(evidence(out)).endswith("right for a sink that counts 2 or 3 times")


def test_what_is_named_makes_further_guesses_superfluous() -> None:
    right = AttendedKeys(0, 0, frozenset({1}), frozenset({1}), frozenset(), frozenset({1}), 2, {}, None)
    found = evidence(MISTAKES[0][1], attended=right)
    assert hints(found) == [assumed(found)]


def test_an_answer_with_wide_limits_that_leaves_the_error_as_it_is_is_no_cause() -> None:
    """Every logit is capped, so without a scale the answer is the right one, and only its limits are wider."""
    schedule = make_schedule(parse_case("decode-mla2-d128r64-bf16-p128-k133-reversed-negative-w11-cap1.5-b1prod"))
    out = expect(schedule, schedule.steps[0]).attention.clone()
    out[1] *= 0.2
    found = evidence(out, schedule)
    unscaled = Supposed(layers=[replace(layer, scaling=1.0) for layer in make_layers(schedule.case)])
    assert not found.comparison.right
    assert found.near(unscaled).all()
    assert not found.right_for(unscaled)
    assert "scale" not in assumed(found)


def test_nothing_is_asked_where_kv_tokens_are_wrong_or_nan() -> None:
    out = MISTAKES[0][1]
    fewer = AttendedKeys(0, 0, frozenset(), frozenset({1}), frozenset(), frozenset({1}), 2, {}, None)
    assert assumed(evidence(out, attended=fewer)) == ""
    spoilt = out.clone()
    spoilt[0, 0, 0, 0] = torch.nan
    assert assumed(evidence(spoilt)) == ""
    assert assumed(evidence(expect(SCHEDULE, SCHEDULE.steps[0]).attention)) == "", "it is right"


def test_new_rows_as_given_are_mapped_to_heads_as_the_others_are() -> None:
    given = SCHEDULE.with_numerics(new_rows_as_given=True)
    data = expect(given, given.steps[0]).data
    head = torch.arange(6) % 2
    mapped = {name: getattr(data, name)[:, :, :, head] for name in ("stored_keys", "stored_values")}
    mapped |= {name: getattr(data, name)[:, :, head] for name in ("k", "v")}
    out = attend_with_limit(given, replace(data, **mapped), True)[0].out
    assert "right for query head h with KV head h % 2" in assumed(evidence(out, given))


def test_a_pool_without_scales_is_not_asked_about_them() -> None:
    schedule = make_schedule(parse_case(CASE.replace("-kvfp8e4m3", "")))
    out = attended(schedule=schedule, kv_scales=scales(0, 0))
    assert assumed(evidence(out, schedule)) == ""


NO_GROUPS = make_schedule(parse_case(CASE.replace("gqa3x2", "mha4")))


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([0, 0, 0, 0], "right for every query head with KV head 0, or query head h with KV head h // 4, which is"),
        ([0, 1, 3, 2], "right with KV head 3 for head 2, KV head 2 for head 3"),
        ([1, 0, 3, 2], "right with KV head 1 for head 0, KV head 0 for head 1, KV head 3 for head 2 and so on"),
        ([0, 1, 2, 3], ""),
    ],
)
def test_another_kv_head_is_named_where_heads_are_no_groups(places: list[int], text: str) -> None:
    changed = {
        name: lambda data, name=name: getattr(data, name)[:, :, :, places] for name in ("stored_keys", "stored_values")
    }
    reported = assumed(evidence(attended(schedule=NO_GROUPS, **changed), NO_GROUPS))
    assert text in reported
    assert bool(reported) is bool(text)


def test_no_kv_head_is_named_where_a_head_has_that_of_none() -> None:
    out = expect(NO_GROUPS, NO_GROUPS.steps[0]).attention.clone()
    out[:, :, 2] += 1
    assert assumed(evidence(out, NO_GROUPS)) == ""


TWO_CALLS = make_schedule(parse_case(CASE.replace("decode", "extend").replace("k40.9.21", "k40.9.21-n3a3.2.1")))
PREFIXES = torch.tensor([40, 9, 21])


@pytest.mark.parametrize("whose", ["the prefix", "this step"])
@pytest.mark.parametrize(("names", "said"), [("kv", "k_scale and v_scale"), ("k", "k_scale"), ("v", "v_scale")])
def test_scales_that_reach_one_of_two_calls_are_named(names: str, said: str, whose: str) -> None:
    def without(name: str, of: int) -> Any:
        def change(data: Any) -> Any:
            before = torch.arange(data.visible.shape[-1]) < PREFIXES[:, None]
            lacking = before if whose == "the prefix" else ~before
            return getattr(data, name) / torch.where(lacking[None, :, :, None, None], data.kv_scales[of], 1.0)

        return change

    changed: dict[str, Any] = {}
    if "k" in names:
        changed["stored_keys"] = without("keys", 0)
    if "v" in names:
        changed["stored_values"] = without("values", 1)
    out = attended(schedule=TWO_CALLS, **changed)
    heavy = AttendedKeys(0, 0, frozenset({0, 1}), frozenset({0, 1}), frozenset({1}), frozenset({0, 1}), 2, {}, 0.8)
    # With sinks the total is unknown.
    for asked in (None, heavy, replace(heavy, total=1.94), replace(heavy, total=None)):
        reported = assumed(evidence(out, TWO_CALLS, attended=asked))
        assert f"right without {said} for KV tokens of {whose}, and with them for" in reported, reported
    assert assumed(evidence(out, TWO_CALLS, attended=replace(heavy, total=1.0))) == "", "1 counts twice"
    out[:, 0] += 1
    assert assumed(evidence(out, TWO_CALLS)) == "", "and something else is wrong"
