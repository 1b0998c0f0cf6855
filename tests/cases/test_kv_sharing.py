"""Layers that read the keys and values of an earlier layer."""

from __future__ import annotations

import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.triton import TritonBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import KV_LAYOUTS, ForwardMode, KVPool
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import i_kv_sharing as faults

CASE = "decode-gqa2x2-d64-bf16-p16-k9.70.1-shuffled-gauss-layers3from5-kvsharing-b4prod"
EXTEND = "extend-gqa2x2-d64-bf16-p16-k9.70.0-n10a20.1.7-shuffled-gauss-kvsharing-b3prod"


def test_the_last_layer_has_the_keys_and_values_of_the_first_and_queries_of_its_own() -> None:
    schedule = make_schedule(parse_case(CASE))
    layers = make_layers(schedule.case)
    assert [layer.kv_sharing_target_layer_id for layer in layers] == [-1, -1, 5]
    data = make_step_data(schedule, schedule.steps[0])
    assert data.stored_values is not None
    for of_all in (data.k, data.v, data.stored_keys, data.stored_values):
        assert torch.equal(of_all[2], of_all[0])
        assert not torch.equal(of_all[1], of_all[0])
    assert not torch.equal(data.q[2], data.q[0])


@pytest.mark.parametrize("layout", [layout for layout in KV_LAYOUTS if layout != "custom"])
def test_a_pool_has_memory_for_the_layers_that_store_and_gives_it_for_both_ids(layout: str) -> None:
    layers = make_layers(parse_case(CASE))
    pool = KVPool(32, 16, layers, torch.bfloat16, "cpu", layout)
    first, second, last = (pool.memory[layer.layer_id].key.data_ptr() for layer in layers)
    assert first == last != second
    only = KVPool(32, 16, layers[:2], torch.bfloat16, "cpu", layout)
    assert sum(len(memory) for memory, _ in pool.pieces) == sum(len(memory) for memory, _ in only.pieces)


@pytest.mark.parametrize("backend", [TorchNativeBackend, faults.SharingBackend])
@pytest.mark.parametrize("case", [CASE, EXTEND])
def test_who_stores_only_what_it_is_asked_to_is_right(backend: type, case: str) -> None:
    found = check_backend(backend, cases=[case], device="cpu", modes=[case.split("-gqa")[0]])
    assert found, found


@pytest.mark.parametrize("backend", [faults.ReaderStoresItsOwn, faults.FlagOfTheLastLayer])
@pytest.mark.parametrize("case", [CASE, EXTEND])
def test_keys_that_a_reader_stores_or_that_nobody_stores_are_found(backend: type, case: str) -> None:
    modes = [case.split("-gqa")[0]]
    (result,) = check_backend(backend, cases=[case], device="cpu", modes=modes, executions=["eager"])
    assert result.findings[0].check == "writes-own-kv"


@pytest.mark.parametrize("mode", ForwardMode)
def test_it_is_tried_in_every_mode_of_a_backend_that_declares_it_and_of_no_other(mode: ForwardMode) -> None:
    for tier in ("smoke", "core"):
        assert any(case.kv_sharing for case in generate(TorchNativeBackend.capabilities, mode, tier))
        assert not any(case.kv_sharing for case in generate(TritonBackend.capabilities, mode, tier))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("layers1from0-kvsharing", "a single layer has no earlier one"),
        ("w7-layers3from5groups-kvsharing", "both layers are in one group"),
        ("kvfp8e4m3-kvsharing", "both layers have the scales of the pool"),
    ],
)
def test_what_it_excludes_is_refused_with_the_reason(words: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_case(f"decode-gqa2x2-d64-bf16-p16-k9.70.1-shuffled-gauss-{words}-b4prod")
