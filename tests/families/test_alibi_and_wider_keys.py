"""ALiBi and keys that are wider than values: what is right, computed by hand, and how the pool holds it."""

from __future__ import annotations

import pytest
import torch
from attn_testkit.runner_modes.harness import context_for

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.alibi import ALIBI
from attn_testkit.cases.features.head_dim import HEAD_DIM
from attn_testkit.contract import AttentionLayer, ForwardMode, KVLayer, KVPool, KVPoolSpec, Unsupported
from attn_testkit.contract.kv_layouts import OWN
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.attention import attend
from attn_testkit.steps.data import held_kv, make_layers, make_step_data, new_kv, pool_image
from attn_testkit.steps.schedule import make_schedule
from attn_testkit.watches.pool_watch import PoolWatch

DECLARED = TorchNativeBackend.capabilities
CPU = torch.device("cpu")
ALIBI_CASE = "{}-gqa2x2-d32-fp32-p4-k19.6{}-shuffled-gauss-w7-alibi-b2prod"
CASES = [
    ALIBI_CASE.format("decode", ""),
    ALIBI_CASE.format("extend", "-n4a3.4"),
    ALIBI_CASE.format("decode", "").replace("-w7-alibi", ""),
    "decode-gqa2x2-d16r32-fp32-p4-k19.6-shuffled-gauss-w7-cap1.5-sink-b2prod",
    "extend-mha2-d16r32-bf16-p4-k19.6-n4a3.4-shuffled-gauss-alibi-b2prod",
]


@pytest.mark.parametrize("case_id", CASES)
def test_every_row_is_attention_with_the_bias_of_its_distance_and_values_of_their_width(case_id: str) -> None:
    case = parse_case(case_id)
    schedule = make_schedule(case)
    found = expect(schedule, schedule.steps[0])
    data = found.data
    for place, layer in enumerate(make_layers(case)):
        keys, values = data.keys[place], data.values[place]
        assert (keys.shape[-1], values.shape[-1]) == (layer.head_dim, layer.v_head_dim)
        for row, request in enumerate(data.row_request.tolist()):
            last = int(data.row_key[row])
            first = max(0, last - layer.sliding_window_size) if layer.sliding_window_size >= 0 else 0
            for head in range(layer.tp_q_head_num):
                kv_head, seen = head // layer.q_per_kv, slice(first, last + 1)
                logits = keys[request, seen, kv_head] @ data.q[place, row, head].double() * layer.scaling
                if layer.alibi_slopes is not None:
                    logits = logits + layer.alibi_slopes[head].double() * torch.arange(first - last, 1)
                if layer.logit_cap:
                    logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
                if layer.sinks is not None:
                    logits = torch.cat([logits, layer.sinks[head : head + 1].double()])
                weights = torch.softmax(logits, 0)[: last + 1 - first]
                want = weights @ values[request, seen, kv_head]
                assert torch.allclose(found.attention[place, row, head], want, rtol=1e-10, atol=1e-12)


def test_slopes_are_those_of_the_second_of_two_ranks_and_differ_by_layer() -> None:
    first, second = (layer.alibi_slopes for layer in make_layers(parse_case(CASES[0])))
    assert first is not None
    assert second is not None
    assert first.tolist() == [2.0**-5, 2.0**-6, 2.0**-7, 2.0**-8]
    assert torch.equal(second, 2 * first)


def test_a_large_bias_makes_the_limit_of_a_logit_larger_and_nothing_else() -> None:
    schedule = make_schedule(parse_case(CASES[0]))
    data, layers = make_step_data(schedule, schedule.steps[0]), make_layers(schedule.case)
    plain = make_layers(parse_case(CASES[2]))
    grown = attend(data, layers).logit_noise - attend(data, plain).logit_noise
    for place, layer in enumerate(layers):
        assert layer.alibi_slopes is not None
        want = layer.alibi_slopes.double() * data.positions[:, None]
        assert torch.allclose(grown[place, ..., 0], want)


@pytest.mark.parametrize(
    ("word", "with_it"),
    [("cap1.5", "soft cap"), ("sink", "sinks"), ("lsewhole", "KV splits"), ("noncausal", "ALiBi")],
)
def test_what_servers_do_in_different_orders_is_not_tried_together(word: str, with_it: str) -> None:
    base = "extend-gqa2x2-d32-fp32-p4-k19.6-n4a3.4-shuffled-gauss{}-alibi{}-b2prod{}"
    places = {"cap1.5": ("-cap1.5", "", ""), "sink": ("-sink", "", ""), "lsewhole": ("", "-lsewhole", "")}
    before, behind, last = places.get(word, ("", "", f"-{word}"))
    with pytest.raises(ValueError, match=with_it):
        parse_case(base.format("", f"{before}{behind}", last))


def layer(k: int, v: int, number: int = 0) -> AttentionLayer:
    return AttentionLayer(number, tp_q_head_num=2, tp_k_head_num=2, head_dim=k, v_head_dim=v, scaling=0.1)


