"""Steps that are wrong where a test says so, seen as the judge sees them."""

from __future__ import annotations

import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.diagnosis.hints import ORDER, Evidence
from attn_testkit.diagnosis.hints.hint import Level
from attn_testkit.families.expected import expect
from attn_testkit.families.table import family_of
from attn_testkit.steps.schedule import Schedule, make_schedule

V1 = "draft-extend-gqa2x2-d32-fp32-p4-k5.9.14-n3a2.3x2-shuffled-{}-b3prod"


def v1(data: str = "gauss") -> Schedule:
    return make_schedule(parse_case(V1.format(data)))


def assumed(evidence: Evidence) -> str:
    """The first assumption of the family that fits, whatever else is known."""
    family = family_of(evidence.schedule.case).name
    texts = (hint(evidence) for hint in ORDER if hint.level is Level.ANSWER and hint.family == family)
    return next((text for text in texts if text), "")


def own_heads(schedule: Schedule, out: torch.Tensor) -> list[torch.Tensor]:
    """Of each layer what it has, where layers differ in their heads."""
    maps = schedule.case.head_maps
    return [maps[i].q_part(each) if maps else each for i, each in enumerate(out.unbind(0))]


def observed(schedule: Schedule, out: torch.Tensor, replay: bool = False) -> Observation:
    copies = copies_of([("attention", str(i), each) for i, each in enumerate(own_heads(schedule, out.float()))])
    return Observation(schedule, schedule.steps[0], "", copies, replay=replay)


def wrong_at(schedule: Schedule, *places: tuple[int, ...], value: float = 9.0) -> Comparison:
    """Wrong in every value of (layer, row, head)."""
    expected = expect(schedule, schedule.steps[0])
    out = expected.attention.float().clone()
    for place in places:
        out[place] += value
    return Comparison(observed(schedule, out), expected)
