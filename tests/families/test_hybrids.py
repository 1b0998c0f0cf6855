"""Hybrid models: layers that keep a state and softmax layers in one case, and mistakes of a wrapper of two backends."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native_hybrid import TorchNativeHybridBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode, StateLayer
from attn_testkit.families.by_layer import layers as layers_of
from attn_testkit.families.by_layer import make_data
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import r_hybrids as faults
from attn_testkit_corpus.faults.controls_of_states import HybridAsItIs

GDN = "gdn4x2-d64-bf16-p16-{}-shuffled-{}-k64w4s32-{}-b5stale"
DECODE = "decode-" + GDN.format("k3.19.1", "mild_decay", "layers3from5hybrid")
VERIFY = "target-verify-" + GDN.format("k3.19.1-chain4", "mild_decay", "layers2from0hybrid")
EXTEND = "extend-gdn4x2-d64-bf16-p16-k0.17.0.5-n4a1x2.9.2-shuffled-unit_keys-k64w4s32-layers3from0hybrid-b4prod"


def test_layers_of_both_kinds_follow_in_turn_and_have_the_ids_of_one_model() -> None:
    case = parse_case(DECODE)
    assert case.id == DECODE
    assert case.families == ("recurrent", "softmax", "recurrent")
    layers = layers_of(case)
    assert [isinstance(layer, StateLayer) for layer in layers] == [True, False, True]
    assert [layer.layer_id for layer in layers] == [5, 6, 7]
    assert (layers[1].tp_q_head_num, layers[1].tp_k_head_num, layers[1].head_dim) == (8, 2, 64)


def test_rows_of_a_layer_are_those_of_its_kind_and_nobodys_are_nan() -> None:
    case = parse_case(DECODE)
    schedule = make_schedule(case)
    data = make_data(schedule, schedule.steps[0])
    state, softmax, _ = layers_of(case)
    keys = softmax.tp_k_head_num * softmax.head_dim
    of_softmax = softmax.tp_q_head_num * softmax.head_dim + 2 * keys
    assert data.q.shape == (3, 3, max(sum(state.parts), of_softmax))
    assert data.q[0, :, : sum(state.parts)].isfinite().all()
    assert data.q[1, :, :of_softmax].isfinite().all()
    assert data.q[1, :, of_softmax:].isnan().all()
    assert torch.equal(data.of_layer("k", 1).flatten(1), data.q[1, :, of_softmax - 2 * keys : of_softmax - keys])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decode-mha2-d64-bf16-p16-k5-shuffled-gauss-layers2from0hybrid-b1prod", "hybrid layers and no states"),
        ("decode-" + GDN.format("k3", "mild_decay", "layers1from0hybrid"), "expected layers of both kinds"),
    ],
)
def test_a_case_that_is_no_hybrid_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_case(name)


def test_all_cases_of_a_hybrid_backend_have_both_kinds_and_those_of_others_one() -> None:
    hybrid, alone = TorchNativeHybridBackend.capabilities, TorchNativeStateBackend.capabilities
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
        cases = generate(hybrid, mode, "core")
        assert cases
        assert all(case.layers.hybrid and case.layers.count > 1 for case in cases)
        assert not any(case.layers.hybrid for case in generate(alone, mode, "core"))
    case = parse_case(DECODE)
    assert not not_declared(hybrid, case)
    assert "softmax layers between" in str(not_declared(alone, case))
    assert "states without softmax" in str(not_declared(hybrid, parse_case(DECODE.replace("hybrid", ""))))


class SlotsByTheRequestTable(TorchNativeHybridBackend):
    """Takes the slot of a live request from the table of its request row, as SGLang does."""

    def forward(self, q, k, v, layer, batch, **given):  # type: ignore[no-untyped-def,override]
        live = batch.batch_size - (getattr(batch, "num_padding", 0) or 0)
        held = self.context.state.req_to_state[batch.req_pool_indices[:live]]
        batch = dataclasses.replace(
            batch, state=dataclasses.replace(batch.state, indices=torch.cat([held, batch.state.indices[live:]]))
        )
        return super().forward(q, k, v, layer, batch, **given)


def test_the_request_table_of_a_hybrid_model_names_the_slots_of_its_batches() -> None:
    found = check_backend(SlotsByTheRequestTable, cases=[DECODE], executions=["eager"], device="cpu")
    assert [each.status for each in found if each.case] == ["passed"]


@pytest.mark.parametrize("backend", [TorchNativeHybridBackend, HybridAsItIs])
@pytest.mark.parametrize("case", [DECODE, VERIFY, EXTEND])
def test_a_right_wrapper_passes_eagerly_and_in_graphs(backend: type, case: str) -> None:
    found = [each for each in check_backend(backend, cases=[case], device="cpu") if each.case]
    assert [each for each in found if each.status != "passed"] == []
    assert len(found) == (1 if case == EXTEND else 2)
    checks = {check for each in found for check in each.checks}
    assert {"matches-oracle", "writes-own-state", "state-matches-oracle", "writes-own-kv"} <= checks


@pytest.mark.parametrize(
    ("backend", "case", "execution", "check", "place"),
    [
        (faults.StatesBySlotsOfKeys, DECODE, "eager", "writes-own-state", ""),
        (faults.LayersWithAStateCountedOverAll, DECODE, "eager", "matches-oracle", "only layer 7"),
        (faults.ReplayPlansOneOfTwoBackends, VERIFY, "graph", "replay-follows-batch", "only layer 1"),
        (faults.PlansOfTwoBackendsInOneBuffer, DECODE, "graph", "replay-follows-batch", "layer 6"),
        (faults.KeysBySlotsOfStates, DECODE, "eager", "writes-own-kv", "slot"),
    ],
)
def test_mistakes_of_wrappers_are_found(backend: type, case: str, execution: str, check: str, place: str) -> None:
    results = check_backend(backend, cases=[case], executions=[execution], device="cpu")
    (found,) = [each for each in results if each.case]
    first = next(finding for finding in found.findings if finding.check == check)
    assert place in f"{first.headline} {first.where} {first.spread}"
