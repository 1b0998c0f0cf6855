"""A failure that only one layer shows, in a late replay: it is reported with both, and ends in a small case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_process import plan_run, run_item
from judge_here import Call

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.contract import AttentionLayer, ForwardBatch
from attn_testkit.minimize.failing_step import case_of_step, failing_step
from attn_testkit.minimize.search import Search
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.steps.schedule import make_schedule

CASE = "decode-gqa2x2-d32-bf16-p4-k19.40.6-shuffled-gauss-w7-cap1.5-sink-layers6from0varied-b4prod"
STEPS = make_schedule(parse_case(CASE)).steps
LENGTH = STEPS[7].lens[0]
"""Keys of the first request of step 7."""


class WrongInLayer4(TorchNativeBackend):
    """Layer 4 is wrong if the first request has ``LENGTH`` keys."""

    def forward(
        self, q: Any, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *more: Any, **named: Any
    ) -> Any:
        """Return the right output, doubled in layer 4 if the first request has ``LENGTH`` keys."""
        out = super().forward(q, k, v, layer, batch, *more, **named)
        return out if layer.layer_id != 4 else out.mul_(torch.where(batch.seq_lens[0] == LENGTH, 2.0, 1.0))


def test_layer_and_step_are_reported() -> None:
    assert [step.index for step in STEPS if step.lens[0] == LENGTH] == [7]
    plan = plan_run(backends=[WrongInLayer4], cases=[CASE], executions=["graph"], device="cpu")
    (finding, *_) = run_item(plan.items[0], plan).findings
    assert finding.check == "matches-oracle"
    assert f"replay 8 of {len(STEPS)} (long and short)" in finding.step
    assert "layer 4" in f"{finding.headline} {finding.where} {finding.spread}"


def test_they_are_minimized_to_a_request_and_to_layers_without_options(call: Call) -> None:
    code, out, err = call("--backend", f"{__name__}:WrongInLayer4", "--execution", "graph", CASE)
    assert code == 1, out + err
    small = parse_case(next(line.partition(":")[0] for line in out.splitlines() if line.startswith("decode-")))
    assert small.bs == small.bucket == 1
    assert (small.layers.varied, small.layers.first, small.layers.count) == (False, 4, 2)
    assert (small.window, small.logit_cap, small.sinks, small.layout, small.data) == (
        -1,
        0,
        False,
        "contiguous",
        "gauss",
    )
    assert "passes as the first step" not in out


def search_of(fails: set[str], step: str) -> Search:
    """A search on a backend that fails in some cases only, and names a step."""

    def run(case: Case) -> CaseResult:
        findings = (Finding("matches-oracle", "wrong", step=step),) if case.id in fails else ()
        status = Status.FAILED if findings else Status.PASSED
        return CaseResult("m:B", case.mode.value, "graph", case.id, status, findings)

    return Search(TorchNativeBackend.capabilities, run, seconds=600.0)


def test_a_failure_that_needs_the_steps_before_it_says_so() -> None:
    step = "replay 8 of 10 (long and short), bucket 4, 3 live; also in replay 9"
    search = search_of({CASE}, step)
    search.begin(parse_case(CASE))
    search.go_on()
    assert search.needs_steps_before == f"step 7 ({STEPS[7].label})"
    alone = case_of_step(parse_case(CASE), STEPS[7])
    assert alone is not None
    search = search_of({CASE, alone.id}, step)
    search.begin(parse_case(CASE))
    search.go_on()
    assert (search.needs_steps_before, search.case) == ("", alone)


@pytest.mark.parametrize("step", ["", "replay 1 of 10 (own batch), bucket 4, 3 live", "replay 99 of 99"])
def test_an_eager_step_and_the_own_batch_are_the_case_already(step: str) -> None:
    result = search_of({CASE}, step).run(parse_case(CASE))
    assert failing_step(parse_case(CASE), result) is None


@pytest.mark.parametrize(
    "name",
    [
        CASE,
        "target-verify-gqa2x2-d32-bf16-p4-k5.9-t0.0.1.1.3-shuffled-mean-b3prod",
        "draft-extend-gqa2x2-d32-bf16-p4-k5.9.2-n4a1.3.2-shuffled-gauss-b4stale",
        "draft-extend-v2-gqa2x2-d32-bf16-p4-k5.9.2-n4a1.3.2-reversed-gauss-b4nan",
        "extend-gqa2x2-d32-bf16-p4-k5.9.2-n7a17.1.2-chunks2-shuffled-gauss-b4prod",
        "draft-decode-gqa2x2-d32-bf16-p4-k5.9.2-topk2steps4-shuffled-gauss-b4prod",
    ],
)
def test_the_case_of_a_step_begins_with_its_requests_rows_slots_and_data(name: str) -> None:
    case = parse_case(name)
    for step in make_schedule(case).steps[1:]:
        alone = case_of_step(case, step)
        assert alone is not None
        first = make_schedule(alone).steps[0]
        assert (first.bs, first.bucket, first.lens) == (step.bs, step.bucket, step.lens)
        assert (first.layout, first.data) == (step.layout, step.data)
        assert first.padding == step.padding or step.bs == step.bucket
        assert [request.accepted for request in first.requests] == [request.accepted for request in step.requests]
        assert first.requests[0].tree == step.requests[0].tree