def test_a_pool_of_wider_keys_keeps_k_and_v_in_memory_of_their_own() -> None:
    pool = KVPool(8, 4, (layer(48, 16), layer(48, 16, 1)), torch.float32, CPU)
    keys, values = pool.get_kv_buffer(1)
    assert (keys.shape, values.shape) == ((12, 2, 48), (12, 2, 16))
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert [page.shape[1:] for page in pool.get_kv_pages(0)] == [(4, 2, 48), (4, 2, 16)]
    slots = torch.tensor([5, 9])
    pool.set_kv_buffer(layer(48, 16), slots, torch.ones(2, 2, 48), torch.full((2, 2, 16), 2.0))
    assert pool.get_value_buffer(0)[slots].unique().tolist() == [2.0]
    assert pool.get_value_buffer(0).sum() == 2 * 2 * 16 * 2.0
    with pytest.raises(ValueError, match="no buffer"):
        pool.get_layer_buffer(0)


def test_other_layouts_have_k_and_v_of_one_width() -> None:
    with pytest.raises(ValueError, match="'hnd' has K and V of one width"):
        KVPool(8, 4, (layer(48, 16),), torch.float32, CPU, "hnd")
    with pytest.raises(ValueError, match="the same width"):
        parse_case("decode-gqa2x2-d16r32-fp32-p4-k19.6-shuffled-gauss-kvhnd-b2prod")


@pytest.mark.parametrize(("width", "fits"), [(16, True), (48, False)])
def test_a_custom_pool_has_values_of_their_own_width(width: int, fits: bool) -> None:
    def own(spec: KVPoolSpec) -> list[KVLayer]:
        keys, values = (torch.zeros(spec.pages, 4, 2, each) for each in (48, width))
        return [KVLayer(keys, values)]

    if fits:
        assert KVPool(8, 4, (layer(48, 16),), torch.float32, CPU, OWN, own).get_value_buffer(0).shape[-1] == 16
    else:
        with pytest.raises(ValueError, match=r"the values of layer 0 have shape .* 2 heads of 16"):
            KVPool(8, 4, (layer(48, 16),), torch.float32, CPU, OWN, own)


@pytest.mark.parametrize("kv", ["", "-kvfp8e4m3"])
def test_the_watch_of_a_pool_gives_back_what_it_put_and_names_a_written_value(kv: str) -> None:
    case = parse_case(f"decode-gqa2x2-d16r32-bf16-p4-k19.6-shuffled-gauss{kv}-b2prod")
    schedule = make_schedule(case)
    step = schedule.steps[0]
    data = make_step_data(schedule, step)
    context = context_for([schedule], CPU, make_layers(case))
    watch = PoolWatch(context.kv_pool)
    watch.fill("held", lambda: held_kv(step, data, after=True), float("nan"))
    slots, rows = new_kv(data)
    taken = watch.whole(watch._now.take(slots).numpy(), len(slots))
    assert taken.tobytes() == rows.contiguous().view(torch.uint8).numpy().tobytes()
    assert not rows[:, 1, ..., 16:].contiguous().view(torch.uint8).any(), "what no pool holds is 0"
    value = context.kv_pool.get_value_buffer(1)
    assert value.shape[-1] == 16
    image = pool_image(schedule, step, data, False, after=True)
    assert torch.equal(value[slots].view(torch.uint8), image[1, 1, slots][..., :16].contiguous().view(torch.uint8))
    value.view(torch.uint8)[3, 1, 5] ^= 1
    due = torch.tensor([0])
    (changed, size), *_ = watch.look(context.kv_pool.num_slots, due, 1)
    marks = changed.flatten()[:size].view(context.kv_pool.num_slots, -1).any(1)
    assert marks.nonzero().flatten().tolist() == [3]


def test_a_backend_refuses_other_differences_of_widths_and_an_undeclared_bias() -> None:
    class Narrow(TorchNativeBackend):
        capabilities = DECLARED.with_changes(heads={"wider_keys": {64}}, options={"alibi": ()})

    wide = make_schedule(parse_case("decode-gqa2x2-d32r32-fp32-p4-k19.6-shuffled-gauss-b2prod"))
    with pytest.raises(Unsupported, match=r"columns by which keys are wider than values, 32"):
        Narrow(context_for([wide], CPU, make_layers(wide.case)))
    biased = make_schedule(parse_case(CASES[0]))
    with pytest.raises(Unsupported, match="ALiBi in decode"):
        Narrow(context_for([biased], CPU, make_layers(biased.case)))


def test_undeclared_contexts_have_a_bias_or_wider_keys_only_where_those_are_not_declared() -> None:
    plain = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k19.6-shuffled-gauss-b2prod"))
    context = context_for([plain], CPU, make_layers(plain.case))
    asked = [each for feature in (ALIBI, HEAD_DIM) for each in feature.undeclared]  # type: ignore[union-attr]
    partly = DECLARED.with_changes(options={"alibi": {"extend"}}, heads={"head_dims": {32}})
    found = [what for each in asked if (answer := each(partly, context)) for what in answer[:1]]
    assert found == ["ALiBi", "head dim 48", "keys wider than values by 16"]
    every = DECLARED.with_changes(
        options={"alibi": [*ForwardMode]}, heads={"wider_keys": {16, 32, 48}, "head_dims": {32, 48, 80, 24}}
    )
    assert not any(each(every, context) for each in asked)
