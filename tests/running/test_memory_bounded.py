"""Device memory of an instance: facts of a case-run, and the check that equal steps do not take more of it."""

from types import SimpleNamespace

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.memory_bounded import REPEATS, memory_bounded
from attn_testkit.runner_modes.memory_use import MemoryUse
from in_process import check_backend

from attn_testkit.results.case_result import CaseResult, Status
from cuda_on_cpu import emulated_cuda

CASE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"
FAULTS = "attn_testkit_corpus.faults.j_growing_memory"
CONTROLS = "attn_testkit_corpus.faults.controls_of_memory"


def result_of(spec: str, execution: str) -> CaseResult:
    (result,) = (r for r in check_backend(spec, device="cpu", executions=[execution], cases=(CASE,)) if r.case)
    return result


@pytest.mark.parametrize(
    ("name", "execution", "where"),
    [
        ("EveryPlanKept", "eager", "in the backend's history["),
        ("EveryPlanKept", "graph", "in the backend's history["),
        ("OutputKeptByAClosure", "eager", "parent.py:"),
        ("ScratchLargerAtEveryStep", "eager", "in the backend's scratch"),
        ("ScratchLargerAtEveryStep", "graph", "in the backend's scratch"),
    ],
)
def test_memory_that_grows_at_every_step_is_a_finding_that_says_where(name: str, execution: str, where: str) -> None:
    result = result_of(f"{FAULTS}:{name}", execution)
    assert [finding.check for finding in result.findings] == ["memory-bounded"]
    assert where in result.findings[0].where
    assert result.memory["growth"] > 0


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("name", ["ScratchOfTheLargestStep", "WorkspacesByShape"])
def test_memory_that_grows_to_a_limit_is_right(name: str, execution: str) -> None:
    result = result_of(f"{CONTROLS}:{name}", execution)
    assert result.status is Status.PASSED
    assert result.memory["growth"] == 0
    assert "memory-bounded" in result.checks


class Keeping:
    """The parts of a harness that repeats need, and a step that keeps a tensor until it has ``most`` of them."""

    def __init__(self, most: int) -> None:
        self.memory, self.deliver, self.copies_pool = MemoryUse(), "deliver", True
        self.backend, self.context = SimpleNamespace(kept=[]), object()
        self.most = most

    def again(self) -> None:
        assert (self.copies_pool, self.deliver) != (True, "deliver"), "repeats are not observed"
        with self.memory.step():
            if len(self.backend.kept) < self.most:
                self.backend.kept.append(torch.zeros(100, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize(("most", "findings"), [(0, 0), (1, 0), (REPEATS, 0), (REPEATS + 1, 1)])
def test_memory_that_stops_growing_in_the_last_repeat_is_right(most: int, findings: int) -> None:
    with emulated_cuda():
        harness = Keeping(most)
        facts, found = memory_bounded(harness, Clock(), harness.again)
    assert (len(found), facts["growth"]) == (findings, 100 * findings)
    assert (harness.deliver, harness.copies_pool) == ("deliver", True)


def test_facts_of_memory_are_what_blocks_allocate_and_keep() -> None:
    memory, kept = MemoryUse(), []

    def new(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device="cuda")

    with emulated_cuda():
        with memory.kept("persistent"):
            kept.append(new(1000))
            new(5000)
        with memory.peak("eager"):
            new(1 << 20)
            kept.append(new(1 << 10))
            new(1 << 19)
        with memory.peak("eager"):
            new(1 << 22)
        for count in (1, 3, 2):
            with memory.plan():
                _ = [new(8) for _ in range(count)]
        with memory.step():
            kept.append(new(200))
    assert memory.facts == {"persistent": 1200, "growth": 0, "peak": 1 << 20, "plan_allocations": 3}
    assert memory.grown == 200
