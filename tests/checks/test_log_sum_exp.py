"""Log-sum-exps by hand: each limit on both sides, -inf exact, and what is said of the usual mistakes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from by_hand import schedule_of

from attn_testkit.checks import Comparison
from attn_testkit.checks.log_sum_exp import log_sum_exp
from attn_testkit.checks.lse_hint import POISON
from attn_testkit.checks.lse_patterns import LseEvidence
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.contract import LogSumExp
from attn_testkit.families.expected import Expected, expect
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.results.finding import Finding
from attn_testkit.steps.data import make_layers

PREFIX = schedule_of("decode-gqa2x2-d32-fp32-p4-k9.0.6-shuffled-gauss-lseprefix-b3prod")
SINKS = schedule_of("decode-gqa2x2-d32-fp32-p4-k9.0.6-shuffled-gauss-sink-lsepages2-b3prod")
SQUARE = schedule_of("decode-gqa2x2-d32-fp32-p4-k9.2.6.5-shuffled-gauss-lsewhole-b4prod")
OWN = schedule_of("decode-gqa2x2-d32-fp32-p4-k9.0.6-shuffled-gauss-lseprefixmerged-b3prod")
LARGE = schedule_of("decode-gqa2x2-d32-fp32-p4-k9.0.6-shuffled-negative-lseprefixmerged-b3prod")
FP8 = schedule_of("decode-gqa2x2-d32-fp16-p4-k9.4.6-shuffled-gauss-kvfp8e4m3-cap1.5-lsewhole-b3prod")
NATURAL = LogSumExp("e", whole={"decode"})
BINARY = LogSumExp("2", whole={"decode"})
NEW, SPLIT_OF_PREFIX = 0, 1
EMPTY = 1
"""The request without a prefix."""


def evaluated(
    schedule: object, lse: torch.Tensor, declared: LogSumExp = NATURAL, finite: torch.Tensor | None = None
) -> list[Finding]:
    """``lse`` [L, T, P, Hq] as it came; ``finite`` [L, T, P]."""
    expected = right(schedule)
    finite = torch.ones(lse.shape[:3], dtype=torch.bool) if finite is None else finite
    pieces = [("lse", str(i), each) for i, each in enumerate(lse)]
    pieces += [("finite parts", str(i), each) for i, each in enumerate(finite)]
    step = schedule.steps[0]  # type: ignore[attr-defined]
    observed = Observation(schedule, step, "a step", copies_of(pieces))  # type: ignore[arg-type]
    return log_sum_exp(Comparison(observed, expected), schedule.case, declared)  # type: ignore[attr-defined]


def right(schedule: object) -> Expected:
    return expect(schedule, schedule.steps[0])  # type: ignore[arg-type, attr-defined]


def sums(schedule: object) -> torch.Tensor:
    lse = right(schedule).lse
    assert lse is not None
    return lse.clone()


def limits(schedule: object) -> torch.Tensor:
    limit = right(schedule).lse_limit
    assert limit is not None
    return limit


def hint(schedule: object, lse: torch.Tensor, declared: LogSumExp = NATURAL) -> str:
    (finding,) = evaluated(schedule, lse, declared)
    assert (finding.check, finding.step) == ("log-sum-exp", "a step")
    return finding.hint


def test_what_is_right_is_right_and_minus_infinity_is_exact() -> None:
    lse = sums(PREFIX)
    assert evaluated(PREFIX, lse) == []
    assert (lse[:, EMPTY, SPLIT_OF_PREFIX] == -torch.inf).all()
    assert (limits(PREFIX)[:, EMPTY, SPLIT_OF_PREFIX] == 0).all()
    lse[0, EMPTY, SPLIT_OF_PREFIX, 2] = -1e30
    (finding,) = evaluated(PREFIX, lse)
    assert finding.headline == "request 1: the prefix has no key, but its log-sum-exp is -1e+30 instead of -inf"
    assert finding.hint == "a KV split without keys must have -inf: anything else gives it weight in a merge"


@pytest.mark.parametrize(("part", "request_"), [(NEW, 0), (NEW, 2), (SPLIT_OF_PREFIX, 0)])
def test_the_limit_is_met_on_both_sides(part: int, request_: int) -> None:
    at = 1, request_, part, 3
    for sign in (-1, 1):
        for factor, wrong in ((0.99, 0), (1.01, 1)):
            lse = sums(PREFIX)
            lse[at] += sign * factor * limits(PREFIX)[at]
            assert len(evaluated(PREFIX, lse)) == wrong
    lse[at] = sums(PREFIX)[at] + 30 * limits(PREFIX)[at]
    (finding,) = evaluated(PREFIX, lse)
    name = "the new rows" if part == NEW else "the prefix"
    assert (
        finding.headline == f"request {request_}: the log-sum-exp of {name} differs from the oracle, 30x over the limit"
    )
    assert finding.where.startswith(f"lse[layer 1, request {request_}, head 3] = ")
    assert finding.spread.startswith(f"request {request_} wrong in 1 of 4 values (1 of 1 rows)")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_wrong_where_there_is_a_key(value: float) -> None:
    lse = sums(PREFIX)
    lse[0, 0, NEW, 0] = value
    (finding,) = evaluated(PREFIX, lse)
    assert finding.headline.endswith(f"is {value:.4g}")
    assert "-inf minus -inf" not in finding.hint, "each row sees keys, and nothing is merged"


def test_a_value_that_was_never_written_is_named() -> None:
    lse = sums(PREFIX)
    lse.view(torch.uint8)[0, 0, NEW] = POISON
    (finding,) = evaluated(PREFIX, lse)
    assert finding.hint.startswith("the value was never written")


@pytest.mark.parametrize(("part", "what"), [(2, "the larger log-sum-exp"), (0, "the maximum")])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_infinite_one_is_an_exponential_whose_maximum_was_left_in_where_logits_are_large(
    value: float, part: int, what: str
) -> None:
    lse = sums(LARGE)
    assert lse[0, 0, part, 0].abs() > 80
    lse[0, 0, part, 0] = value
    assert hint(LARGE, lse).endswith(f"subtract {what} before exp, and add it to the logarithm")
    small = sums(OWN)
    small[0, 0, part, 0] = value
    assert hint(OWN, small) == "", "logits of normal numbers overflow in no exponential"


def test_base_2_is_compared_as_base_2() -> None:
    assert evaluated(PREFIX, sums(PREFIX) / math.log(2), BINARY) == []
    (finding,) = evaluated(PREFIX, sums(PREFIX), BINARY)
    assert "in base 2" in finding.where


def test_usual_mistakes_are_named() -> None:
    lse = sums(SQUARE)
    assert "it is in base 2, but base e is declared" in hint(SQUARE, lse / math.log(2))
    assert "it is in base e, but base 2 is declared" in hint(SQUARE, lse, BINARY)
    assert "it is converted to base 2 twice" in hint(SQUARE, lse / math.log(2) ** 2, BINARY)
    assert "it is multiplied by ln 2 twice" in hint(SQUARE, lse * math.log(2))
    transposed = lse.clone()
    transposed[:, :, 0] = lse[:, :, 0].mT.reshape(lse[:, :, 0].shape)
    assert "heads come before rows in its memory" in hint(SQUARE, transposed)
    assert hint(SQUARE, lse + torch.rand(lse.shape)) == ""


def test_another_order_of_heads_is_named_where_each_wrong_head_has_that_of_another_wrong_one() -> None:
    lse = sums(SQUARE)
    other_strides = lse.clone()
    other_strides[0, 1:, 0] = lse[0, 1:, 0][:, [0, 2, 3, 1]]
    reported = "right in another order of heads: head 1 holds that of head 2, head 2 holds that of head 3 and so on"
    assert hint(SQUARE, other_strides).startswith(reported), "a row that is right may have any order"
    other_strides[0, 3, 0, 3] = lse[0, 3, 0, 0]
    assert hint(SQUARE, other_strides) == "", "one of them has that of no other wrong head"


@pytest.mark.parametrize(("counts", "said"), [((9, 1, 4, 3), "the first 4 of its 7"), ((0, 3, 7, 6), "none of its 10")])
def test_fewer_kv_tokens_of_a_part_are_named_by_their_number(counts: tuple[int, ...], said: str) -> None:
    data = right(SQUARE).data
    seen = data.visible & (torch.arange(data.visible.shape[-1]) < torch.tensor(counts)[:, None, None])
    lse = sums(SQUARE)
    rows = slice(2, 3) if "of its 7" in said else slice(0, 1)
    lse[:, rows, 0] = attend_with_limit(SQUARE, replace(data, visible=seen))[0].lse[:, rows]
    assert f"counts {said} KV tokens in this KV split" in hint(SQUARE, lse)
    lse[:, rows, 0, :2] = 0.5
    assert hint(SQUARE, lse) == "", "no number of KV tokens gives this in all heads"


@pytest.mark.parametrize(("missing", "said"), [((2,), True), ((0,), False), ((0, 2), False)])
def test_a_request_without_kv_tokens_before_those_that_count_none_is_named(
    missing: tuple[int, ...], said: bool
) -> None:
    lse = sums(PREFIX)
    lse[:, missing, SPLIT_OF_PREFIX] = -torch.inf
    assert hint(PREFIX, lse).startswith("right for no KV token")
    assert ("request 1 before it has none there" in hint(PREFIX, lse)) is said


def test_a_rounded_one_is_named_and_any_number_that_rounding_does_not_explain_is_not() -> None:
    rounded = sums(SQUARE).bfloat16()
    assert "rounded to bfloat16" in hint(SQUARE, rounded.float())
    uneven = torch.linspace(0.5, 1.5, rounded.numel()).view_as(rounded)
    assert hint(SQUARE, (rounded + uneven).float()) == ""


@pytest.mark.parametrize(("factor", "said"), [(448.0, True), (1 / 256, True), (1.6, True), (1.4, False), (2e6, False)])
def test_one_factor_of_every_sum_is_named(factor: float, said: bool) -> None:
    reported = hint(SQUARE, sums(SQUARE) + math.log(factor))
    assert reported.startswith(f"off by {math.log(factor):.4g} in every row and head, as if") is said
    assert (f"multiplied by {factor:.4g}: a factor" in reported) is said


def test_a_factor_of_all_sums_but_one_is_not_named() -> None:
    lse = sums(SQUARE) + math.log(448.0)
    lse[0, 1, 0, 0] += 0.5
    assert "in every row and head" not in hint(SQUARE, lse)


def test_sinks_that_count_too_often_or_not_at_all_are_named() -> None:
    lse = sums(SINKS)
    sinks = torch.stack([layer_sinks(i) for i in range(2)])
    more = lse.clone()
    more[:, :, 1] = torch.logaddexp(lse[:, :, 1], sinks[:, None])
    assert "counted once more" in hint(SINKS, more)
    less = lse.clone()
    less[:, :, 0] = torch.log(torch.exp(lse[:, :, 0]) - torch.exp(sinks[:, None]))
    assert "the sink is left out" in hint(SINKS, less)


def layer_sinks(layer: int) -> torch.Tensor:
    sinks = make_layers(SINKS.case)[layer].sinks
    assert sinks is not None
    return sinks.double()


def test_logits_of_other_layers_are_named() -> None:
    expected = right(FP8)
    assert expected.lse is not None
    wrong = sums(FP8)
    for index, layer in enumerate(LseEvidence(FP8.case, expected.data, 0, 0, wrong[0, :, 0], wrong[0, :, 0]).layers):
        evidence = LseEvidence(FP8.case, expected.data, index, 0, wrong[0, :, 0], wrong[0, :, 0])
        for said, lse in (
            ("its logits are not scaled", evidence.lse(sinks=False, scaling=1.0)),
            ("its logits are not capped", evidence.lse(sinks=False, logit_cap=0.0) if layer.logit_cap else None),
            ("lack the k_scale", evidence.lse(sinks=False, scaling=layer.scaling / layer.k_scale)),
            ("it is only the row's maximum", evidence.attended(sinks=False).top[index]),
            ("the row's maximum is left out", expected.lse[index, :, 0] - evidence.attended(sinks=False).top[index]),
        ):
            if lse is not None:
                changed = wrong.clone()
                changed[index, :, 0] = lse
                assert said in hint(FP8, changed), (said, index)


def test_nan_in_the_output_of_an_empty_part_is_found_where_the_kit_merges() -> None:
    for schedule, found in ((PREFIX, 1), (OWN, 0)):
        lse = sums(schedule)
        finite = torch.ones(lse.shape[0], lse.shape[1], 2, dtype=torch.bool)
        finite[1, EMPTY, SPLIT_OF_PREFIX] = False
        findings = evaluated(schedule, lse, finite=finite)
        assert len(findings) == found
        assert all("0 * NaN is NaN" in finding.hint for finding in findings)
        finite[1, EMPTY, SPLIT_OF_PREFIX] = True
        finite[1, 0, SPLIT_OF_PREFIX] = False
        assert evaluated(schedule, lse, finite=finite) == [], "a part with keys: its NaN is in the merged output"


@pytest.mark.parametrize(("declared", "one"), [(NATURAL, math.log(2)), (BINARY, 1 / math.log(2))])
def test_parts_that_are_merged_in_the_other_base_are_reported(declared: LogSumExp, one: float) -> None:
    lse = sums(OWN)
    lse[:, :, 2] = torch.logaddexp(lse[:, :, 0] * one, lse[:, :, 1] * one) / one
    stored = lse / math.log(2) if declared.base == "2" else lse
    assert "KV splits are merged as if they were in the other base than declared" in hint(OWN, stored, declared)
    stored[:, :, 0] = stored[:, :, 2]
    assert "in the other base" not in hint(OWN, stored, declared), "it is a part that is wrong"


def test_what_a_backend_merges_is_held_against_all_keys() -> None:
    lse = sums(OWN)
    assert lse.shape[2] == 3
    torch.testing.assert_close(lse[:, :, 2], torch.logaddexp(lse[:, :, 0], lse[:, :, 1]))
    lse[0, 0, 2, 0] += 1
    (finding,) = evaluated(OWN, lse)
    assert "the merged result of merge_state" in finding.headline


def test_a_step_that_came_without_them_is_no_pass() -> None:
    lse = sums(PREFIX)
    for cut in (lse[:1], lse[:, :, :1], lse[:, :2]):
        (finding,) = evaluated(PREFIX, cut)
        assert finding.headline == "the step has no log-sum-exps"


def test_the_capabilities_of_the_models_dtype_widen_the_limit() -> None:
    assert (limits(SQUARE.with_numerics(lse_dtype="model")) >= limits(SQUARE)).all()
