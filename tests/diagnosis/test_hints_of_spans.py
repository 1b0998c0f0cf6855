"""What is said of backends that get bidirectional spans wrong, in one small case."""

from __future__ import annotations

import pytest
from in_process import plan_run, run_item

from attn_testkit_corpus.faults.catalogue import entry_of

CASE = "extend-gqa4x2-d64-bf16-p16-k9.30.0.20-n17a17.4.24.6-shuffled-gauss-w5-spansprefixwidebylayer-b4prod"
TOLD = [
    ("spans-that-never-reach-the-kernel", "rows of a span do not see its later rows"),
    ("first-span-only", "only the first span of each request is used"),
    ("spans-of-the-request-before", "each request has those of the one before"),
    ("end-of-a-span-excluded", "the last position of a span is outside"),
    ("end-of-a-span-included-twice", "the position after the last one of a span is inside"),
    ("spans-counted-from-the-step", "positions of spans are counted from the first row of the step"),
    ("adjacent-spans-are-one", "adjacent spans are one"),
    ("spans-in-every-layer", "layers without spans have them too"),
    ("window-lost-with-a-mask-of-spans", "the window is not applied in a batch with spans"),
    ("spans-exempt-from-the-window", "the window does not narrow spans"),
    ("causal-by-row-number-with-a-mask-of-spans", "compared with the row's number in the step"),
    ("keys-of-spans-for-every-row", "keys of a span are visible to rows outside of it"),
]
LONGER = "extend-gqa4x2-d64-bf16-p16-k9.30-n37a70.4-shuffled-gauss-spans-b2prod"
"""A span of more rows than a tile."""


@pytest.mark.parametrize(
    ("slug", "said", "case"),
    [
        *((*each, CASE) for each in TOLD),
        ("tiles-end-at-their-last-row", "ends where it would for causal rows in tiles of 16", LONGER),
    ],
)
def test_a_rule_of_spans_that_a_backend_gets_wrong_is_named_and_no_other(slug: str, said: str, case: str) -> None:
    plan = plan_run(backends=[entry_of(slug).spec], device="cpu", cases=[case], executions=["eager"])
    (item,) = (item for item in plan.items if item.execution == "eager")
    finding = run_item(item, plan).findings[0]
    assert finding.check == "matches-oracle"
    first, *others = finding.hint.split("\n")
    assert said in first
    assert not others
