"""What lies behind the live rows of a replay, as each kind of padding has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.cases.case import parse_case
from attn_testkit.examples import MinimalBackend
from attn_testkit.steps.schedule import Step, make_schedule
from cuda_on_cpu import emulated_cuda

CASE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b5{}"


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulated_cuda():
        yield


class Remembers(MinimalBackend):
    """Healthy; keeps what each replay's view has behind its live requests: positions, request rows, lengths."""

    # So that a plan may look at the device.
    capabilities = MinimalBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.padded: list[tuple[list[int], list[int], list[int]]] = []

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)
        if not in_capture:
            rows = slice(batch.batch_size - batch.num_padding, batch.batch_size)
            fields = (batch.positions, batch.req_pool_indices, batch.seq_lens)
            self.padded.append(tuple(field[rows].tolist() for field in fields))  # type: ignore[arg-type]


def replays(padding: str) -> list[tuple[Step, tuple[list[int], list[int], list[int]]]]:
    schedule = make_schedule(parse_case(CASE.format(padding)))
    harness = ServerHarness(Remembers, [schedule], torch.device("cuda"))
    run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False))
    assert isinstance(harness.backend, Remembers)
    return [*zip(schedule.steps, harness.backend.padded, strict=True)]


@pytest.mark.parametrize("padding", ["prod", "nan", "stale"])
def test_padding_is_zeros_unless_it_is_what_an_earlier_replay_left(padding: str) -> None:
    told = [(step.padding, found) for step, found in replays(padding) if step.bs < step.bucket]
    assert {kind for kind, _ in told} == {"prod", "nan", "stale"}, "one capture meets them all"
    for kind, (positions, rows, lens) in told:
        assert set(lens) == {1}, "the fill value"
        if kind != "stale":
            assert set(positions) == set(rows) == {0}
    assert any(sum(rows) for kind, (_, rows, _) in told if kind == "stale")


def test_small_padding_is_live_requests() -> None:
    assert all(step.bs == step.bucket for step, _ in replays("small"))


class Promises(MinimalBackend):
    capabilities = MinimalBackend.capabilities.with_changes(server={"finite_padding": True})


class StoresNoPadding(MinimalBackend):
    """Of padding that is not stored, a padded request attends page 0 as it was: NaN."""

    capabilities = Promises.capabilities.with_changes(server={"padding_slots": {0, -1}})


@pytest.mark.parametrize("backend", [MinimalBackend, Promises, StoresNoPadding])
def test_rows_of_no_request_are_looked_at_where_their_inputs_are_finite(backend: type[MinimalBackend]) -> None:
    schedule = make_schedule(parse_case(CASE.format("stale")))
    harness = ServerHarness(backend, [schedule], torch.device("cuda"))
    seen = [each for _, each in run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False)).observed]
    looked_at = {each.step.index: each.copies.group("padding") for each in seen if each.copies.group("padding")}
    steps = [each.step for each in seen if each.padded and each.step.padding == "prod"]
    if backend is MinimalBackend:
        steps = []
    if backend is StoresNoPadding:
        steps = [step for step in steps if harness.padding_slot(step.index) == 0]
    assert [*looked_at] == [step.index for step in steps]
    assert bool(steps) == (backend is not MinimalBackend)
    for step in steps:
        rows = torch.ones(step.bucket - step.bs, dtype=torch.bool)
        assert all(torch.equal(layer, rows) for layer in looked_at[step.index].values())
