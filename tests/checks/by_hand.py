"""Steps and what they should give, written down by hand: round numbers, so that a limit can be met exactly."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace

import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation, Outputs, StepInputs, copies_of
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.families.expected import Expected, expect
from attn_testkit.steps.data import draft_topk
from attn_testkit.steps.schedule import Schedule, Step, make_schedule

DECODE = "decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4prod"
VERIFY = "target-verify-gqa2x2-d32-fp32-p4-k5.9-t0.0.1-shuffled-gauss-b2prod"
V1_TOP3 = "draft-extend-gqa2x2-d32-fp32-p4-k5.9-n3a1.3-shuffled-gauss-b2prod-s3"
V1_TOP1 = "draft-extend-gqa2x2-d32-fp32-p4-k5.9-n3a2.3-shuffled-gauss-b2prod"
CAPABILITIES = Capabilities(eager={"decode"}, graph={"decode"})
LIMIT = 0.5
"""Of every element, logit and hidden value; the right answer to all of them is 0."""


def schedule_of(case: str) -> Schedule:
    return make_schedule(parse_case(case))


def expected_zeros(schedule: Schedule, step: Step | None = None, row_limit: float = 1e9) -> Expected:
    """Right is 0 everywhere, ``LIMIT`` is the limit of every number, and rows have a limit that never matters."""
    expected = expect(schedule, step or schedule.steps[0])

    def full(like: torch.Tensor, value: float) -> torch.Tensor:
        return torch.full_like(like, value)

    return replace(
        expected,
        attention=full(expected.attention, 0.0),
        attention_limit=full(expected.attention, LIMIT),
        row_limit=full(expected.row_limit, row_limit),
        hidden=full(expected.hidden, 0.0),
        hidden_limit=full(expected.hidden, LIMIT),
        logits=full(expected.logits, 0.0),
        logits_limit=full(expected.logits, LIMIT),
    )


def zeros_like(expected: Expected) -> torch.Tensor:
    """[L, T, Hq, Dv] float32."""
    return torch.zeros(expected.attention.shape)


def right_outputs(schedule: Schedule, expected: Expected) -> Outputs:
    """The mode's fields, all as expected."""
    logits, hidden = expected.logits.float(), expected.hidden.float()
    k = draft_topk(schedule.case)
    if schedule.case.mode is not ForwardMode.DRAFT_EXTEND:
        return Outputs(logits, hidden)
    index = expected.logits.topk(k, -1)[1]
    p = torch.ones(index.shape) if k == 1 else torch.softmax(expected.logits, -1).gather(1, index)
    return Outputs(logits, hidden, p, index)


def observation(
    schedule: Schedule,
    expected: Expected,
    out: torch.Tensor | None = None,
    *,
    outputs: Outputs | None = None,
    pool: torch.Tensor | None = None,
    inputs: tuple[tuple[str, torch.Tensor, torch.Tensor], ...] = (),
    step: Step | None = None,
    **fields: object,
) -> Observation:
    """A step that is right but for what is given. ``out`` [L, T, Hq, Dv]."""
    out = zeros_like(expected) if out is None else out
    outputs = right_outputs(schedule, expected) if outputs is None else outputs
    after = empty_pool(schedule)
    pieces = [("attention", str(layer), each) for layer, each in enumerate(out.unbind(0))]
    named = ((each.name, getattr(outputs, each.name)) for each in fields_of(outputs))
    pieces += [("outputs", name, value) for name, value in named if value is not None]
    for name, before, now in inputs:
        pieces += [("before", name, before), ("now", name, now)]
    return with_pool(
        Observation(schedule, step or schedule.steps[0], "a step", copies_of(pieces), **fields),  # type: ignore[arg-type]
        expected,
        after,
        after if pool is None else pool,
    )


def with_pool(seen: Observation, expected: Expected, after: torch.Tensor, held: torch.Tensor) -> Observation:
    """The same step with another pool. ``after``: what it should hold; ``held``: what it holds."""
    new = sorted(int(slot) for r in seen.step.requests for slot in r.slots[r.prefix :])
    slots = torch.tensor([] if seen.step.stored else new, dtype=torch.int64)
    before = after.clone()
    before[:, :, slots] = torch.nan
    bits, was = held.view(torch.int32), before.view(torch.int32)
    changed = (bits != was).flatten(3).any(-1).any(0).any(0).nonzero().flatten()
    rest = [(g, n, t) for g, named in seen.copies.cut().items() for n, t in named.items() if g != "pool"]
    copies = copies_of([*rest, ("pool", "slots", changed), ("pool", "rows", bits[:, :, changed])])
    given = StepInputs(
        expected.data, torch.zeros(0), lambda later: after if later else before, slots, after[:, :, slots]
    )
    return replace(seen, copies=copies, inputs=given)


def empty_pool(schedule: Schedule) -> torch.Tensor:
    """[L, 2, slots, 1, 2] float32."""
    return torch.zeros(2, 2, (schedule.num_pages + 1) * schedule.case.page_size, 1, 2)


def comparison(case: str = DECODE, out: torch.Tensor | None = None, row_limit: float = 1e9) -> Comparison:
    schedule = schedule_of(case)
    expected = expected_zeros(schedule, row_limit=row_limit)
    return Comparison(observation(schedule, expected, out), expected)


def next_above(value: float) -> float:
    """The smallest float32 above."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(torch.inf)))
