"""A part of the audit in seconds: a fault of each kind is caught, and its text names the cause; healthy backends pass.

Mutants are judged by it.
"""

from __future__ import annotations

import re

import pytest

from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options
from attn_testkit_corpus.audit.tasks import run_task
from attn_testkit_corpus.audit.verdicts import ControlVerdict, FaultVerdict, Settings, Task
from attn_testkit_corpus.faults.catalogue import entry_of

FAULTS = [
    "item-in-the-captured-forward",
    "advances-seq-lens-in-place",
    "plan-blocks-on-d2h",
    "swa-decode-one-key-more",
    "logits-in-bf16",
    "v1-counts-without-the-bonus-token",
    "length-rounded-up-to-page",
    "pad-req-row-aliases-live-request",
    "page-table-kept-while-lengths-agree",
    "tree-mask-by-depth",
    "new-keys-attended-but-not-stored",
    "early-exit-without-writing",
    "verify-keeps-the-rejected-draft",
]
CAUGHT_BEFORE = {
    "verify-keeps-the-rejected-draft": (
        "eager", "draft-decode-mha2-d64-bf16-p1-k13.2.1-topk2steps3-loop6-shared-gauss-kvfp8e4m3-w11-b4prod"
    ),
}  # fmt: skip
"""Execution and case that an audit catches a fault by after many others, so that it is tried first. If core no longer
has the case, the others are tried as before."""
CONTROLS = [
    ("page-tails-minus-one", "decode", "graph"),
    ("finite-page-tails", "target-verify", "eager"),
    ("one-output-buffer", "draft-extend", "eager"),
    ("plan-outside-the-graph", "draft-extend-v2", "eager"),
    ("batch-invariant", "decode", "eager"),
]


def runner() -> Runner:
    return Runner(Options(in_process=True))


@pytest.mark.parametrize("slug", FAULTS)
def test_a_fault_is_caught_by_a_check_that_may_catch_it_and_its_text_points_at_the_cause(slug: str) -> None:
    verdict = run_task(Task("fault", slug), Settings(device="cpu", caught_before=CAUGHT_BEFORE), runner())
    assert isinstance(verdict, FaultVerdict)
    assert verdict.as_expected, verdict
    assert re.search(entry_of(slug).hint, " ".join(verdict.text.split())), verdict.text


@pytest.mark.parametrize(("name", "mode", "execution"), CONTROLS)
def test_a_healthy_backend_passes(name: str, mode: str, execution: str) -> None:
    verdict = run_task(Task("control", name, mode, execution), Settings(tier="smoke", device="cpu"), runner())
    assert isinstance(verdict, ControlVerdict)
    assert verdict.case_runs > 0
    assert not verdict.texts
