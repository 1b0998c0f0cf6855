"""The limits of log-sum-exps and of what is merged of them: their formulas, and that float32 arithmetic keeps them."""

from __future__ import annotations

import math

import pytest
import torch
from attn_testkit.runner_modes.kv_splits import merged

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.kv_splits import splits_of
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.attention import Attention, attend
from attn_testkit.families.softmax.kv_splits import attend_split
from attn_testkit.families.softmax.limits import lse_limit, merged_limit, merged_lse_limit
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import make_schedule

EPS = 2.0**-24
U = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def row(lse: float, noise: float = 0.0, keys: int = 1, mass: float = 0.0) -> Attention:
    def one(number: float) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), number, dtype=torch.float64)

    return Attention(
        out=one(0.0), mass=one(mass), logit_noise=one(noise), keys=torch.tensor([keys]),
        lse=one(lse)[..., 0], top=one(lse)[..., 0],
    )  # fmt: skip


def one_limit(attention: Attention, dtype: str, lse_dtype: str = "fp32") -> float:
    return float(lse_limit(attention, dtype, lse_dtype))


def test_the_limit_grows_with_logits_keys_and_size_and_with_what_sums_are_of() -> None:
    base = one_limit(row(0.0), "fp32")
    assert base == pytest.approx(17 * EPS)
    assert one_limit(row(0.0, noise=10.0), "fp32") - base == pytest.approx(120 * EPS)
    assert one_limit(row(0.0, keys=101), "fp32") - base == pytest.approx(100 * EPS)
    assert one_limit(row(-7.0), "fp32") - base == pytest.approx(28 * EPS)
    assert one_limit(row(0.0), "bf16") - base == pytest.approx(U["bf16"])
    assert one_limit(row(0.0, keys=65), "fp16") - base == pytest.approx(U["fp16"] + 64 * EPS + 65 * 2.0**-25)
    assert one_limit(row(7.0), "bf16", "model") - one_limit(row(7.0), "bf16") == pytest.approx(7 * U["bf16"])


def test_a_part_without_keys_is_exact() -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        assert one_limit(row(-math.inf, noise=100.0), dtype, "model") == 0


def test_what_is_merged_may_move_by_the_weights_and_by_each_rounding_between() -> None:
    limit, whole = torch.ones(1, 1, 1, 1, dtype=torch.float64), row(0.0, mass=3.0)
    lse = torch.tensor([[[[-8.0], [-math.inf]]]], dtype=torch.float64)
    off = torch.tensor([[[[0.01], [0.0]]]], dtype=torch.float64)
    moved = 3 * math.expm1(2 * (0.01 + 64 * EPS))
    assert float(merged_limit(limit, whole, lse, off, "bf16", 0)) == pytest.approx(1 + moved)
    assert float(merged_limit(limit, whole, lse, off, "bf16", 2)) == pytest.approx(1 + moved + 6 * U["bf16"])


def test_a_log_sum_exp_of_which_nothing_can_be_asked_leaves_a_finite_limit() -> None:
    # bfloat16 keeps -6e4 to within 128, and expm1 of four times that is infinite.
    limit, lse = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.tensor([[[[-6e4], [-6e4]]]], dtype=torch.float64)
    off = torch.full_like(lse, 400.0)
    assert float(merged_limit(limit, row(-6e4, mass=0.0), lse, off, "bf16", 0)) == 1
    assert 1e80 < float(merged_limit(limit, row(-6e4, mass=1.0), lse, off, "bf16", 0)) < math.inf


def test_the_log_sum_exp_of_a_merge_may_be_off_by_the_worst_of_its_parts_and_its_own_rounding() -> None:
    lse = torch.tensor([[[[-8.0], [-math.inf], [1.0]]]], dtype=torch.float64)
    off = torch.tensor([[[[0.01], [0.0], [0.02]]]], dtype=torch.float64)
    whole = torch.tensor([[[2.0]]], dtype=torch.float64)
    assert float(merged_lse_limit(whole, lse, off, "bf16", "fp32")) == pytest.approx(0.02 + 2 * 32 * EPS)
    in_model = float(merged_lse_limit(whole, lse, off, "bf16", "model"))
    assert in_model == pytest.approx(0.02 + 2 * (32 * EPS + 8 * U["bf16"]))


CASES = [
    "decode-gqa2x2-d64-{dtype}-p4-k300.7.1-shuffled-{data}-sink-lsepages2-b3prod",
    "target-verify-gqa2x2-d64-{dtype}-p4-k70.5-t0.0.1-shuffled-{data}-lseprefix-b2prod",
    "extend-gqa2x2-d64-{dtype}-p4-k70.0-n4a5.3-shuffled-{data}-w9-cap1.5-lsetokens3-b2prod",
]


@pytest.mark.parametrize("data", ["gauss", "peaked", "negative", "mean", "shifted"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case_id", CASES)
def test_float32_arithmetic_over_rounded_probabilities_keeps_the_limits(case_id: str, dtype: str, data: str) -> None:
    """Parts of the oracle's, with their numbers rounded as a kernel may: sums of rounded probabilities, outputs too."""
    schedule = make_schedule(parse_case(case_id.format(dtype=dtype, data=data)))
    expected, case = expect(schedule, schedule.steps[0]), schedule.case
    assert expected.lse is not None
    assert expected.lse_limit is not None
    round_to = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for layer in range(len(make_layers(case))):
        outs, lses = [], []
        for index, part in enumerate(splits_of(case)):
            attended = attend_split(expected.data, make_layers(case), part)
            lse = attended.lse[layer].float()
            # The worst of a sum of rounded probabilities: each is as much too large.
            lse = lse + (U[dtype] * 0.9 if dtype != "fp32" else 0.0) * (-1) ** index
            off = (lse.double() - expected.lse[layer, :, index]).abs()
            fine = (off <= expected.lse_limit[layer, :, index]) | (lse == expected.lse[layer, :, index])
            assert fine.all()
            lses.append(lse)
            outs.append(attended.out[layer].nan_to_num(0.0).to(round_to))
        off = (merged(outs, lses, "e").double() - expected.attention[layer]).abs()
        assert (off <= expected.attention_limit[layer]).all(), float((off / expected.attention_limit[layer]).max())


def test_parts_hold_every_key_once_and_their_sums_add_up_to_that_of_all() -> None:
    for case_id in CASES:
        schedule = make_schedule(parse_case(case_id.format(dtype="fp32", data="gauss")))
        expected, layers = expect(schedule, schedule.steps[0]), make_layers(schedule.case)
        assert expected.lse is not None
        whole = attend(expected.data, layers)
        torch.testing.assert_close(torch.logsumexp(expected.lse, 2), whole.lse)
