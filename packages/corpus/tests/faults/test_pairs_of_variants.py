"""A bug that needs two server variants at once passes all cases of either one, and core has a case of both."""

from __future__ import annotations

import re

import pytest
from in_process import check_backend

from attn_testkit.cases.case import Case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import AttentionBackend, ForwardMode
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit_corpus.faults.catalogue import entry_of
from attn_testkit_corpus.faults.controls_of_masks import PaddedRowsOfBlocks

FAULT = entry_of("last-request-ends-where-padded-rows-do")
BOTH = frozenset({"padded_tokens", "noncausal"})


def core(mode: ForwardMode) -> list[Case]:
    return list(generate(FAULT.backend.capabilities, mode, "core"))


def run(backend: type[AttentionBackend], *cases: Case) -> list[CaseResult]:
    ids = [case.id for case in cases]
    found = check_backend(backend, device="cpu", cases=ids, executions=["eager"])
    return [result for result in found if result.case]


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY])
def test_padded_rows_of_layers_that_are_not_causal_are_tried_together(mode: ForwardMode) -> None:
    both = next(case for case in core(mode) if case.variants >= BOTH)
    (failed,) = run(FAULT.backend, both)
    assert failed.status is Status.FAILED
    assert failed.findings[0].check in FAULT.checks
    assert re.search(FAULT.hint, format_failure(failed))
    (passed,) = run(PaddedRowsOfBlocks, both)
    assert passed.status is Status.PASSED
    alone = [case for case in core(mode) if len(case.variants & BOTH) == 1][:4]
    assert {word for case in alone for word in case.variants} >= BOTH
    assert [result.status for result in run(FAULT.backend, *alone)] == [Status.PASSED] * len(alone)
