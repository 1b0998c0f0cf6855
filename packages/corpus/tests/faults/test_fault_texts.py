"""A sample of faults, one or two of a class: the check that reports each, and a text that names the cause.

``tests/ci/test_quick_audit.py`` has others, and ``attn-testkit audit`` runs them all.
"""

from __future__ import annotations

import re

import pytest
from in_process import plan_run, run

from attn_testkit.results.case_result import Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options
from attn_testkit_corpus.audit import Settings
from attn_testkit_corpus.audit.tasks import run_task
from attn_testkit_corpus.audit.verdicts import FaultVerdict, Task
from attn_testkit_corpus.faults.catalogue import entry_of

SAMPLE = (
    "qlens-packed-vs-uniform-stride",
    "fresh-tensor-instead-of-copy",
    "row-stride-from-live-batch-max",
    "pad-fill-underflows-uniform-width",
    "pad-indptr-tail-runs-backwards",
    "pad-slot-minus-one-hits-last-slot",
    "semaphore-not-reset-when-metadata-reused",
    "accept-counts-advanced-in-place",
    "capability-that-no-case-can-meet",
    "grid-depends-on-qo-contents",
    "non-monotonic-slots",
    "table-row-width-from-max-len",
    "causal-off-by-one",
    "swa-decode-window-vs-window-plus-one",
    "kv-scale-lost-in-positional-args",
    "sink-counted-per-split",
    "recycled-block-bytes-decode-to-nan",
    "query-or-output-stride-ignored",
    "index-dtype-template-shared",
    "constructor-checks-nothing",
    "scales-q-in-place",
    "v1-rows-at-uniform-stride",
    "order-of-sums-varies",
    "prefix-of-the-first-chunk-kept",
    "prompt-attended-before-it-is-stored",
    "carry-of-rejected-drafts-stays",
)


NEW_TENSOR_AT_EACH_REPLAY = ("row-stride-from-live-batch-max", "pad-indptr-tail-runs-backwards")
"""Faults that keep a new tensor on self at every replay. No graph reads it, so it is not a stale address."""


@pytest.mark.parametrize("slug", SAMPLE)
def test_a_fault_is_caught_as_expected_and_its_text_points_at_the_cause(slug: str) -> None:
    fault = entry_of(slug)
    verdict = run_task(Task("fault", slug), Settings(device="cpu"), Runner(Options(in_process=True)))
    assert isinstance(verdict, FaultVerdict)
    assert verdict.as_expected
    # In that one a padded row stores NaN first.
    assert verdict.first in fault.checks or slug == "fresh-tensor-instead-of-copy", (
        f"caught by {verdict.caught_by}\n{verdict.text}"
    )
    # A hint may be written over several lines.
    assert re.search(fault.hint, " ".join(verdict.text.split())), verdict.text
    assert slug not in NEW_TENSOR_AT_EACH_REPLAY or "addresses-stable" not in verdict.caught_by, verdict.text


def test_where_modes_share_an_instance_the_step_says_whose_replay_is_wrong() -> None:
    fault = entry_of("two-kernels-share-one-workspace")
    # Its case alone: the audit runs those before it, too.
    plan = plan_run(backends=[fault.spec], device="cpu", tier="smoke", cases=["*-multi_mode"], executions=["graph"])
    (result,) = (result for result in run(plan) if result.status is not Status.UNSUPPORTED)
    assert result.status is Status.FAILED
    assert "buckets-independent" in {finding.check for finding in result.findings}
    text = format_failure(result, plan.header)
    assert re.search(r"step .*replay \d+ of \d+ .*, bucket \d+ of (decode|target-verify|draft-extend)", text)
