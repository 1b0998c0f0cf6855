"""Faults of extents, masks, windows, numbers, splits, addresses, contracts, rows and bits: caught, and named truly.

A sample, two or three of a class; ``attn-testkit audit`` runs them all.
"""

from __future__ import annotations

import re

import pytest
from in_process import plan_run, run

from attn_testkit.faults import all_faults
from attn_testkit.results.case_result import Status
from attn_testkit.results.failure_text import format_failure

SAMPLE = (
    "draft-extend-v2-prefix-only",
    "non-monotonic-slots",
    "page-id-used-as-slot",
    "table-row-width-from-max-len",
    "length-rounded-up-to-page",
    "window-by-flat-query-index",
    "tree-mask-by-depth",
    "causal-off-by-one",
    "swa-decode-window-vs-window-plus-one",
    "swa-window-taken-from-group",
    "softcap-after-mask",
    "kv-scale-lost-in-positional-args",
    "sink-counted-per-split",
    "heads-mapped-round-robin",
    "uniform-splits-give-empty-splits",
    "recycled-block-bytes-decode-to-nan",
    "early-exit-without-writing",
    "query-or-output-stride-ignored",
    "index-dtype-template-shared",
    "k-and-v-swapped-on-store",
    "constructor-checks-nothing",
    "scales-q-in-place",
    "v1-rows-at-uniform-stride",
    "siblings-share-a-slot",
    "order-of-sums-varies",
    "first-row-in-place-of-the-last",
    "prefix-of-the-first-chunk-kept",
    "prompt-attended-before-it-is-stored",
)
FAULTS = {fault.slug: fault for fault in all_faults()}


@pytest.mark.parametrize("slug", SAMPLE)
def test_a_fault_is_caught_by_its_check_and_the_text_points_at_it(slug: str) -> None:
    fault = FAULTS[slug]
    plan = plan_run(
        backends=[fault.spec],
        tier="core",
        device="cpu",
        modes=[mode.value for mode in fault.modes],
        executions=[execution.value for execution in fault.executions],
    )
    caught = next((result for result in run(plan) if result.status is Status.FAILED), None)
    assert caught is not None, f"{slug} survived"
    text = " ".join(format_failure(caught, plan.header).split())
    assert caught.findings[0].check in fault.checks, text
    # A hint may be written over several lines.
    assert re.search(fault.hint, " ".join(text.split())), text
