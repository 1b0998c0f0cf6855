"""Another instance at work beside the one that is judged, and memory beside an output that the caller lends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, ClassVar

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.co_resident import EagerCoResident
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.errors import RunError
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import AttentionBackend, AttentionLayer, ForwardBatch
from attn_testkit.examples import MinimalBackend
from attn_testkit.steps.schedule import Schedule, make_schedule
from cuda_on_cpu import emulated_cuda

OWN = make_schedule(parse_case("decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"))
OTHER = make_schedule(parse_case("decode-mha2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"))
OUT_GIVEN = make_schedule(parse_case("decode-gqa2x2-d64-bf16-p16-k9.70.1-contiguous-gauss-b4prod-given_out"))
REPLAYS_ONLY = RunOptions(eager_steps=False)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def server(backend: type[AttentionBackend], schedule: Schedule) -> ServerHarness:
    return ServerHarness(backend, [schedule], torch.device("cuda"))


class Noted(MinimalBackend):
    """Notes who plans and who runs, by the number of query heads."""

    said: ClassVar[list[str]] = []

    def note(self, what: str) -> None:
        self.said.append(f"{what} {self.context.layers[0].tp_q_head_num}")

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.note("plan")
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.note("capture" if in_capture else "plan")
        super().init_forward_metadata_out_graph(batch, in_capture)

    def forward(self, q: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        self.note("run")
        return super().forward(q, *arguments, **named)


def test_another_instance_plans_and_runs_between_plan_and_replay_and_again_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Noted, "said", said)
    own, other = server(Noted, OWN), server(Noted, OTHER)
    for harness, heads in ((own, 4), (other, 2)):

        def noted(graph: Any, replay: Any = harness.replay_graph, heads: int = heads) -> None:
            said.append(f"replay {heads}")
            replay(graph)

        harness.replay_graph = noted
    run_graphs(own, [OWN], Clock(), REPLAYS_ONLY, co_resident=(other, OTHER))
    replays = said[len(said) - 6 * len(OWN.steps) :]
    assert replays == ["plan 4", "plan 2", "replay 2", "replay 4", "plan 2", "replay 2"] * len(OWN.steps)


def test_another_instance_runs_behind_the_plan_and_behind_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Noted, "said", said)
    own, other = server(Noted, OWN), server(Noted, OTHER)
    layers = len(own.context.layers)
    beside = EagerCoResident(other, OTHER)
    run_eager(own, OWN, OWN.steps[0], Clock(), between=beside.another_run)
    in_turn = [name for name, _ in groupby(said)]
    assert in_turn == ["plan 4", "plan 2", "run 2", *["run 4", "plan 2", "run 2"] * layers]


def test_what_another_instance_raises_is_reported_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = server(MinimalBackend, OWN), server(MinimalBackend, OTHER)

    def refused(batch: ForwardBatch) -> None:
        raise ValueError("no")

    monkeypatch.setattr(other.backend, "init_forward_metadata", refused)
    with pytest.raises(RunError) as raised:
        run_eager(own, OWN, OWN.steps[0], Clock(), between=EagerCoResident(other, OTHER).another_run)
    assert (raised.value.phase, raised.value.label) == ("plan", "another instance")


class WritesBeside(TorchNativeBackend):
    """In the last layer a number is written so many places before the first of the output, or behind its last."""

    at: ClassVar[int | None] = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is not None
        result = super().forward(q, k, v, layer, batch, save_kv_cache, out)
        if self.at is not None and layer == self.context.layers[-1]:
            last = out.storage_offset() + out.numel() - 1
            place = last + self.at if self.at > 0 else out.storage_offset() + self.at
            out.as_strided((1,), (1,), place).fill_(0.0)
        return result


@pytest.mark.parametrize(("at", "where"), [(None, ""), (1, "behind"), (-1, "before")])
@pytest.mark.parametrize("graph", [False, True])
def test_memory_before_and_behind_a_lent_output_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, at: int | None, where: str, graph: bool
) -> None:
    monkeypatch.setattr(WritesBeside, "at", at)
    harness = server(WritesBeside, OUT_GIVEN)
    last = harness.context.layers[-1].layer_id
    if graph:
        seen = [observed for _, observed in run_graphs(harness, [OUT_GIVEN], Clock(), REPLAYS_ONLY).observed]
    else:
        seen = [run_eager(harness, OUT_GIVEN, OUT_GIVEN.steps[0], Clock())]
    due = (f"memory {where} out of layer {last}",) if where else ()
    assert {observed.modified for observed in seen} == {due}
