"""Layers that differ in their heads: which shapes they have, and how each lies in the shape of its case."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.head_shapes import HeadMap, declared_shapes, wrong_with_shapes
from attn_testkit.cases.layers import Layers
from attn_testkit.catalogue.not_covered import describe_not_covered
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode, HeadShape
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.schedule import make_schedule

CAPABILITIES = TorchNativeBackend.capabilities
WHOLE = HeadShape(8, 4, 6)
PARTS = [WHOLE, HeadShape(8, 2, 6), HeadShape(8, 1, 4), HeadShape(4, 2, 6), HeadShape(4, 1, 3), HeadShape(2, 1, 6)]
CASE = "decode-gqa2x4-d64-bf16-p4-k15.22.6-shuffled-{}{}-layers3from5by8x4d32.8x2d64-b4prod"


@pytest.mark.parametrize("shape", PARTS, ids=str)
def test_every_query_head_of_a_layer_finds_its_own_kv_head_in_the_shape_of_the_case(shape: HeadShape) -> None:
    each = HeadMap(shape, WHOLE)
    q, k = torch.randn(3, shape.num_qo_heads, shape.head_dim), torch.randn(3, shape.num_kv_heads, shape.head_dim)
    whole_q, whole_k = each.q_whole(q), each.kv_whole(k)
    assert whole_q.shape == (3, 8, 6)
    assert whole_k.shape == (3, 4, 6)
    assert torch.equal(each.q_part(whole_q), q)
    assert torch.equal(each.kv_part(whole_k), k)
    for head in range(shape.num_qo_heads):
        own = k[:, head // (shape.num_qo_heads // shape.num_kv_heads)]
        assert torch.equal(whole_k[:, head // 2, : shape.head_dim], own)
    assert whole_q.count_nonzero() == q.count_nonzero(), "what a layer lacks is zeros"
    assert not whole_k[..., shape.head_dim :].any()
    assert not whole_k[:, shape.num_qo_heads // 2 :].any()


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([(8, 4, 6), (8, 2, 4)], ""),
        ([(8, 2, 6), (4, 2, 4)], ""),
        ([(4, 2, 6), (4, 2, 4)], "as many query heads"),
        ([(16, 8, 6), (4, 2, 4)], "as many query heads"),
        ([(8, 4, 5), (4, 2, 4)], "widest"),
        ([(8, 2, 6), (8, 1, 4)], "fewest"),
        ([(8, 8, 6), (8, 4, 4)], "fewest"),
        ([(8, 4, 6), (6, 2, 4)], "multiple"),
    ],
)
def test_shapes_that_do_not_lie_in_that_of_the_case_are_refused(shapes: list[tuple[int, ...]], text: str) -> None:
    wrong = wrong_with_shapes(WHOLE, [HeadShape(*each) for each in shapes])
    assert text in wrong
    assert bool(wrong) is bool(text)


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"heads": {"families": {"mha"}}},
        {"heads": {"families": {"mqa"}}},
        {"heads": {"families": {"mqa"}, "gqa_ratios": {8}}},
        {"heads": {"families": {"gqa"}, "gqa_ratios": {3}}},
        {"heads": {"families": {"gqa"}, "gqa_ratios": {2}, "head_dims": {64}}},
        {"heads": {"families": {"mha", "mqa"}, "head_dims": {256}}},
        {"heads": {"families": {"gqa"}, "gqa_ratios": {6, 8}}},
        {"heads": {"head_dims": {128, 192, 576}}},
    ],
)
def test_pairs_are_of_declared_heads_and_dims_and_lie_in_a_case(declared: dict[str, set[int] | set[str]]) -> None:
    asked = CAPABILITIES.with_changes(**declared)
    pairs = declared_shapes(asked)
    assert len(pairs) == 2
    for pair in pairs:
        assert pair[0] != pair[1]
        for heads, kv_heads, dim in pair:
            ratio = heads // kv_heads
            family = "mha" if ratio == 1 else "mqa" if kv_heads == 1 else "gqa"
            assert family in asked.heads.families
            assert ratio == 1 or ratio in asked.heads.gqa_ratios
            assert dim in sorted(asked.heads.head_dims)[:2]
        most, least = max(each[0] for each in pair), min(each[0] // each[1] for each in pair)
        assert wrong_with_shapes(HeadShape(most, most // least, max(each[2] for each in pair)), pair) == ""


def test_of_many_the_first_layer_has_more_kv_heads_and_a_narrower_dim_then_less_of_everything() -> None:
    windowed, draft = declared_shapes(CAPABILITIES)
    assert windowed == (HeadShape(8, 4, 32), HeadShape(8, 2, 64))
    assert draft == (HeadShape(4, 2, 32), HeadShape(8, 4, 64))
    one_shape = CAPABILITIES.with_changes(heads={"families": {"mqa"}, "gqa_ratios": {8}, "head_dims": {64}})
    assert declared_shapes(one_shape) == []


def of_shapes(mode: ForwardMode, tier: str = "core", **declared: object) -> list[Case]:
    return [case for case in generate(CAPABILITIES.with_changes(**declared), mode, tier) if case.layers.shapes]


@pytest.mark.parametrize("mode", ForwardMode)
def test_cases_have_shapes_where_they_are_declared_with_options_without_and_in_groups(mode: ForwardMode) -> None:
    every = of_shapes(mode)
    places = 3 + (mode is not ForwardMode.DRAFT_DECODE)
    *found, split = every[:places]
    assert {word for case in every[places:] for word in case.variants} >= {"given_out", "zero_length_padding"}
    assert max(split.prefixes) > 512 > max(prefix for case in found for prefix in case.prefixes)
    assert len({shape.num_qo_heads for shape in split.layers.shapes}) == 2, "partial results need more room"
    assert [case.layers.groups for case in found] == [False, False] + [True] * (mode is not ForwardMode.DRAFT_DECODE)
    assert [case.sinks for case in found[:2]] == [True, False]
    assert {case.layers.shapes for case in found} == set(declared_shapes(CAPABILITIES))
    assert all(case.page_size > 1 and case.layers.first == 5 for case in found)
    assert [parse_case(case.id) for case in (*found, split)] == [*found, split]
    assert of_shapes(mode, heads={"heads_by_layer": False}) == of_shapes(mode, heads={"families": {"mla"}}) == []
    assert len(of_shapes(mode, "smoke")) == (mode is ForwardMode.DECODE), "a case of smoke in the first mode"
    assert not any(case.layers.groups for case in of_shapes(mode, kv_pool={"kv_groups": False}))


def test_a_tier_that_tries_no_shapes_says_so() -> None:
    mode = ForwardMode.EXTEND
    for declared, said in ((CAPABILITIES, True), (CAPABILITIES.with_changes(heads={"families": {"mla"}}), False)):
        not_covered = describe_not_covered(declared, [mode], generate(declared, mode, "smoke"))
        assert any("heads by layer" in phrase for phrase in not_covered) is said
    assert not any(
        "heads by layer" in phrase
        for phrase in describe_not_covered(CAPABILITIES, [mode], generate(CAPABILITIES, mode, "core"))
    )


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (CASE.format("gauss", "").replace("-b4prod", "-lseprefix-b4prod"), "KV splits and heads by layer"),
        (CASE.format("gauss", "").replace("gqa2x4-d64", "mla8-d64r32"), "MLA"),
        (CASE.format("gauss", "").replace("d64-bf16", "d32-bf16"), "widest"),
        (CASE.format("gauss", "").replace("8x2d64-", "8x4d32-"), "two different shapes"),
        (CASE.format("gauss", "").replace("layers3", "layers1"), "two different shapes"),
    ],
)
def test_what_does_not_go_with_shapes_is_refused_and_named(case: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_case(case)


def test_layers_have_heads_scale_and_sinks_of_their_own() -> None:
    case = parse_case(CASE.format("gauss", "-sink"))
    layers = make_layers(case)
    assert [layer.head_shape for layer in layers] == [(8, 4, 32), (8, 2, 64), (8, 4, 32)]
    assert [layer.v_head_dim for layer in layers] == [32, 64, 32]
    assert [layer.scaling * math.sqrt(layer.head_dim) for layer in layers] == pytest.approx([0.5, 1.5, 0.75])
    draft = replace(case, layers=Layers(3, 5, shapes=(HeadShape(4, 2, 32), HeadShape(8, 4, 64))))
    assert [len(layer.sinks) for layer in make_layers(draft) if layer.sinks is not None] == [4, 8, 4]
    minimal = make_layers(parse_case("decode-gqa2x4-d64-bf16-p4-k15.22.6-shuffled-gauss-layers3from5-b4prod"))
    assert [layer.scaling * 8 for layer in minimal] == [0.5, 1.5, 0.75]


@pytest.mark.parametrize("data", ["gauss", "peaked", "negative", "rising_logits", "one_hot"])
@pytest.mark.parametrize("pool", ["", "-kvfp8e4m3"])
def test_numbers_are_of_the_layers_own_heads_and_zeros_beside_them(data: str, pool: str) -> None:
    schedule = make_schedule(parse_case(CASE.format(data, pool)))
    found = make_step_data(schedule, schedule.steps[0])
    for index, each in enumerate(schedule.case.head_maps):
        assert torch.equal(each.q_whole(each.q_part(found.q[index])), found.q[index])
        for rows in (found.k[index], found.v[index], found.keys[index], found.values[index]):
            assert torch.equal(each.kv_whole(each.kv_part(rows)), rows)
        assert each.q_part(found.q[index]).any(-1).all()
        assert each.kv_part(found.k[index]).any(-1).all()


@pytest.mark.parametrize("start", [0, 8])
def test_a_probe_names_as_many_keys_as_each_layer_has_dims(start: int) -> None:
    schedule = make_schedule(parse_case(CASE.format("gauss", "").replace("15.22.6", "15.90.6")))
    values = make_step_data(schedule, schedule.steps[0], f"probe.1.{start}").values
    for index, each in enumerate(schedule.case.head_maps):
        own, dim = each.kv_part(values[index, 1]), each.layer.head_dim
        assert torch.equal(own[start : start + dim, 0], torch.eye(dim, dtype=torch.float64))
        assert own.sum() == dim * each.layer.num_kv_heads
