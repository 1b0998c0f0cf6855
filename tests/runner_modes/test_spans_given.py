"""Bidirectional spans: what a backend is given in eager, at capture and at a replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import ForwardBatch
from attn_testkit.steps.schedule import make_schedule
from cuda_on_cpu import emulated_cuda

CASE = "extend-gqa2x2-d32-bf16-p4-k19.6.8-n9a9.4.7-shuffled-gauss-w7-spansprefix-b4prod"


class Spy(TorchNativeBackend):
    """Healthy; remembers the spans that it was given, in host memory where they are known there."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.given: list[tuple[str, Any, torch.Tensor | None, int]] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._note("eager", batch)
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self._note("capture" if in_capture else "replay", batch)

    def _note(self, stage: str, batch: ForwardBatch) -> None:
        tensor = getattr(batch, "mm_prefix_range_tensor", None)
        kept = None if tensor is None else tensor.clone()
        self.given.append((stage, getattr(batch, "mm_prefix_range", "absent"), kept, batch.batch_size))


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def padded(spans: list[list[tuple[int, int]]], most: int) -> list[list[list[int]]]:
    return [[list(each) for each in [*own, *[(0, 0)] * (most - len(own))]] for own in spans]


def test_an_eager_batch_has_as_many_ranges_as_its_richest_request_and_no_tensor_if_none_has_any() -> None:
    schedule = make_schedule(parse_case(CASE))
    harness = ServerHarness(Spy, [schedule], torch.device("cuda"))
    step = schedule.steps[0]
    run_eager(harness, schedule, step, Clock())
    assert isinstance(harness.backend, Spy)
    stage, listed, tensor, bs = harness.backend.given[0]
    own = [list(request.spans) for request in step.requests]
    assert (stage, listed, bs) == ("eager", own, 3)
    assert tensor is not None
    assert tensor.dtype is torch.int32
    assert tensor.tolist() == padded(own, max(map(len, own)))
    alone = make_schedule(parse_case("extend-gqa2x2-d32-bf16-p4-k19-n9a9-shuffled-gauss-spans-b1prod"))
    empty = next(each for each in alone.steps if not any(request.spans for request in each.requests))
    harness = ServerHarness(Spy, [alone], torch.device("cuda"))
    run_eager(harness, alone, empty, Clock())
    assert isinstance(harness.backend, Spy)
    _, listed, tensor, bs = harness.backend.given[0]
    assert (listed, tensor) == ([[]] * bs, None)


def test_a_graph_is_captured_without_spans_and_each_replay_has_its_own_in_the_same_memory() -> None:
    schedule = make_schedule(parse_case(CASE))
    harness = ServerHarness(Spy, [schedule], torch.device("cuda"))
    run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False))
    spy, most = harness.backend, harness.context.max_spans
    assert isinstance(spy, Spy)
    captured = [each for each in spy.given if each[0] == "capture"]
    replayed = [each for each in spy.given if each[0] == "replay"]
    assert len(captured) == len(schedule.buckets)
    for _, listed, tensor, bs in captured:
        assert listed == [[]] * bs
        assert tensor is not None
        assert tensor.tolist() == padded(listed, most)
    for (_, listed, tensor, bs), step in zip(replayed, schedule.steps, strict=True):
        assert listed == [list(request.spans) for request in step.requests] + [[]] * (bs - step.bs)
        assert tensor is not None
        assert tensor.tolist() == padded(listed, most)


@pytest.mark.parametrize("case_id", [CASE.replace("-spansprefix", "")])
def test_batches_of_layers_without_spans_have_none(case_id: str) -> None:
    schedule = make_schedule(parse_case(case_id))
    harness = ServerHarness(Spy, [schedule], torch.device("cuda"))
    assert harness.context.max_spans == 0
    run_eager(harness, schedule, schedule.steps[0], Clock())
    run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False))
    assert isinstance(harness.backend, Spy)
    kept = {(stage, listed) for stage, listed, tensor, _ in harness.backend.given if tensor is None}
    assert kept == {("eager", None), ("capture", None), ("replay", "absent")}
