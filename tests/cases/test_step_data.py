"""The numbers of a step, and the KV pool around them, against loops over requests, rows and slots."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import KVPool
from attn_testkit.steps.data import (
    DTYPES,
    StepData,
    as_stored,  # the rule that KVPool.set_kv_buffer must agree with
    dequantised,
    make_layers,
    make_step_data,
    of_fp8_range,
    pool_image,
)
from attn_testkit.steps.foreign_slots import PLACES, marked_slots, place_pattern
from attn_testkit.steps.patterns import LARGEST_FP8
from attn_testkit.steps.schedule import Schedule, Step, make_schedule, only

IDS = [
    "decode-gqa2x2-d32-bf16-p4-k0.5.20-shuffled-gauss-b3prod",
    "target-verify-gqa2x2-d32-fp16-p4-k5.9-t0.0.1.1.3-interleaved-gauss-b2prod",
    "draft-extend-mqa4-d32-bf16-p16-k5.9-n4a1.3-reversed-gauss-b2prod",
    "draft-extend-v2-mha2-d32-bf16-p16-k7.9-n4a1.3-shared-shifted-kvfp8e4m3-b2prod",
    "decode-mla2-d32r16-bf16-p16-k5.9-shuffled-gauss-b2prod",
]
FP8 = IDS[3]


def first_step(case_id: str) -> tuple[Schedule, Step, StepData]:
    schedule = make_schedule(parse_case(case_id))
    return schedule, schedule.steps[0], make_step_data(schedule, schedule.steps[0])


@pytest.mark.parametrize("case_id", IDS)
def test_rows_positions_and_slots_follow_the_requests(case_id: str) -> None:
    _, step, data = first_step(case_id)
    rows = [(b, j) for b, request in enumerate(step.requests) for j in range(request.new)]
    assert list(zip(data.row_request.tolist(), data.row_offset.tolist(), strict=True)) == rows
    for row, (b, j) in enumerate(rows):
        request = step.requests[b]
        assert data.positions[row] == request.prefix + (request.tree.depths[j] if request.tree else j)
        assert data.out_cache_loc[row] == request.slots[request.prefix + j]
        at = request.prefix + j
        keys = as_stored(data.k[:, row : row + 1], data.kv_scales[0].view(-1, 1, 1, 1).float(), data.stored_keys.dtype)
        assert torch.equal(keys[:, 0].float(), data.stored_keys[:, b, at].float())


@pytest.mark.parametrize("case_id", IDS)
@pytest.mark.parametrize("finite_tails", [False, True])
def test_the_pool_slot_by_slot(case_id: str, finite_tails: bool) -> None:
    schedule, step, data = first_step(case_id)
    page = schedule.case.page_size
    before, after = (pool_image(schedule, step, data, finite_tails, after=after) for after in (False, True))
    parts = [data.stored_keys] + ([] if data.stored_values is None else [data.stored_values])
    assert before.shape[:3] == (2, len(parts), (schedule.num_pages + 1) * page)
    assert before.dtype == after.dtype == data.stored_keys.dtype
    owner: dict[int, tuple[int, int]] = {}
    for b, request in enumerate(step.requests):
        owner |= {int(slot): (b, token) for token, slot in enumerate(request.slots)}
    tails: set[int] = set()
    for request in step.requests:
        last = int(request.slots[-1])
        tails |= set(range(last + 1, (last // page + 1) * page))
    for slot in range(before.shape[2]):
        for part, source in enumerate(parts):
            old, new = before[:, part, slot].float(), after[:, part, slot].float()
            if slot in owner:
                b, token = owner[slot]
                assert torch.equal(new, source[:, b, token].float())
                in_prefix = token < step.requests[b].prefix
                assert torch.equal(old, new) if in_prefix else bool(old.isnan().all())
            elif finite_tails and slot in tails:
                assert bool((old.abs() >= 100).all()), "large: a tail that is weighed shows"
                assert torch.equal(old, new)
            else:
                assert bool(old.isnan().all())
                assert bool(new.isnan().all())


@pytest.mark.parametrize("case_id", [IDS[0], FP8])
def test_unowned_slots_hold_a_number_where_one_is_asked_for(case_id: str) -> None:
    schedule, step, data = first_step(case_id)
    for tails in (False, True):
        before = pool_image(schedule, step, data, tails, after=False, unowned=0.0)
        owned = np.concatenate([request.slots for request in step.requests])
        rest = np.setdiff1d(np.arange(before.shape[2]), owned)
        assert bool((before[:, :, torch.from_numpy(rest)].float() == 0).all())


@pytest.mark.parametrize("case_id", IDS)
@pytest.mark.parametrize("name", PLACES)
def test_the_slots_of_a_place_hold_a_value_of_one_and_no_others_do(case_id: str, name: str) -> None:
    schedule, step, _ = first_step(case_id)
    page, dim, pattern = schedule.case.page_size, schedule.case.head_dim, place_pattern(1, name)
    data = make_step_data(schedule, step, pattern)
    minimal, marked = (
        pool_image(schedule, step, data, False, after=True, unowned=0.0, marked=word).float() for word in ("", pattern)
    )
    slots = marked_slots(step, pattern, page, minimal.shape[2])
    assert bool((marked[:, -1, slots, :, :dim] == 1).all()), "the last part holds the values, MLA's rope behind them"
    marked[:, -1, slots, :, :dim] = 0.0
    assert torch.equal(marked, minimal)


@pytest.mark.parametrize("dtype", ["same", "fp8_e4m3"])
def test_keys_and_values_are_stored_as_the_pool_of_a_server_stores_them(dtype: str) -> None:
    case = parse_case(FP8.replace("-kvfp8e4m3", "" if dtype == "same" else "-kvfp8e4m3"))
    layers = make_layers(case)
    pool = KVPool(64, 16, layers, DTYPES["bf16" if dtype == "same" else dtype], torch.device("cpu"))
    rng = torch.Generator().manual_seed(0)
    # Some are beyond the largest number of FP8, 448, and must be clamped.
    k, v = (torch.randn(2, 48, 2, 32, generator=rng).mul(300).bfloat16() for _ in range(2))
    loc = torch.arange(16, 64)
    for index, layer in enumerate(layers):
        pool.set_kv_buffer(layer, loc, k[index], v[index])
        for rows, scales, got in (
            (k, [x.k_scale for x in layers], pool.get_key_buffer(index)),
            (v, [x.v_scale for x in layers], pool.get_value_buffer(index)),
        ):
            assert torch.equal(
                as_stored(rows, torch.tensor(scales).view(-1, *[1] * (rows.dim() - 1)), pool.dtype)[index].float(),
                got[loc].float(),
            )


def test_layers_differ_in_scale_and_scales_are_one_without_fp8() -> None:
    minimal, fp8 = make_layers(parse_case(IDS[0])), make_layers(parse_case(FP8))
    base = 1 / math.sqrt(32)
    assert [layer.scaling for layer in minimal] == [0.5 * base, 1.5 * base]
    assert [(layer.k_scale, layer.v_scale) for layer in minimal] == [(1, 1), (1, 1)]
    assert [(layer.k_scale, layer.v_scale) for layer in fp8] == [(0.25, 0.5), (0.5, 2)]
    mla = make_layers(parse_case(IDS[4].replace("-gauss", "-gauss-kvfp8e4m3")))
    assert [(layer.k_scale, layer.v_scale) for layer in mla] == [(0.25, 0.25), (0.5, 0.5)]
    assert [layer.scaling for layer in mla] == pytest.approx([0.5 / math.sqrt(48), 1.5 / math.sqrt(48)], rel=1e-12)
    assert [(layer.head_dim, layer.v_head_dim, layer.kv_lora_rank) for layer in mla] == [(48, 32, 32)] * 2


def test_sinks_weigh_about_as_much_as_the_keys_of_the_longest_request_in_every_other_head() -> None:
    case = parse_case("decode-gqa4x2-d32-bf16-p4-k0.99-shuffled-gauss-sink-b2prod")
    found = [[x.sinks for x in make_layers(case.with_seed(seed))] for seed in range(80)]
    sinks = torch.stack([torch.stack([x for x in pair if x is not None]) for pair in found])
    means, log = sinks.mean(0), math.log(100)
    assert torch.allclose(means[0], torch.tensor([1 + log, 1.0] * 4), atol=0.6)
    assert torch.allclose(means[1], torch.tensor([log - 0.5, -0.5] * 4), atol=0.6)
    assert float((sinks - means).std()) == pytest.approx(1.5, rel=0.1)
    # One key weighs as much as none: its logarithm is 0.
    lone = parse_case("decode-gqa4x2-d32-bf16-p4-k0-shuffled-gauss-sink-b1prod")
    firsts = [make_layers(lone.with_seed(seed))[0].sinks for seed in range(80)]
    assert torch.allclose(torch.stack([x for x in firsts if x is not None]).mean(0), torch.ones(8), atol=0.6)


def test_a_large_query_of_an_fp8_pool_moves_its_size_into_the_keys() -> None:
    """Products stay: what the query loses in powers of two, the key gains."""
    case = parse_case("decode-mha2-d64-fp16-p16-k6-shuffled-negative-kvfp8e4m3-b1prod")
    minimal = parse_case("decode-mha2-d64-fp16-p16-k6-shuffled-negative-b1prod")
    logits = []
    for each in (case, minimal):
        schedule = make_schedule(each)
        data = make_step_data(schedule, schedule.steps[0])
        logits.append(float(data.q[0, 0, 0].double() @ data.keys[0, 0, 0, 0]))
        if each is case:
            assert 128 < float(data.q.abs().max()) <= 256
    assert logits[0] == logits[1]


@pytest.mark.parametrize(
    ("largest", "factor"),
    [(0.5, 1), (1.0, 1), (128.5, 1), (256.0, 1), (256.5, 2), (512.0, 2), (513.0, 4), (5000.0, 32)],
)
def test_a_query_is_halved_until_the_range_holds_it_and_not_once_more(largest: float, factor: float) -> None:
    q, k = torch.tensor([[-largest, 0.25, 3.0]]), torch.tensor([[3.0, -5.0, 0.3]])
    small, large = of_fp8_range(q, k, held=True, most=256.0)
    assert torch.equal(small, (q / factor).to(torch.float8_e4m3fn).float())
    assert torch.equal(large, k * factor)
    assert float(small.abs().max()) <= 256
    free, large = of_fp8_range(q, k, held=False, most=256.0)
    assert torch.equal(free, q / factor)
    assert torch.equal(large, k * factor)


@pytest.mark.parametrize(("largest", "factor"), [(256.5, 1), (LARGEST_FP8, 1), (LARGEST_FP8 + 0.5, 2)])
def test_loud_queries_go_up_to_what_fp8_holds(largest: float, factor: float) -> None:
    found, _ = of_fp8_range(torch.tensor([largest]), torch.tensor([1.0]), held=False, most=LARGEST_FP8)
    assert found.item() == largest / factor


def test_every_fp8_number_means_what_torch_takes_it_for_times_the_scale_of_its_layer() -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(2, 1)
    scales = torch.tensor([[0.25], [2.0]], dtype=torch.float64)
    want = stored.double() * scales
    assert want.isnan().sum() == 4
    assert torch.equal(dequantised(stored, scales).nan_to_num(0.5), want.nan_to_num(0.5))
    assert torch.equal(dequantised(stored.T, scales.T).nan_to_num(0.5), want.T.nan_to_num(0.5)), "a strided view"


def test_steps_of_one_seed_and_the_same_requests_share_their_numbers_and_no_others_do() -> None:
    schedule, first, data = first_step(IDS[0])
    again = replace(first, name="again", label="again", stored=True)
    assert make_step_data(schedule, again) is data
    assert make_step_data(schedule, first, None) is data, "however it is asked for"
    assert make_step_data(schedule, first, "mean") is not data
    assert make_step_data(schedule, replace(first, seed=first.seed + 1)) is not data
    lone = make_step_data(schedule, only(first, 1))
    unrelated = make_step_data(schedule, replace(only(first, 1), part_of=None))
    assert torch.equal(lone.q, data.q[:, 1:2])
    assert not torch.equal(unrelated.q, lone.q), "drawn for a batch of one"


@pytest.mark.parametrize(
    "case_id", [*IDS, "extend-gqa8x2-d32-bf16-p16-k130.9.1.40-n13a7.40.3.1-shuffled-gauss-qqbias-b5prod"]
)
def test_each_tensor_has_the_axes_that_its_field_names(case_id: str) -> None:
    _, step, data = first_step(case_id)
    widest = max(request.new for request in step.requests)
    lengths = {"layer": len(data.q), "request": step.bs, "token": step.tokens, "row": widest, "key": max(step.lens)}
    for each in fields(StepData):
        tensor, axes = getattr(data, each.name), each.metadata.get("axes", "").split()
        if isinstance(tensor, torch.Tensor) and each.name != "kv_scales":
            expected = [1 if each.name == "qq_bias" and axis == "layer" else lengths[axis] for axis in axes]
            assert axes, each.name
            assert list(tensor.shape[: len(axes)]) == expected, each.name
