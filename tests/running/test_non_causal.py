"""Layers that are not causal: what a row sees, who is tried, and how a causal mask that stays is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode, KernelBackend, KernelPlan
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import e_non_causal as faults

EXTEND, VERIFY = ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
CAPABILITIES = faults.NON_CAUSAL
BLOCK = "target-verify-gqa2x2-d64-bf16-p16-k9.70.0-chain4-shuffled-gauss-b4prod-noncausal"
PROMPT = "extend-gqa2x2-d64-bf16-p16-k9.70.0-n10a20.1.7-shuffled-gauss-b3prod-noncausal"


def blocks(declared: Capabilities, mode: ForwardMode) -> list[Case]:
    return [case for case in generate(declared, mode, "core") if "noncausal" in case.variants]


def test_who_declares_it_in_a_mode_is_tried_there() -> None:
    found = blocks(CAPABILITIES, EXTEND)
    assert any(case.prefixes == (9, 530, 70, 0) and case.new == (20, 1, 3, 7) for case in found), "and a whole prompt"
    assert any(not any(case.prefixes) for case in found)
    assert len({case.heads for case in found}) > 1
    assert {case.width for case in blocks(CAPABILITIES, VERIFY)} >= {4, 17}
    assert not blocks(CAPABILITIES.with_changes(options={"non_causal": {VERIFY}}), EXTEND)
    assert not blocks(CAPABILITIES.with_changes(options={"non_causal": {EXTEND}}), VERIFY)
    assert max(case.width for case in blocks(CAPABILITIES.with_changes(bounds={"max_q_rows": 3}), VERIFY)) == 3
    few = blocks(CAPABILITIES.with_changes(bounds={"max_extend_tokens": 5}), EXTEND)
    assert max(max(case.new) for case in few) == 5


@pytest.mark.parametrize("name", [BLOCK, PROMPT])
def test_a_row_sees_every_key_of_its_request_and_none_of_another(name: str) -> None:
    schedule = make_schedule(parse_case(name))
    assert not any(layer.causal for layer in make_layers(schedule.case))
    for step in (*schedule.steps, schedule.second, schedule.oversized):
        data = make_step_data(schedule, step)
        for index, request in enumerate(step.requests):
            seen, keys = data.visible[index], request.prefix + request.new
            assert seen[: request.new, :keys].all()
            assert not seen[:, keys:].any()
            own = data.positions[data.row_request == index]
            assert own.tolist() == list(range(request.prefix, keys))


def test_a_chunk_does_not_see_the_next_one() -> None:
    schedule = make_schedule(parse_case(PROMPT.replace("-shuffled", "-chunks2-shuffled")))
    first, *_ = schedule.steps
    data = make_step_data(schedule, first)
    assert data.visible.shape[2] == max(first.lens)
    assert data.visible[0, : first.requests[0].new, : first.lens[0]].all()


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DRAFT_DECODE])
def test_it_is_a_capability_of_extend_and_of_verify_alone(mode: ForwardMode) -> None:
    with pytest.raises(ValueError, match=f"non_causal may hold only extend and target-verify, got {mode}$"):
        CAPABILITIES.with_changes(options={"non_causal": {EXTEND, mode}})


class Looks(KernelBackend):
    """A kernel call that looks at the layer of its plan; and remembers what else it was told."""

    capabilities = CAPABILITIES.with_changes(windows={"modes": (), "in_trees": False}, bounds={"max_topk": 1})
    masks: list[object] = []  # noqa: RUF012 - of the process

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.layer.causal is self.context.causal
        self.masks.append(plan.mask)
        width = plan.layer.q_per_kv
        rows = torch.arange(len(q), device=q.device)
        request = (torch.searchsorted(plan.cu_seqlens_q[1:].long(), rows, right=True)).clamp(max=len(plan.kv_lens) - 1)
        slots = plan.slot_table[request].long()
        keys, values = (each.flatten(0, 1)[slots].float().repeat_interleave(width, 2) for each in kv)
        key, lens = torch.arange(slots.shape[1], device=q.device), plan.kv_lens[request].long()
        last = lens if not plan.layer.causal else plan.prefix_lens[request] + rows - plan.cu_seqlens_q[request] + 1
        seen = (key < lens[:, None]) & (key < last[:, None])
        logits = torch.einsum("thd,tshd->ths", q.float(), keys) * plan.layer.scaling
        p = torch.softmax(logits.masked_fill(~seen[:, None], -torch.inf), -1).nan_to_num()
        return torch.einsum("ths,tshd->thd", p, values.masked_fill(~seen[..., None, None], 0.0)).to(q.dtype)


@pytest.mark.parametrize("backend", [TorchNativeBackend, faults.BlockBackend, Looks])
@pytest.mark.parametrize("name", [BLOCK, PROMPT])
def test_who_looks_at_the_layer_is_right_eagerly_and_in_graphs(backend: type, name: str) -> None:
    found = check_backend(backend, cases=[name], device="cpu", modes=[name.split("-gqa")[0]])
    assert found, found
    if backend is Looks:
        assert Looks.masks
        assert not any(mask is not None for mask in Looks.masks), "no tree comes with a draft block"


@pytest.mark.parametrize("name", [BLOCK, PROMPT])
@pytest.mark.parametrize(
    ("backend", "check", "hint"),
    [
        (
            faults.CausalMaskInLayersThatAreNot,
            "matches-oracle",
            "the mask is causal, but the layers of this case are not",
        ),
        (faults.EncoderRowsWithoutAPrefix, "matches-oracle", "the whole prefix is missing"),
        (faults.WithoutCausalityNoEnd, "reads-own-kv", "with zeros instead of NaN"),
    ],
)
def test_who_does_not_is_found_and_the_mask_is_named(backend: type, name: str, check: str, hint: str) -> None:
    modes = [name.split("-gqa")[0]]
    for result in check_backend(backend, cases=[name], device="cpu", modes=modes, diagnose="all"):
        assert result.findings[0].check == check
        assert hint in result.findings[0].hint
        assert "in this case layers are not causal" in result.findings[0].hint


def test_missing_keys_of_a_causal_case_are_no_causal_mask() -> None:
    """The same keys are missing where the whole block sees each other: nothing there says that layers are not."""
    causal = replace(parse_case(PROMPT), variants=frozenset())
    (result, *_) = check_backend(faults.CausalMaskInLayersThatAreNot, cases=[causal.id], device="cpu", modes=["extend"])
    assert not result.findings
