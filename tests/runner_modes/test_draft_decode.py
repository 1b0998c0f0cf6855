"""What a backend is given in draft-decode: one plan, and a batch for each forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.cases.case import parse_case
from attn_testkit.checks.observation import Observation
from attn_testkit.contract import DraftDecodeInput, ForwardBatch, Unsupported
from attn_testkit.examples import MinimalBackend
from attn_testkit.families.expected import expect
from attn_testkit.steps.schedule import Schedule, make_schedule
from cuda_on_cpu import emulated_cuda

CASE = "draft-decode-gqa2x2-d64-bf16-p16-k3.15.40-topk2steps4-shuffled-gauss-b4{padding}"
REPLAYS_ONLY = RunOptions(eager_steps=False)


@dataclass
class Seen:
    """What one call of a hook was given."""

    hook: str
    step: int
    positions: list[int]
    slots: list[int]
    ids: list[int]


class Spy(MinimalBackend):
    """Healthy, also with branches; remembers what it was given."""

    capabilities = MinimalBackend.capabilities.with_changes(bounds={"max_draft_branches": 2})

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.kept: list[tuple[str, int, list[torch.Tensor]]] = []
        self.views: list[Any] = []
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Lengths and positions at each replay: a view shows what a later replay wrote there."""

    def note(self, hook: str, batch: ForwardBatch) -> None:
        assert isinstance(batch.spec_info, DraftDecodeInput)
        if not torch.cuda.is_current_stream_capturing():
            rows = (batch.positions, batch.out_cache_loc, batch.input_ids)
            # On the device: an eager step may not wait for it.
            self.kept.append((hook, batch.spec_info.step, [each.clone() for each in rows]))

    @property
    def seen(self) -> list[Seen]:
        return [Seen(hook, step, *(each.tolist() for each in rows)) for hook, step, rows in self.kept]

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.note("plan", batch)
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if not in_capture:
            self.views.append(batch)
            self.rows.append((batch.seq_lens.clone(), batch.positions.clone()))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.note("in graph", batch)
        super().init_forward_metadata_in_graph(batch)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: ForwardBatch, save_kv_cache: bool = True) -> Any:
        if layer.layer_id == 0:
            self.note("forward", batch)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def harness(padding: str = "prod") -> tuple[ServerHarness, Spy, Schedule]:
    schedule = make_schedule(parse_case(CASE.format(padding=padding)))
    made = ServerHarness(Spy, [schedule], torch.device("cuda"))
    assert isinstance(made.backend, Spy)
    return made, made.backend, schedule


def right(schedule: Schedule, observed: Observation) -> bool:
    expected = expect(schedule, observed.step)
    out = torch.stack([each.reshape(expected.attention.shape[1:]) for each in observed.attention]).double()
    logits = observed.outputs.next_token_logits
    assert logits is not None
    close = (logits.double() - expected.logits).abs() <= expected.logits_limit
    return bool(((out - expected.attention).abs() <= expected.attention_limit).all() and close.all())


def test_a_draft_is_planned_once_and_each_later_forward_begins_with_the_hook_for_graphs() -> None:
    server, spy, schedule = harness()
    observed = run_eager(server, schedule, schedule.steps[0], Clock())
    assert [(seen.hook, seen.step) for seen in spy.seen] == [
        ("plan", 0), ("forward", 0), ("in graph", 1), ("forward", 1), ("in graph", 2), ("forward", 2),
    ]  # fmt: skip
    assert right(schedule, observed)


def test_each_forward_has_a_row_a_branch_its_own_slots_and_the_next_positions() -> None:
    server, spy, schedule = harness()
    step = schedule.steps[0]
    run_eager(server, schedule, step, Clock())
    forwards = [seen for seen in spy.seen if seen.hook == "forward"]
    for i, seen in enumerate(forwards):
        assert seen.positions == [3 + i, 3 + i, 15 + i, 15 + i, 40 + i, 40 + i]
        own = [r.slots[r.prefix :].reshape(2, 3)[branch, i] for r in step.requests for branch in range(2)]
        assert seen.slots == own
        assert seen.ids == [first + i for first in (0, 3, 6, 9, 12, 15)]


def test_the_batch_is_left_as_it_was() -> None:
    server, _, schedule = harness()
    observed = run_eager(server, schedule, schedule.steps[0], Clock())
    assert observed.modified == ()


def test_outputs_have_a_row_for_each_branch_and_forward_in_the_order_of_the_requests() -> None:
    server, _, schedule = harness()
    outputs = run_eager(server, schedule, schedule.steps[0], Clock()).outputs
    assert outputs.next_token_logits is not None
    assert outputs.hidden_states is not None
    assert len(outputs.next_token_logits) == len(outputs.hidden_states) == 3 * 2 * 3
    assert outputs.topk_p is outputs.topk_index is None


@pytest.mark.parametrize("padding", ["prod", "nan", "stale", "small"])
def test_one_graph_of_all_forwards_is_right_for_every_batch(padding: str) -> None:
    server, spy, schedule = harness(padding)
    run = run_graphs(server, [schedule], Clock(), REPLAYS_ONLY)
    assert len(run.observed) == len(schedule.steps) == len(spy.views)
    assert all(right(schedule, observed) for _, observed in run.observed)
    assert run.not_finite_in_warm_up == ()


def test_a_replay_view_is_what_the_contract_writes_down() -> None:
    server, spy, schedule = harness()
    run_graphs(server, [schedule], Clock(), REPLAYS_ONLY)
    for view, step in zip(spy.views, schedule.steps, strict=True):
        bs = view.batch_size
        assert set(vars(view)) == {
            "forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu", "seq_lens_sum",
            "out_cache_loc", "spec_info", "positions", "num_padding", "actual_forward_mode",
        }  # fmt: skip
        assert len(view.input_ids) == len(view.positions) == 2 * bs
        assert len(view.seq_lens) == len(view.req_pool_indices) == bs
        assert (len(view.out_cache_loc), view.num_padding) == (2 * step.bs, bs - step.bs)
        spec = view.spec_info
        assert (spec.topk, spec.num_steps, spec.step, len(spec.out_cache_loc)) == (2, 4, 0, step.bs * 2 * 4)


def test_padded_requests_have_slot_0_in_every_forward() -> None:
    server, spy, schedule = harness()
    run_graphs(server, [schedule], Clock(), REPLAYS_ONLY)
    padded = [(step, *rows) for step, rows in zip(schedule.steps, spy.rows, strict=True) if step.bs < step.bucket]
    assert {step.padding for step, *_ in padded} == {"prod", "nan", "stale"}
    for step, lens, positions in padded:
        assert lens[step.bs :].tolist() == [1] * (step.bucket - step.bs)
        if step.padding != "stale":
            assert positions[2 * step.bs :].tolist() == [0] * 2 * (step.bucket - step.bs)


def test_the_context_says_how_many_branches_and_steps_and_tokens_of_one_forward() -> None:
    server, _, schedule = harness()
    context = server.context
    assert (context.draft_branches, context.speculative_num_steps) == (2, 4)
    assert context.max_num_tokens == schedule.oversized.bs * 2
    assert (context.topk, context.num_draft_tokens) == (0, 1)


def test_more_branches_than_are_declared_are_refused() -> None:
    schedule = make_schedule(parse_case(CASE.format(padding="prod")))
    with pytest.raises(Unsupported, match="draft branches 2 is not declared"):
        ServerHarness(MinimalBackend, [schedule], torch.device("cuda"))
