"""What a graph drive returns, and what each of its options changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.errors import RunError, blame
from attn_testkit.runner_modes.graphs import AllocatedInCapture, GraphRun, run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.contract import AttentionBackend, ForwardBatch
from attn_testkit.examples import MinimalBackend
from attn_testkit.families.expected import expect
from attn_testkit.steps.schedule import Schedule, make_schedule
from cuda_on_cpu import emulated_cuda

DECODE = make_schedule(parse_case("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"))


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def drive(backend: type[AttentionBackend], options: RunOptions | None = None, schedule: Schedule = DECODE) -> GraphRun:
    harness = ServerHarness(backend, [schedule], torch.device("cuda"))
    return run_graphs(harness, [schedule], Clock(), options)


def wrong_steps(run: GraphRun) -> list[int]:
    """Indices of replays whose attention is beyond its limit."""
    wrong = []
    for schedule, observed in run.observed:
        expected = expect(schedule, observed.step)
        out = torch.stack([layer.reshape(expected.attention.shape[1:]) for layer in observed.attention]).double()
        if observed.replay and not ((out - expected.attention).abs() <= expected.attention_limit).all():
            wrong.append(observed.step.index)
    return wrong


class AllocatesInCapture(MinimalBackend):
    """Adds zeros that it makes while the first graph is captured."""

    bias: torch.Tensor | None = None

    def forward(self, q: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if self.bias is None and torch.cuda.is_current_stream_capturing():
            self.bias = torch.zeros(8, device=q.device)
        out = super().forward(q, *arguments, **named)
        return out if self.bias is None else (out.float() + self.bias[0]).to(out.dtype)


class ReplacesATensor(MinimalBackend):
    """Adds a number that each plan puts into a new tensor: 0 at a replay, 1 at capture. The old ones live on."""

    old: ClassVar[list[torch.Tensor]] = []

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.bias = torch.full((4,), float(in_capture), device=self.context.device)
        self.old.append(self.bias)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self.bias = torch.zeros(4, device=self.context.device)

    def forward(self, q: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        out = super().forward(q, *arguments, **named)
        return (out.float() + self.bias[0]).to(out.dtype)


class NaNInWarmUp(MinimalBackend):
    """Gives NaN outside a capture."""

    def forward(self, q: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        out = super().forward(q, *arguments, **named)
        return out if torch.cuda.is_current_stream_capturing() else out * torch.nan


def test_of_a_healthy_backend_only_what_its_graphs_write_themselves_is_reported() -> None:
    run = drive(MinimalBackend, RunOptions(watch_replaced=True))
    assert (run.not_finite_in_warm_up, run.replaced) == ((), ())
    assert {memory.path.split(".")[0] for memory in run.allocated_in_capture} == {"_kit_step"}
    assert run.fill == 1
    assert wrong_steps(run) == []


def test_memory_that_is_allocated_in_a_capture_is_named_with_its_bucket() -> None:
    found = [memory for memory in drive(AllocatesInCapture).allocated_in_capture if memory.path == "bias"]
    assert found == [AllocatedInCapture("bias", f"bucket {DECODE.buckets[0]}")], "not again with the next bucket"


def test_poison_in_memory_of_a_capture_shows_where_a_graph_does_not_write_it() -> None:
    assert wrong_steps(drive(AllocatesInCapture))
    assert wrong_steps(drive(AllocatesInCapture, RunOptions(poison_allocated=False))) == []


def test_replaced_tensors_are_named_only_when_they_are_watched() -> None:
    assert drive(ReplacesATensor).replaced == ()
    for options in (RunOptions(watch_replaced=True), RunOptions(copy_into_replaced=True)):
        assert drive(ReplacesATensor, options).replaced == ("bias",)


def test_a_copy_into_replaced_tensors_mends_the_graph_that_reads_them() -> None:
    # One replay of one bucket: a second plan would replace what the first one made, and not what the graph reads.
    first = DECODE.steps[0]
    alone = replace(DECODE, buckets=(first.bucket,), steps=(first,))
    watching = RunOptions(eager_steps=False, watch_replaced=True)
    assert wrong_steps(drive(ReplacesATensor, watching, alone)) == [0]
    assert wrong_steps(drive(ReplacesATensor, replace(watching, copy_into_replaced=True), alone)) == []


def test_a_warm_up_with_nan_is_reported_by_schedule() -> None:
    case = replace(DECODE.case, multi_mode=True)
    schedules = [make_schedule(c) for c in (case, *co_residents(case, MinimalBackend.capabilities.graph, 8))]
    harness = ServerHarness(NaNInWarmUp, schedules, torch.device("cuda"))
    run = run_graphs(harness, schedules, Clock(), RunOptions(eager_steps=False))
    assert run.not_finite_in_warm_up == tuple(schedules)


def test_without_eager_steps_only_replays_are_observed() -> None:
    replays = drive(MinimalBackend, RunOptions(eager_steps=False))
    assert [observed.step for _, observed in replays.observed] == list(DECODE.steps)
    assert all(observed.replay for _, observed in replays.observed)
    among_eager = drive(MinimalBackend)
    labels = [observed.label for _, observed in among_eager.observed if not observed.replay]
    assert any("requests) after replay 2 of" in label for label in labels), "a batch larger than any graph"
    assert [observed.step for _, observed in among_eager.observed if observed.replay] == list(DECODE.steps)


def test_an_eager_step_comes_before_graphs_in_half_of_the_cases_and_is_reported_last() -> None:
    seeds = {parse_case(DECODE.case.id).with_seed(seed) for seed in range(1, 9)}
    for early in (True, False):
        case = min((c for c in seeds if bool(c.derived("eager-before-graphs")) is early), key=lambda c: c.id)
        run = drive(MinimalBackend, schedule=make_schedule(case))
        labels = [observed.label for _, observed in run.observed]
        assert ("eager run before there are graphs" in labels) is early
        assert (labels[-1] == "eager run before there are graphs") is early


def test_a_replay_is_found_by_its_step() -> None:
    run = drive(MinimalBackend)
    for step in DECODE.steps:
        observed = run.replay_of(step)
        assert observed is not None
        assert (observed.step, observed.replay) == (step, True)
    assert run.replay_of(DECODE.oversized) is None, "it ran, eagerly"


def test_what_a_drive_returns_keeps_no_backend_and_no_device_memory_alive() -> None:
    freed: list[weakref.ref[Any]] = []

    class Witness(MinimalBackend):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            freed.extend([weakref.ref(self), weakref.ref(context.kv_pool.pieces[0][0])])

        def forward(self, q: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            out = super().forward(q, *arguments, **named)
            freed.extend([weakref.ref(q.untyped_storage()), weakref.ref(out)])
            return out

    run = drive(Witness)
    gc.collect()
    assert [ref() for ref in freed if ref() is not None] == []
    assert wrong_steps(run) == []


def test_blame_wraps_what_is_raised_once() -> None:
    with pytest.raises(RunError) as caught, blame("plan for replay", "replay 1"), blame("verify mask"):
        raise ValueError("no mask")
    assert (caught.value.phase, caught.value.label) == ("verify mask", "")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_clock_adds_up_a_phase_that_raises_too() -> None:
    clock = Clock()
    for _ in range(2):
        with pytest.raises(ValueError, match="late"), clock.phase("capture"):
            raise ValueError("late")
    first = clock.seconds["capture"]
    with clock.phase("capture"):
        pass
    assert clock.seconds["capture"] > first > 0
