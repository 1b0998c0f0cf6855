"""What a plan says of a case that somebody named by its id: that it takes long, and which pair excludes it."""

from __future__ import annotations

from in_process import plan_run

from attn_testkit.contract import Capabilities, Windows
from attn_testkit.examples import MinimalBackend

LONG = "extend-gqa2x2-d64-bf16-p16-k0-n4096a4096-shuffled-gauss-b1prod"
SHORT = "extend-gqa2x2-d64-bf16-p16-k0-n64a64-shuffled-gauss-b1prod"
PAIR = "extend-gqa2x2-d64-bf16-p16-k300.70.12-n6a6x3-shuffled-gauss-w4-b6prod-noncausal"


class Windowed(MinimalBackend):
    capabilities: Capabilities = MinimalBackend.capabilities.with_changes(
        non_causal={"extend"}, windows=Windows(modes={"extend"}), page_sizes={16}
    )


class WithoutWindows(MinimalBackend):
    capabilities: Capabilities = MinimalBackend.capabilities.with_changes(non_causal={"extend"}, page_sizes={16})


def test_a_case_that_takes_minutes_says_so_in_the_header_and_a_short_one_does_not() -> None:
    plan = plan_run(backends=[MinimalBackend], device="cpu", cases=[LONG, SHORT], executions=["eager"])
    ((note,),) = plan.header.notes.values()
    assert note == (
        f"{LONG} has 134 million products of a query row and a key in a step, which may take minutes on a CPU"
    )


def reason(backend: type[MinimalBackend]) -> str:
    plan = plan_run(backends=[backend], device="cpu", cases=[PAIR], executions=["eager"])
    (row,) = (row for row in plan.preset if row.case)
    return row.reason


def test_of_a_pair_that_is_excluded_the_pair_is_named_and_not_a_capability_that_is_declared() -> None:
    assert reason(Windowed) == (
        "not declared: the server variant noncausal together with a window; each of them is declared, and the pair is "
        "excluded: layers that are not causal have no window"
    )
    assert "together with" not in reason(WithoutWindows), "the window itself is not declared"
