"""Cross-attention layers: what is right, computed by hand, what the pool holds, and what a backend is given."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attn_testkit.runner_modes.harness import context_for
from in_process import plan_run, run_item

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.cross_attention import CROSS_ATTENTION
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import (
    Capabilities,
    CrossAttention,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    Needs,
    Precision,
    Unsupported,
    refuse_undeclared,
)
from attn_testkit.families.expected import expect
from attn_testkit.steps.data import make_layers, make_step_data, new_kv, pool_image
from attn_testkit.steps.kv_groups import table_of_group
from attn_testkit.steps.schedule import make_schedule
from cuda_on_cpu import emulated_cuda

DECODE = "decode-gqa2x2-d32-fp32-p4-k2.40.9.17-shuffled-gauss-cross13{}-b5prod"
EXTEND = "extend-gqa2x2-d32-fp32-p4-k0.40.9.0-n9a7.5.1.20-shuffled-gauss-cross13{}-b4prod"
GROUPS = "-layers2from0groups"
CASES = [case.format(words) for case in (DECODE, EXTEND) for words in ("", GROUPS)]
DECLARED = TorchNativeBackend.capabilities


@pytest.mark.parametrize("case_id", CASES)
def test_a_row_sees_all_keys_of_its_encoder_in_one_layer_and_in_the_other_those_of_the_decoder(case_id: str) -> None:
    schedule = make_schedule(parse_case(case_id))
    for step in (schedule.steps[0], schedule.second, schedule.oversized):
        found = expect(schedule, step)
        data = found.data
        for place, layer in enumerate(make_layers(schedule.case)):
            assert layer.is_cross_attention == (place == 1)
            assert layer.causal == (place == 0)
            keys, values = data.keys[place], data.values[place]
            for row, request in enumerate(data.row_request.tolist()):
                encoder = step.requests[request].encoder_len
                own = slice(encoder, int(data.row_key[row]) + 1)
                seen = slice(0, encoder) if layer.is_cross_attention else own
                for head in range(layer.tp_q_head_num):
                    kv_head = head // layer.q_per_kv
                    logits = keys[request, seen, kv_head] @ data.q[place, row, head].double() * layer.scaling
                    want = torch.softmax(logits, 0) @ values[request, seen, kv_head]
                    assert torch.allclose(found.attention[place, row, head], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case_id", CASES)
def test_encoders_are_longer_and_shorter_than_the_decoder_and_only_eager_steps_have_none(case_id: str) -> None:
    schedule = make_schedule(parse_case(case_id))
    requests = schedule.steps[0].requests
    longer = [each.encoder_len > each.decoder_prefix + each.new for each in requests if each.encoder_len]
    assert set(longer) == {True, False}
    replays = [each.encoder_len for step in schedule.steps for each in step.requests]
    assert len(set(replays)) > 2
    in_graphs = schedule.case.mode is ForwardMode.DECODE
    assert (0 in replays) == (not in_graphs)
    assert 0 in [each.encoder_len for each in schedule.second.requests]
    assert 0 in [each.encoder_len for each in schedule.oversized.requests]
    own = schedule.case.layers.groups
    assert any(length % 4 for length in replays) == own
    assert schedule.max_encoder_len == (13 if own else 16)


@pytest.mark.parametrize("case_id", CASES)
def test_each_layer_holds_only_the_keys_that_it_sees_and_a_prompt_brings_its_encoder(case_id: str) -> None:
    schedule = make_schedule(parse_case(case_id))
    step = schedule.steps[0]
    data = make_step_data(schedule, step)
    before, after = (pool_image(schedule, step, data, False, after=after) for after in (False, True))
    owned = ~before.isnan().flatten(3).any(-1)[:, 0], ~after.isnan().flatten(3).any(-1)[:, 0]
    for request in step.requests:
        slots = torch.from_numpy(request.slots)
        encoder, own = slots[: request.encoder_len], slots[request.encoder_len :]
        brings = schedule.case.mode is ForwardMode.EXTEND and request.decoder_prefix == 0
        assert request.stores_encoder == (brings and request.encoder_len > 0)
        assert owned[0][1, encoder].all() if not brings else not owned[0][1, encoder].any()
        assert owned[1][1, encoder].all()
        assert not owned[1][0, encoder].any()
        assert owned[1][0, own].all()
        assert not owned[1][1, own].any()
    # Padded requests have encoder keys, too: those of page 0.
    assert not after[1, :, :4].any()
    assert after[0, :, :4].isnan().all()
    slots, rows = new_kv(data)
    assert torch.equal(slots, slots.sort().values)
    assert torch.equal(rows.view(torch.int32), after[:, :, slots].view(torch.int32))
    stored = sum(each.encoder_len for each in step.requests if each.stores_encoder)
    assert len(slots) == step.tokens + stored


def test_the_decoder_has_the_columns_behind_the_encoder_and_the_first_ones_in_a_group_of_its_own() -> None:
    for words in ("", GROUPS):
        schedule = make_schedule(parse_case(DECODE.format(words)))
        step = schedule.steps[0]
        for request in step.requests:
            row, first = step.req_to_token[request.pool_row], request.encoder_len
            assert np.array_equal(row[: len(request.slots)], request.slots)
            pages = request.slots // 4
            assert not set(pages[:first]) & set(pages[first:])
            assert request.slots[first] % 4 == 0
            if words:
                own = table_of_group(schedule, step, -1)[request.pool_row]
                assert np.array_equal(own[: len(request.slots) - first], request.slots[first:])
                crosses = table_of_group(schedule, step, -1, crosses=True)
                assert np.array_equal(crosses[request.pool_row, :first], request.slots[:first])


NOTED = ("encoder_lens", "encoder_out_cache_loc", "encoder_lens_cpu", "seq_lens", "extend_prefix_lens", "positions")


class Seen(TorchNativeBackend):
    """Notes fields of the batch on the host, and the rows of k, in the cross-attention layer."""

    capabilities = DECLARED.with_changes(server={"eager_without_waits": False})
    given: ClassVar[list[dict[str, Any]]] = []

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        _, k, _, layer, batch = given
        if layer.is_cross_attention and len(self.given) < 8:
            fields = {name: getattr(batch, name) for name in NOTED}
            self.given.append({name: None if each is None else each.tolist() for name, each in fields.items()})
            self.given[-1]["rows of k"] = None if k is None else len(k)
        return super().forward(*given, **named)


def noted(case_id: str) -> list[dict[str, Any]]:
    Seen.given.clear()
    plan = plan_run(backends=[Seen], device="cpu", cases=[case_id], executions=["eager"])
    (item,) = plan.items
    run_item(item, plan)
    return Seen.given


def test_k_and_v_of_the_encoder_come_with_the_first_rows_of_a_request_and_never_in_decode() -> None:
    first = noted(EXTEND.format(""))[0]
    assert first["encoder_lens"] == [16, 0, 8, 12]
    assert len(first["encoder_out_cache_loc"]) == first["rows of k"] == 28
    assert first["seq_lens"] == [7, 45, 10, 20]
    assert first["extend_prefix_lens"] == [0, 40, 9, 0]
    assert first["positions"][:8] == [*range(7), 40]
    assert first["encoder_lens_cpu"] is None
    for batch in noted(DECODE.format("")):
        assert batch["encoder_out_cache_loc"] is None
        assert batch["rows of k"] is None


def test_an_extend_with_an_encoder_runs_eagerly_only() -> None:
    for case_id, executions in ((EXTEND.format(""), {"eager"}), (DECODE.format(""), {"eager", "graph"})):
        plan = plan_run(backends=["torch_native"], device="cpu", cases=[case_id])
        assert {item.execution for item in plan.items} == executions


class ByPages(KernelBackend):
    """A kernel that finds keys by pages, in plain torch."""

    capabilities = Capabilities(
        eager={"decode", "extend"},
        graph={"decode"},
        heads=HeadShapes(families={"gqa"}, head_dims={32}, gqa_ratios={2}),
        precision=Precision(dtypes={"fp32"}),
        kv_pool=KVPools(page_sizes={4}, kv_groups=True),
        needs=Needs(cpu_seq_lens=False),
        cross_attention={"modes": {"decode", "extend"}, "encoder_slots": {"first", "own_group"}},
        server={"finite_padding": True},
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer, width, device = plan.layer, plan.max_q_len, q.device
        k, v = (pages[plan.page_table.long()].flatten(1, 2) for pages in kv)
        rows = (plan.cu_seqlens_q[:-1, None] + torch.arange(width, device=device)).clamp(max=len(q) - 1)
        key = torch.arange(k.shape[1], device=device)
        last = (plan.kv_lens - plan.cu_seqlens_q.diff())[:, None] + torch.arange(width, device=device)
        seen = key < plan.kv_lens[:, None, None]
        seen = seen & (key <= last[..., None]) if layer.causal else seen.expand(-1, width, -1)
        k, v = (each.masked_fill(~seen.any(1)[..., None, None], 0.0) for each in (k, v))
        grouped = q[rows].unflatten(2, (layer.tp_k_head_num, -1))
        logits = torch.einsum("bwhgd,bshd->bwhgs", grouped, k) * layer.scaling
        p = torch.softmax(logits.masked_fill(~seen[:, :, None, None], -torch.inf), -1).nan_to_num(0.0)
        out = torch.einsum("bwhgs,bshd->bwhgd", p, v).flatten(2, 3)
        row = torch.arange(len(q), device=device)
        request = torch.searchsorted(plan.cu_seqlens_q[1:].contiguous(), row, right=True).clamp(max=len(out) - 1)
        return out[request, (row - plan.cu_seqlens_q[request]).clamp(0, width - 1)]


@pytest.mark.parametrize("case_id", CASES)
def test_a_kernel_with_a_plan_gets_the_encoders_keys_as_kv_lens_and_stores_what_comes(case_id: str) -> None:
    plan = plan_run(backends=[ByPages], device="cpu", cases=[case_id])
    assert plan.items
    for item in plan.items:
        assert run_item(item, plan).findings == ()


def test_only_what_servers_have_can_be_declared() -> None:
    with pytest.raises(ValueError, match="may hold only decode and extend, got target-verify"):
        CrossAttention(modes={"target-verify"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'own_group'"):
        CrossAttention(modes={"decode"}, encoder_slots={"owngroup"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("w4-cross13", "cross-attention layers and sliding window: SGLang's backends refuse them together"),
        ("cross13-layers1from0", "cross-attention layers and layers of one kind"),
        ("cross13-sink", "cross-attention layers and sinks"),
        ("cross0", "encoder keys is 0; expected 1"),
    ],
)
def test_a_model_that_there_is_not_is_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_case(f"decode-gqa2x2-d32-fp32-p4-k5-shuffled-gauss-{words}-b1prod")


def test_a_mode_and_a_place_of_slots_that_are_not_declared_are_not_tried() -> None:
    (asked,) = CROSS_ATTENTION.declared
    first, own = (parse_case(DECODE.format(words)) for words in ("", GROUPS))
    narrow = DECLARED.with_changes(cross_attention={"encoder_slots": {"own_group"}})
    assert [asked.declared(narrow, case) for case in (first, own)] == [False, True]
    in_extend = DECLARED.with_changes(cross_attention={"modes": {"extend"}})
    assert not asked.declared(in_extend, first)
    assert asked.declared(DECLARED.with_changes(cross_attention={"modes": ()}), first.with_changes(encoder_len=0))
    found = [case for case in generate(DECLARED, first.mode, "core") if case.encoder_len]
    assert {case.layers.groups for case in found} == {False, True}
    assert not [case for case in generate(in_extend, first.mode, "core") if case.encoder_len]


def test_a_context_of_an_undeclared_mode_or_place_is_refused() -> None:
    for words, changes, what in (
        ("", {"modes": {"extend"}}, "cross-attention layers in decode"),
        (GROUPS, {"encoder_slots": {"first"}}, "encoder keys in slots own_group"),
        ("", {"encoder_slots": {"own_group"}}, "encoder keys in slots first"),
    ):
        narrow = DECLARED.with_changes(cross_attention=changes)
        schedule = make_schedule(parse_case(DECODE.format(words)))
        with emulated_cuda():
            context = context_for([schedule], torch.device("cuda"), make_layers(schedule.case))
        refuse_undeclared(DECLARED, context)
        with pytest.raises(Unsupported, match=what):
            refuse_undeclared(narrow, context)


@pytest.mark.parametrize("words", ["", "-kvfp8e4m3"])
@pytest.mark.parametrize(
    "case_id",
    [
        "decode-gqa2x2-d32r64-bf16-p4-k2.40.9.17-shuffled-gauss{}-cross13-b5prod",
        "extend-gqa2x2-d32r64-bf16-p4-k0.40.9.0-n9a7.5.1.20-shuffled-gauss{}-cross13-b4prod",
    ],
)
def test_keys_wider_than_values_may_have_an_encoder(case_id: str, words: str) -> None:
    # Values of the pool end before its keys do, also in layers that store neither.
    plan = plan_run(backends=["torch_native"], device="cpu", cases=[case_id.format(words)], executions=["eager"])
    (item,) = (item for item in plan.items if item.execution == "eager")
    result = run_item(item, plan)
    assert not result.findings, result.findings[0].headline
