"""Small weights that vanish in FP8 are named where they are the whole mistake, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_parameters_by_hand import attended, evidence, scales

from attn_testkit.cases.case import parse_case
from attn_testkit.diagnosis.hints import hints
from attn_testkit.diagnosis.hints.assumed_numbers import vanished_weights
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.attention import attend
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.numerics import Numerics
from attn_testkit.steps.patterns import FAINT_RUN
from attn_testkit.steps.schedule import make_schedule

CASE = "decode-gqa3x2-d32-bf16-p4-k1200-shuffled-{}-kvfp8e4m3-b1prod"
FAINT = make_schedule(parse_case(CASE.format("small_weights")), Numerics("fp8_e4m3"))
NAMED = "small weights vanish when they are rounded to FP8 without a factor"


def of_large_keys(counted: float, schedule: Any = FAINT) -> torch.Tensor:
    """What the keys that weigh much give; ``counted``: so much of the others' weight is in the denominator."""
    data, layers = expect(schedule, schedule.steps[0]).data, make_layers(schedule.case)
    visible = data.visible.clone()
    visible[..., torch.arange(visible.shape[-1]) % FAINT_RUN != 0] = False
    whole, large = attend(data, layers), attend(data, layers, visible)
    rest = counted * (torch.exp(whole.lse) - torch.exp(large.lse))
    return large.out * (torch.exp(large.lse) / (torch.exp(large.lse) + rest))[..., None]


@pytest.mark.parametrize("counted", [0.0, 1.0])
def test_weights_that_are_lost_are_named_with_and_without_their_denominator(counted: float) -> None:
    (first, *_) = hints(evidence(of_large_keys(counted), FAINT))
    assert first.startswith(NAMED)
    assert "fp8_e4m3_unscaled" in first


def test_no_other_mistake_and_no_other_data_are_reported_so() -> None:
    right = expect(FAINT, FAINT.steps[0]).attention
    mistakes = [
        of_large_keys(3.0),
        right * 2,
        attended(schedule=FAINT, kv_scales=scales(0, None)),
        attended(lambda layer: replace(layer, scaling=layer.scaling / 2), schedule=FAINT),
        torch.full_like(right, torch.nan),
    ]
    for out in mistakes:
        assert vanished_weights(evidence(out, FAINT)) == ""
    assert vanished_weights(evidence(right, FAINT)) == ""
    usual = make_schedule(parse_case(CASE.format("gauss")), Numerics("fp8_e4m3"))
    assert vanished_weights(evidence(of_large_keys(0.0, usual), usual)) == ""
