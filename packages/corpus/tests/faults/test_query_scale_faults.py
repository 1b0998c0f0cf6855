"""Wrong scales of FP8 queries are caught and named, and every right one passes, in eager steps and in graphs."""

from __future__ import annotations

import re

import pytest
from in_process import check_backend

from attn_testkit.contract import AttentionBackend
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit_corpus.faults import all_controls
from attn_testkit_corpus.faults.catalogue import entry_of
from attn_testkit_corpus.faults.g_narrow_numbers import Fp8Probabilities

UNEVEN = "decode-gqa2x2-d64-bf16-p1-k17.4.5-reversed-large_and_small_queries-kvfp8e4m3-b4prod"
VERIFY = "target-verify-gqa2x2-d64-bf16-p1-k17.4.5-chain2-interleaved-large_and_small_queries-kvfp8e4m3-b4prod"
PADDED = "decode-gqa2x2-d64-bf16-p1-k17.4.5-shuffled-gauss-kvfp8e4m3-b4nan"
USUAL = "decode-gqa2x2-d64-bf16-p16-k30.90-shuffled-{}-kvfp8e4m3-b3prod"
EVEN = tuple(USUAL.format(data) for data in ("peaked", "rising_logits", "plus_minus_one", "mean", "large_queries"))
CONTROLS = {each.slug: each.backend for each in all_controls() if each.slug.startswith("fp8-queries-scaled")}
DRAFT = "fp8-queries-scaled-in-drafts"
DRAFTS = "draft-decode-mha2-d64-bf16-p1-k17.4.5-topk2steps2-reversed-{}-kvfp8e4m3-b4prod"


def run(backend: type[AttentionBackend], *cases: str, graph: bool = True) -> list[CaseResult]:
    found = check_backend(backend, device="cpu", cases=list(cases), executions=["graph" if graph else "eager"])
    return [result for result in found if result.case]


@pytest.mark.parametrize(
    ("slug", "case", "graph"),
    [
        ("fp8-query-scale-not-multiplied-back", UNEVEN, False),
        ("fp8-query-scale-of-another-token", UNEVEN, False),
        ("fp8-query-scale-of-the-capture", UNEVEN, True),
        ("fp8-query-scale-of-padded-rows", PADDED, True),
        ("fp8-queries-saturate", UNEVEN, False),
        ("fp8-small-queries-vanish", UNEVEN, False),
        ("fp8-query-scale-per-tensor-as-per-token", VERIFY, False),
        ("fp8-query-scale-not-declared", USUAL.format("peaked"), False),
        ("fp8-static-query-scale-not-multiplied-back", USUAL.format("gauss"), False),
        ("fp8-static-query-scale-of-unscaled-queries", USUAL.format("gauss"), True),
        ("fp8-static-query-scale-is-one", UNEVEN, False),
        ("fp8-static-query-scale-of-the-first-layer", VERIFY, False),
        ("fp8-static-query-scale-is-that-of-keys", USUAL.format("gauss"), False),
    ],
)
def test_a_wrong_scale_is_caught_by_its_check_and_named(slug: str, case: str, graph: bool) -> None:
    fault = entry_of(slug)
    (result,) = run(fault.backend, case, graph=graph)
    assert result.status is Status.FAILED
    assert result.findings[0].check in fault.checks
    assert re.search(fault.hint, format_failure(result))


@pytest.mark.parametrize("name", sorted(CONTROLS.keys() - {DRAFT}))
@pytest.mark.parametrize(
    ("graph", "even"), [(False, EVEN), (True, EVEN[:1])], ids=["eager", "graph"]
)  # In a graph scales may be those of the capture, or of padded rows; other numbers are no other graph.
def test_every_right_scale_passes_with_queries_of_every_size(name: str, graph: bool, even: tuple[str, ...]) -> None:
    results = run(CONTROLS[name], UNEVEN, VERIFY, PADDED, *even, graph=graph)
    assert [result.status for result in results] == [Status.PASSED] * (3 + len(even))


def test_each_forward_of_a_draft_may_have_a_scale_of_its_own() -> None:
    results = run(CONTROLS[DRAFT], *(DRAFTS.format(data) for data in ("gauss", "large_and_small_queries")))
    assert [result.status for result in results] == [Status.PASSED] * 2


def test_queries_that_are_cast_as_they_are_pass_where_no_scale_is_declared() -> None:
    results = run(Fp8Probabilities, PADDED, *EVEN, UNEVEN, graph=False)
    assert [result.status for result in results] == [Status.PASSED] * 7


class SaysNothing(CONTROLS["fp8-queries-scaled-per-token"]):  # type: ignore[misc]
    """The same kernel, which declares that nothing is rounded to FP8."""

    capabilities = Fp8Probabilities.capabilities.with_changes(precision={"matmul_dtype": "model", "q_scale": "none"})


def test_without_fp8_products_declared_a_right_scale_is_over_the_limit() -> None:
    (result,) = run(SaysNothing, USUAL.format("peaked"), graph=False)
    assert result.status is Status.FAILED
