"""One instance in several modes by turns: what is planned after what, in eager and around replays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import eager_by_turns
from attn_testkit.runner_modes.graphs import in_graphs, last_live, run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.co_residents import declared_co_residents
from attn_testkit.contract import BackendContext, Capabilities, ForwardBatch, ForwardMode
from attn_testkit.examples import MinimalBackend
from attn_testkit.steps.schedule import Schedule, make_schedule
from cuda_on_cpu import emulated_cuda

MIXED = parse_case("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod-multi_mode")
DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
CAPABILITIES = MinimalBackend.capabilities.with_changes(eager={DECODE, VERIFY, EXTEND}, graph={DECODE, VERIFY})


class Plans(MinimalBackend):
    """Notes every plan."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.plans: list[str] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)  # which is the other hook's plan
        self.plans[-1] = f"eager {batch.forward_mode}"

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.plans.append(f"{'capture' if in_capture else 'replay'} {batch.forward_mode}")
        super().init_forward_metadata_out_graph(batch, in_capture)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def schedules(declared: Capabilities = CAPABILITIES) -> list[Schedule]:
    others = declared_co_residents(declared, MIXED, declared.eager | declared.graph)
    return [make_schedule(case) for case in (MIXED, *others)]


def record(declared: Capabilities) -> tuple[list[str], list[str]]:
    """(plans, labels of what was observed) of a graph drive."""
    found = schedules(declared)
    harness = ServerHarness(Plans, found, torch.device("cuda"), declared=declared)
    # With options it is not evaluated, and repeats no step to measure memory.
    run = run_graphs(harness, found, Clock(), RunOptions())
    assert isinstance(harness.backend, Plans)
    return harness.backend.plans, [observed.label for _, observed in run.observed]


def test_a_round_of_eager_steps_of_all_modes_is_made_for_each_turn() -> None:
    found = schedules()
    harness = ServerHarness(Plans, found, torch.device("cuda"), declared=CAPABILITIES)
    seen = eager_by_turns(harness, [(each, each.steps[0]) for each in found], Clock(), ("one", "two"))
    assert isinstance(harness.backend, Plans)
    order = [str(each.case.mode) for each in found]
    assert harness.backend.plans == [f"eager {mode}" for mode in order * 2]
    assert [each.label for each in seen] == [f"eager {mode}, {turn}" for turn in ("one", "two") for mode in order]
    assert {each.ran_before for each in seen} == {"modes"}


def test_a_graph_drive_ends_with_eager_steps_replays_and_eager_steps_of_all_modes() -> None:
    plans, labels = record(CAPABILITIES)
    assert plans[-8:] == [
        "eager decode",
        "eager extend",
        "eager target-verify",
        "replay target-verify",
        "replay decode",
        "eager target-verify",
        "eager extend",
        "eager decode",
    ]
    modes = ("decode", "extend", "target-verify")
    assert [each for each in labels if "all replays" in each] == [f"eager {mode}, after all replays" for mode in modes]
    assert sum(label.endswith("live, again, modes in turn") for label in labels) == 2
    assert not [plan for plan in plans if "extend" in plan and "eager" not in plan], "no graph of it is declared"


def test_modes_that_no_graph_is_declared_of_run_beside_the_graphs_of_one_mode() -> None:
    plans, _ = record(CAPABILITIES.with_changes(eager={EXTEND}, graph={DECODE}))
    assert plans[-3:] == ["eager extend", "replay decode", "eager extend"]


def test_the_first_schedule_is_captured_though_its_mode_may_not_be_declared() -> None:
    found = schedules()
    modes = [each.case.mode for each in in_graphs(found, CAPABILITIES.with_changes(graph={VERIFY}))]
    assert modes == [DECODE, VERIFY]


def test_the_last_step_with_requests_comes_again() -> None:
    schedule = schedules()[0]
    assert last_live(schedule) is schedule.steps[-1]
    idle = replace(schedule.steps[-1], requests=())
    assert last_live(replace(schedule, steps=(*schedule.steps, idle))) is schedule.steps[-1]
