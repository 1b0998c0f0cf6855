"""What a mode returns: its fields, its rows, and numbers that may differ from the oracle's by a limit and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_hand import (
    DECODE,
    LIMIT,
    V1_TOP1,
    V1_TOP3,
    VERIFY,
    expected_zeros,
    next_above,
    observation,
    right_outputs,
    schedule_of,
)

from attn_testkit.checks import Comparison
from attn_testkit.checks.outputs import mode_outputs
from attn_testkit.families.expected import Expected
from attn_testkit.results.finding import Finding
from attn_testkit.steps.data import draft_topk

SLACK = 2 * LIMIT
"""By so much may two logits differ that each may be off by a limit."""


def findings(case: str, expected: Expected | None = None, **fields: torch.Tensor | None) -> list[Finding]:
    schedule = schedule_of(case)
    expected = expected_zeros(schedule) if expected is None else expected
    outputs = replace(right_outputs(schedule, expected), **fields)  # type: ignore[arg-type]
    return mode_outputs(Comparison(observation(schedule, expected, outputs=outputs), expected), schedule.case)


def changed(tensor: torch.Tensor, value: float, *at: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


@pytest.mark.parametrize("case", [DECODE, VERIFY, V1_TOP1, V1_TOP3])
def test_right_outputs_pass(case: str) -> None:
    assert findings(case) == []


@pytest.mark.parametrize("name", ["hidden_states", "next_token_logits"])
@pytest.mark.parametrize("at", [(0, 0), (-1, -1)])
def test_a_value_at_its_limit_is_right_and_the_next_above_is_wrong(name: str, at: tuple[int, int]) -> None:
    schedule = schedule_of(DECODE)
    right = getattr(right_outputs(schedule, expected_zeros(schedule)), name)
    assert findings(DECODE, **{name: changed(right, -LIMIT, *at)}) == []
    (finding,) = findings(DECODE, **{name: changed(right, -next_above(LIMIT), *at)})
    assert finding.headline.startswith(
        f"{name} differs from the reference model run with oracle attention, just over the limit"
    )
    assert finding.hint.startswith(
        "every attention output is right; probably the backend overwrote or replaced batch_size"
    )
    assert findings(DECODE, **{name: changed(right, torch.nan, *at)})
    assert "has shape" in findings(DECODE, **{name: right[:-1]})[0].headline


def test_exactly_the_fields_of_the_mode_are_returned() -> None:
    some = torch.zeros(2, 1)
    assert "returned fields" in findings(DECODE, topk_p=some)[0].headline
    assert "returned fields" in findings(DECODE, hidden_states=None)[0].headline
    assert "returned fields" in findings(V1_TOP1, topk_index=None)[0].headline


def ranked() -> tuple[Expected, torch.Tensor]:
    """Right logits 8, 7, 6 and then 5, with the three best tokens at 0, 1, 2; and their indices."""
    schedule = schedule_of(V1_TOP3)
    assert draft_topk(schedule.case) == 3
    expected = expected_zeros(schedule)
    logits = torch.zeros_like(expected.logits)
    logits[:, :4] = torch.tensor([8.0, 7.0, 6.0, 5.0])
    return replace(expected, logits=logits), torch.arange(3).expand(logits.shape[0], 3)


def test_a_token_may_stand_for_another_whose_logit_is_two_limits_away_and_no_further() -> None:
    expected, index = ranked()
    assert SLACK == 1.0, "the distance of two neighbours among the logits"
    chosen = changed(index, 3, -1, 2)
    p = torch.softmax(expected.logits, -1).gather(1, chosen)
    assert findings(V1_TOP3, expected, topk_index=chosen, topk_p=p) == []
    closer = changed(expected.logits, 5.0 - 1e-6, -1, 3)
    (finding,) = findings(V1_TOP3, replace(expected, logits=closer), topk_index=chosen, topk_p=p)
    assert "are not the 3 most likely tokens" in finding.headline
    assert findings(V1_TOP3, expected, topk_index=changed(index, 4, 0, 0))[0].headline.startswith("topk_index")


def test_tokens_and_probabilities_have_a_row_a_request_a_column_a_token_and_whole_numbers() -> None:
    expected, index = ranked()
    p = torch.softmax(expected.logits, -1).gather(1, index)
    assert findings(V1_TOP3, expected, topk_index=index, topk_p=p) == []
    for got_p, got_index in ((p[:-1], index), (p[:, :2], index), (p, index[:-1]), (p, index[:, :2]), (p, index.int())):
        (finding,) = findings(V1_TOP3, expected, topk_index=got_index, topk_p=got_p)
        assert finding.headline == (
            f"topk_p and topk_index have shapes {tuple(got_p.shape)}, {tuple(got_index.shape)} ({got_index.dtype}); "
            f"expected {tuple(p.shape)} and int64"
        )


@pytest.mark.parametrize("index", [-1, 10**6])
def test_an_index_outside_the_vocabulary_is_wrong_even_beside_a_tie(index: int) -> None:
    schedule = schedule_of(V1_TOP1)
    expected = expected_zeros(schedule)
    chosen = torch.zeros(expected.logits.shape[0], 1, dtype=torch.int64)
    assert findings(V1_TOP1, topk_index=chosen) == []
    assert findings(V1_TOP1, topk_index=changed(chosen, index, 0, 0))


def test_tokens_whose_probability_float32_may_have_as_0_stand_for_each_other() -> None:
    expected, index = ranked()
    for far, wrong in ((87.5, False), (86.5, True)):
        logits = expected.logits.clone()
        logits[-1, :4] = torch.tensor([200.0, 100.0, 200.0 - far, 50.0])
        p = torch.softmax(logits, -1).float().gather(1, changed(index, 3, -1, 2))
        found = findings(V1_TOP3, replace(expected, logits=logits), topk_index=changed(index, 3, -1, 2), topk_p=p)
        assert bool(found) is wrong


def test_probabilities_have_the_limit_of_their_logits() -> None:
    expected, index = ranked()
    # By so little that a probability's limit is no larger than the probability.
    expected = replace(expected, logits_limit=torch.full_like(expected.logits, 2.0**-8))
    want = torch.softmax(expected.logits, -1).gather(1, index)
    limit = want * 2 * 2 * 2.0**-8 + 1e-6
    for part, wrong in ((1 - 1e-6, False), (1 + 1e-6, True), (-1 + 1e-6, False), (-1 - 1e-6, True)):
        p = want.clone()
        p[-1, 1] += part * limit[-1, 1]
        assert bool(findings(V1_TOP3, expected, topk_index=index, topk_p=p)) is wrong


@pytest.mark.parametrize("row", [0, 1])
def test_the_first_request_with_a_wrong_token_or_probability_is_named(row: int) -> None:
    expected, index = ranked()
    p = torch.softmax(expected.logits, -1).gather(1, index)
    tokens = changed(index, 9, row, 2)
    (finding,) = findings(V1_TOP3, expected, topk_index=tokens, topk_p=p)
    assert finding.headline == (f"topk_index of request {row} is [0, 1, 9], which are not the 3 most likely tokens")
    assert finding.where == "the oracle's are [0, 1, 2]"
    tight = replace(expected, logits_limit=torch.full_like(expected.logits, 2.0**-8))
    got = changed(p, 0.25, row, 2)
    (finding,) = findings(V1_TOP3, tight, topk_index=index, topk_p=got)
    assert finding.headline == f"topk_p of request {row} is {got[row].tolist()}, want {p[row].tolist()}"


def test_one_best_token_has_probability_one_exactly() -> None:
    schedule = schedule_of(V1_TOP1)
    assert draft_topk(schedule.case) == 1
    ones = right_outputs(schedule, expected_zeros(schedule)).topk_p
    assert ones is not None
    assert findings(V1_TOP1, topk_p=ones) == []
    assert "topk_p" in findings(V1_TOP1, topk_p=changed(ones, next_above(1.0), -1, 0))[0].headline
