"""If the log-sum-exp of a rank has no hint, its finding has the hint and the attended KV tokens of the wrong output."""

from __future__ import annotations

import pytest
from in_process import plan_run, run_item

DRAFT = "draft-extend-gqa2x2-d64-bf16-p16-k600.70.12-n4a1x3-contiguous-shifted-ranks3by2-b6stale"
VERIFY = "target-verify-gqa2x2-d64-bf16-p16-k0.1.16-chain4-reversed-peaked-ranks3by2-b4nan"


@pytest.mark.parametrize(
    ("bug", "case", "attended", "hint"),
    [
        ("DraftInContext", DRAFT, "KV tokens 12 counted more than once", "new ones both from the pool and from k, v"),
        ("BoundFromLastLocal", VERIFY, "", "right for fewer KV tokens: request 0 row 0 counts none"),
    ],
)
def test_a_log_sum_exp_without_a_hint_of_its_own_has_that_of_the_output(
    bug: str, case: str, attended: str, hint: str
) -> None:
    plan = plan_run(backends=[f"bugs_ranks:{bug}"], device="cpu", cases=[case], executions=["eager"])
    (item,) = plan.items
    first, second, *_ = run_item(item, plan).findings
    assert (first.check, second.check) == ("log-sum-exp", "matches-oracle")
    assert hint in first.hint
    assert attended in first.attended
    assert bool(first.attended) is bool(attended)
