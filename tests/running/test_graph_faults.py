"""The five planted graph faults: each is right in eager, is caught under the graph, and its text names the cause."""

import pytest
from in_process import check_backend, plan_run, run

from attn_testkit.results.case_result import Status
from attn_testkit.results.failure_text import format_failure, repro_command

DECODE = "decode-gqa2x2-d64-fp16-p16-k300.12-reversed-peaked-b2prod"
V1 = "draft-extend-gqa2x2-d64-bf16-p16-k5.9-n4a1.3-shuffled-gauss-b2prod"
FAULTS = [
    ("PackedStrideBackend", V1, "replay-follows-batch", "accepted counts are 1, 3 of 4, so rows are packed"),
    ("ReallocatedMetadata", DECODE, "addresses-stable", "graph_faults.py"),
    (
        "BakedMaxLength",
        DECODE,
        "replay-follows-batch",
        "requests of up to 16 KV tokens are right, but requests of 301 or more are wrong",
    ),
    ("HostRead", DECODE, "captures-cleanly", "Tensor.item"),
    ("FreedWorkspace", DECODE, "addresses-stable", "freed after the capture"),
]


@pytest.mark.parametrize(("name", "case", "check", "cause"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_graph_fault_is_caught_and_its_cause_named(name: str, case: str, check: str, cause: str) -> None:
    plan = plan_run(backends=[f"attn_testkit.examples.graph_faults:{name}"], device="cpu", cases=[case])
    eager, graph = (r for r in run(plan) if r.case)
    assert eager.status is Status.PASSED, "the fault is a graph's, not the kernel's"
    assert graph.status is Status.FAILED
    assert check in [finding.check for finding in graph.findings]
    assert cause in " ".join(format_failure(graph, plan.header).split()), "it may be written over several lines"


def test_the_last_page_example_tells_the_story() -> None:
    case = "decode-gqa4x2-d64-bf16-p16-k127.127.127.128-shuffled-gauss-b4prod"
    plan = plan_run(
        backends=["attn_testkit.examples:OffByOneBackend"],
        device="cpu",
        executions=["eager"],
        cases=["decode-gqa4x2-d64-bf16-p16-k127x3.128-shuffled-gauss-b4prod"],
    )
    (result,) = (r for r in run(plan) if r.case)
    text = format_failure(result, plan.header)
    assert "request 3 differs from the oracle" in text.splitlines()[0]
    assert "request 3 wrong in" in text
    assert "requests 0-2 right" in text
    assert "attended request 3 attended to KV tokens 0..127, expected 0..128" in text
    assert "a partly filled last page is probably dropped" in " ".join(text.split())
    assert case.split("-k")[0] in text
    # What is printed as reproduction reproduces.
    words = repro_command(result, plan.header).split()
    assert words[:3] == ["attn-testkit", "repro", "--backend"]
    again = check_backend(words[3], device="cpu", executions=["eager"], cases=[words[-1]])
    assert [r.findings for r in again if r.case] == [result.findings]
