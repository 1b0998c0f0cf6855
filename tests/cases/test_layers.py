"""How many layers the model has, under which ids, and which cases have others than two from 0."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, Heads, parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.cases.layers import SETTINGS, Layers
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode, HeadShape, KVPool
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.schedule import make_schedule

CAPABILITIES = TorchNativeBackend.capabilities
DECODE = "decode-gqa2x2-d32-bf16-p4-k5.9-shuffled-gauss{}-b3prod"
RANK = Layers(3, 5)


@pytest.mark.parametrize("mode", ForwardMode)
def test_each_mode_has_layers_of_a_later_rank_with_and_without_each_option(mode: ForwardMode) -> None:
    found = [case for case in generate(CAPABILITIES, mode, "core") if case.layers.first == 5]
    options: list[Callable[[Case], object]] = [
        lambda case: case.window >= 0,
        lambda case: case.logit_cap > 0,
        lambda case: case.sinks,
        lambda case: case.kv_dtype == "fp8_e4m3",
        lambda case: case.bucket > case.bs,
    ]
    assert [{bool(has(case)) for case in found} for has in options] == [{False, True}] * len(options)
    assert {case.layers.first for case in generate(CAPABILITIES, mode, "smoke")} == {0, 5}


@pytest.mark.parametrize("mode", ForwardMode)
def test_one_query_head_and_one_kv_head_where_mha_is_declared(mode: ForwardMode) -> None:
    def lone(tier: str, **declared: object) -> list[Heads]:
        cases = generate(CAPABILITIES.with_changes(**declared), mode, tier)
        return [case.heads for case in cases if case.heads.q_heads == case.heads.kv_heads == 1 and not case.rope_dim]

    assert lone("core") == [Heads("mha", 1, 1)]
    assert lone("core", heads={"families": {"mla", "mha"}}) == [Heads("mha", 1, 1)]
    assert lone("core", heads={"families": {"gqa", "mqa"}}) == lone("smoke") == []


def test_nothing_repeats_from_the_first_layer_to_the_third_but_window_and_soft_cap() -> None:
    layers = make_layers(parse_case(DECODE.format("-kvfp8e4m3-w4-cap1.5-sink-layers3from5")))
    first, _, third = layers
    assert [layer.layer_id for layer in layers] == [5, 6, 7]
    assert (first.sliding_window_size, first.logit_cap) == (third.sliding_window_size, third.logit_cap)
    assert (first.scaling, first.k_scale, first.v_scale) != (third.scaling, third.k_scale, third.v_scale)
    for own in zip(*SETTINGS, strict=True):
        assert len(set(own)) == len(SETTINGS)
    assert first.sinks is not None
    assert third.sinks is not None
    assert not torch.equal(first.sinks, third.sinks)


def test_every_window_pattern_of_three_layers_is_met() -> None:
    case = parse_case(DECODE.format("-w4-layers3from5"))
    met = {tuple(layer.sliding_window_size for layer in make_layers(case.with_seed(seed))) for seed in range(40)}
    assert met == {(4, -1, 4), (-1, 4, -1), (4, 11, 4), (11, 4, 11)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_numbers_of_a_step_have_as_many_layers(count: int) -> None:
    schedule = make_schedule(parse_case(DECODE.format(f"-layers{count}from7")))
    data = make_step_data(schedule, schedule.steps[0])
    assert {len(data.q), len(data.k), len(data.v), len(data.stored_keys), data.kv_scales.shape[1]} == {count}


def test_all_modes_of_a_mixed_case_have_its_layers() -> None:
    case = parse_case(DECODE.format("-layers3from5").replace("prod", "prod-multi_mode"))
    for other in co_residents(case, set(ForwardMode), 8, 1):
        assert make_layers(other) == make_layers(case)


@pytest.mark.parametrize(
    ("word", "said"),
    [("layers0from5", "number of layers is 0; expected"), ("layers7from0", "number of layers is 7; expected")],
)
def test_no_layer_and_more_than_there_are_settings_for_are_refused(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_case(DECODE.format(f"-{word}"))
    with pytest.raises(ValueError, match="from id -1"):
        Layers(2, -1)


def test_the_default_is_not_written() -> None:
    with pytest.raises(ValueError, match="not in its usual form"):
        parse_case(DECODE.format("-layers2from0"))


def test_a_loop_has_any_layers_of_one_shape() -> None:
    loop = parse_case("draft-decode-mha2-d32-bf16-p4-k5-topk1steps3-loop6-shuffled-gauss-b2prod")
    assert parse_case(f"{loop.id.removesuffix('-b2prod')}-layers3from5-b2prod") == loop.with_changes(layers=RANK)
    with pytest.raises(ValueError, match="loop and heads by layer: all layers of a loop have heads of one shape"):
        loop.with_changes(layers=Layers(shapes=(HeadShape(2, 2, 32), HeadShape(2, 1, 32))))


def test_the_pool_is_asked_by_layer_id() -> None:
    layers = make_layers(parse_case(DECODE.format("-layers3from5")))
    pool = KVPool(16, 4, layers, torch.bfloat16, "cpu")
    row = torch.ones(1, 2, 32)
    pool.set_kv_buffer(layers[1], torch.tensor([6]), row, 2 * row)
    key, value = pool.get_kv_buffer(6)
    assert torch.equal(key[6], row[0].bfloat16())
    assert torch.equal(value[6], 2 * row[0].bfloat16())
    assert [bool(pool.get_key_buffer(layer.layer_id).any()) for layer in layers] == [False, True, False]
    for asked in (0, 4, 8, -1):
        with pytest.raises(KeyError, match=re.escape(f"the KV pool has no layer of id {asked}; it has 5, 6, 7")):
            pool.get_key_buffer(asked)
        for get in (pool.get_value_buffer, pool.get_kv_pages, pool.get_layer_buffer):
            with pytest.raises(KeyError, match="it has 5, 6, 7"):
                get(asked)
        with pytest.raises(KeyError, match="it has 5, 6, 7"):
            pool.set_kv_buffer(replace(layers[0], layer_id=asked), torch.tensor([6]), row, row)
