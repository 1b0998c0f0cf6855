"""RWKV-7: the bound of the growth of errors, and mistakes that diagnosis knows by name."""

from __future__ import annotations

import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.families.recurrent.data import StateStepData, make_state_data
from attn_testkit.families.recurrent.family import RECURRENT
from attn_testkit.families.recurrent.recurrence import recur
from attn_testkit.families.recurrent.rwkv import growth
from attn_testkit.families.recurrent.rwkv_mistakes import mistaken_removals
from attn_testkit.steps.schedule import Schedule, make_schedule

CASE = "extend-{}-d16-bf16-p16-k9.0-n5a5.3-shuffled-mild_decay-k16w{}s32-layers1from0-b2prod"


def made(kind: str, width: int) -> tuple[Schedule, StateStepData]:
    schedule = make_schedule(parse_case(CASE.format(kind, width)))
    return schedule, make_state_data(schedule, schedule.steps[0])


def test_growth_is_at_least_the_norm_of_the_transition_and_near_it() -> None:
    generator = torch.Generator().manual_seed(1)
    decay = torch.rand(200, 16, generator=generator, dtype=torch.float64) * 0.45 + 0.55
    reads = torch.nn.functional.normalize(torch.randn(200, 16, generator=generator, dtype=torch.float64), dim=-1)
    removes = reads * torch.rand(200, 16, generator=generator, dtype=torch.float64)
    whole = torch.diag_embed(decay) - reads[..., None] * removes[:, None]
    ratio = growth(decay, reads, removes)[:, 0] / torch.linalg.matrix_norm(whole, ord=2)
    assert float(ratio.min()) > 1 - 1e-12
    assert float(ratio.max()) < 1.2


def test_growth_without_a_removal_is_the_largest_decay() -> None:
    decay = torch.tensor([[0.6, 0.9, 0.7]], dtype=torch.float64)
    none = torch.zeros_like(decay)
    assert torch.allclose(growth(decay, none, none), decay.amax(-1, keepdim=True))


def test_mistakes_of_rwkv_are_named_and_each_changes_the_outputs_by_many_limits() -> None:
    _, data = made("rwkv2", 1)
    right = recur(data)
    for _, wrong in mistaken_removals(data):
        assert float(((recur(wrong).out - right.out).abs() / right.out_limit).max()) > 20
    assert len(list(mistaken_removals(data))) == 5
    assert list(mistaken_removals(made("gdn2x2", 4)[1])) == []


def test_suppositions_about_rwkv_are_those_of_the_family() -> None:
    schedule, data = made("rwkv2", 1)
    assert RECURRENT.supposed is not None
    texts = {each.text for each in RECURRENT.supposed(schedule, data)}
    assert texts >= {text for text, _ in mistaken_removals(data)}
