"""What a plan says of a case that somebody named by its id: that it takes long, and which pair excludes it."""

from __future__ import annotations

import pytest
from in_process import plan_run

from attn_testkit.contract import Capabilities, Windows
from attn_testkit.examples import MinimalBackend
from attn_testkit.registry import UsageError

LONG = "extend-gqa2x2-d64-bf16-p16-k0-n4096a4096-shuffled-gauss-b1prod"
SHORT = "extend-gqa2x2-d64-bf16-p16-k0-n64a64-shuffled-gauss-b1prod"
PAIR = "extend-gqa2x2-d64-bf16-p16-k300.70.12-n6a6x3-shuffled-gauss-w4-b6prod-noncausal"


class Windowed(MinimalBackend):
    capabilities: Capabilities = MinimalBackend.capabilities.with_changes(
        options={"non_causal": {"extend"}}, windows=Windows(modes={"extend"}), kv_pool={"page_sizes": {16}}
    )


def test_a_case_that_takes_minutes_says_so_in_the_header_and_a_short_one_does_not() -> None:
    plan = plan_run(backends=[MinimalBackend], device="cpu", cases=[LONG, SHORT], executions=["eager"])
    ((note,),) = plan.header.notes.values()
    assert note == (
        f"{LONG} has 134 million products of a query row and a key in a step, which may take minutes on a CPU"
    )


def test_of_a_pair_that_is_excluded_the_reason_is_given() -> None:
    with pytest.raises(UsageError, match="noncausal: a window of layers that are not causal needs a declared meaning"):
        plan_run(backends=[Windowed], device="cpu", cases=[PAIR], executions=["eager"])
