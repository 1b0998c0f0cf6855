"""Every check has a broken backend that it catches, and the healthy control passes."""

import pytest
from broken_backends import DeclaresWhatNoCaseCanMeet, Healthy
from in_process import check_backend, plan_run, run

from attn_testkit.reports.outcome import verdict
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit.results.names import MODES

FAST = ("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod",)
PROMPT = ("extend-gqa2x2-d64-bf16-p16-k3.15-n4a4x2-shuffled-gauss-b2prod",)
NAN = ("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4nan",)
NEGATIVE = ("decode-gqa2x2-d64-fp16-p16-k3.15.40-shuffled-negative-b4prod",)


def failures(name: str, execution: str, cases: tuple[str, ...] = FAST) -> list[CaseResult]:
    results = check_backend(f"broken_backends:{name}", device="cpu", executions=[execution], cases=cases)
    return [r for r in results if r.status is Status.FAILED]


BROKEN = [
    ("ConstructorRaises", "eager", FAST, "completes", "the constructor raised FileNotFoundError: libkernels.so"),
    ("ForwardExits", "eager", FAST, "completes", "forward raised ValueError: no kernel for this shape"),
    ("WrongShape", "eager", FAST, "output-contract", "layer 0 returned shape (2, 4, 64), expected (3, 4, 64)"),
    ("WrongDtype", "eager", FAST, "output-contract", "returned torch.float32, expected the model's torch.bfloat16"),
    ("WrongDevice", "eager", FAST, "output-contract", "returned a tensor on cpu, expected cuda:0"),
    ("ReturnsNone", "eager", FAST, "output-contract", "returned None, expected a tensor of shape ("),
    ("ScalesQueryInPlace", "eager", FAST, "inputs-unchanged", "was modified"),
    ("AdvancesLengths", "eager", FAST, "inputs-unchanged", "batch.seq_lens was modified"),
    ("LeavesShortRowsUnwritten", "eager", FAST, "output-written", "request 0 has output that was never written"),
    ("ZeroTimesNan", "eager", FAST, "reads-own-kv", "it read a slot of another owner"),
    ("FiniteMinusInfinity", "eager", NEGATIVE, "matches-oracle", "differs from the oracle"),
    ("SwapsKeyAndValueOfLayer1", "eager", FAST, "writes-own-kv", "does not hold their K and V"),
    ("AcceptsAnything", "eager", FAST, "refuses-undeclared", "is not declared, yet the constructor accepted it"),
    ("TunesForEveryLength", "eager", FAST, "compiles-once", "each of 5 steps that differ only in lengths compiles"),
    ("SumsInAnyOrder", "eager", FAST, "repeatable", "different bits the second time"),
    ("RoundsByBatchSize", "eager", FAST, "batch-invariant", "different bits by itself"),
    ("RoundsDecodeDown", "eager", PROMPT, "mode-invariant", "different bits in decode than the same rows"),
    (
        "RoundsReplaysOfDecode",
        "eager",
        PROMPT,
        "mode-invariant",
        "different bits in a replay of decode in bucket 4 than",
    ),
    ("WritesPaddingToTheLastSlot", "graph", FAST, "writes-own-kv", "a slot that no live request owns was written"),
    ("ReadsHostLengths", "graph", FAST, "no-host-lengths", "NoneType"),
    ("WaitsForTheDeviceWhilePlanning", "graph", FAST, "no-host-lengths", "waits for the device"),
    ("StatisticsOverTheWholeBatch", "graph", NAN, "padding-inert", "without padded rows it is right"),
    ("NoKeysGiveNaN", "graph", FAST, "padding-finite", "output rows that belong to no request hold NaN or Inf"),
    ("WorkspaceAllocatedInCapture", "graph", FAST, "captures-cleanly", "memory that was allocated in a capture"),
    ("SharedLengthsOfAllBuckets", "graph", FAST, "buckets-independent", "as the only one it is right"),
]


@pytest.mark.parametrize(("name", "execution", "cases", "check", "headline"), BROKEN, ids=[b[0] for b in BROKEN])
def test_a_failed_check_is_named(name: str, execution: str, cases: tuple[str, ...], check: str, headline: str) -> None:
    failed = failures(name, execution, cases)
    assert len(failed) == 1, "one case was asked for, and it must fail"
    found = {finding.check: finding for finding in failed[0].findings}
    assert check in found, f"found instead: {[(f.check, f.headline) for f in failed[0].findings]}"
    assert headline in found[check].headline


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("cases", [FAST, NAN, NEGATIVE], ids=["prod", "nan", "negative"])
def test_the_healthy_control_passes(cases: tuple[str, ...], execution: str) -> None:
    assert failures("Healthy", execution, cases) == []


def test_a_capability_that_no_case_can_meet_fails() -> None:
    plan = plan_run(backends=["broken_backends:DeclaresWhatNoCaseCanMeet"], device="cpu", tier="core")
    (result,) = (r for r in run(plan) if r.case)
    assert result.status is Status.FAILED
    assert "no case can satisfy" in result.findings[0].headline
    assert "gqa_ratios" in result.findings[0].hint
    assert verdict(plan.header, [result]) == "NOT CONFORMANT: 1 failed of 1 planned case-runs"
    command = format_failure(result, plan.header).splitlines()[-1].split("attn-testkit ")[1]
    spec = "broken_backends:DeclaresWhatNoCaseCanMeet"
    assert command == f"run --backend {spec} --mode decode --execution eager --device cpu --tier core"


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"heads": {"families": ()}}, "families is empty"),
        ({"heads": {"head_dims": {1024}}}, "head_dims is empty, or holds only widths above 512"),
        ({"heads": {"families": {"gqa"}, "gqa_ratios": ()}}, "gqa_ratios is empty, and mha is not declared"),
        ({"bounds": {"max_context_len": 20}}, "max_context_len 20 has no room"),
    ],
)
def test_why_no_case_can_meet_a_capability_is_said(
    declared: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeclaresWhatNoCaseCanMeet, "capabilities", Healthy.capabilities.with_changes(**declared))
    results = [r for r in check_backend("broken_backends:DeclaresWhatNoCaseCanMeet", device="cpu") if r.case]
    assert len(results) == 2 * len(MODES)
    assert all(why in r.findings[0].hint for r in results)
