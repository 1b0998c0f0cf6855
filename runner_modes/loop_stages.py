"""One stage of a greedy-equivalence loop: a batch of any mode on the loop's instance, eager or by its graph.

Memory is not loaded before a stage: it holds the results of earlier stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attn_testkit.cases.case import Case
from attn_testkit.checks.lossless import TokenAttention
from attn_testkit.contract import ForwardMode, StateInput
from attn_testkit.families.recurrent.data import StateStepData
from attn_testkit.model import Model, Trace, pack, row_width
from attn_testkit.steps.data import HIDDEN, VOCAB, StepData
from attn_testkit.steps.greedy_loop import Loop, Vocabulary
from attn_testkit.steps.schedule import Request, Schedule, Step
from attn_testkit.watches.packing import Sent
from attn_testkit.watches.uploads import upload_into

from .batches import batch_on_device, eager_batch
from .capture import ScheduleGraphs, capture_schedules
from .clock import Clock
from .errors import blame
from .forward import forward
from .harness import ServerHarness, StagedStep
from .mode_runners import MODE_RUNNERS
from .replay import fill_static, view_of
from .tensors.states import captured_states

Rows = torch.Tensor
"""Tensor [rows, ...] float32, host."""


@dataclass(frozen=True)
class StatesOfStage:
    """Slots of the states of a stage's requests."""

    lists: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    """[bs, 1], or with rollback ``slots`` [bs, N]."""
    taken: tuple[int, ...]
    """Place of the slot that holds the state of each request, in the list of the request, from 1 on."""


@dataclass(frozen=True)
class StageResult:
    """Results of a stage, on the host."""

    logits: Rows
    """[R, vocab]: logits of the rows that the mode returns."""
    attention: Rows
    """[T, L, Hq * Dv]: attention outputs of all live rows."""
    staged: StagedStep
    state: StateInput | None
    """``ForwardBatch.state`` of the batch, padded requests included; None without layers that keep a state."""
    bs: int
    """Requests of the batch, padded ones included."""


@dataclass(frozen=True)
class LoopServer:
    """The instance of a loop, with its results so far."""

    harness: ServerHarness
    case: Case
    loop: Loop
    graphs: Mapping[ForwardMode, ScheduleGraphs]
    """Graphs by mode; a mode without any runs eagerly."""
    said: list[TokenAttention] = field(default_factory=list)

    def schedule(self, mode: ForwardMode) -> Schedule:
        """The schedule of a mode."""
        return next(each for each in self.loop.schedules if each.case.mode is mode)

    def note(self, label: str, text: int, position: int, attention: torch.Tensor) -> None:
        """Keep the attention outputs of a token of a text."""
        self.said.append(TokenAttention(label, text, position, attention.numpy().copy()))

    def run(
        self,
        mode: ForwardMode,
        requests: Sequence[Request],
        ids: Sequence[int],
        label: str,
        states: StatesOfStage | None = None,
    ) -> StageResult:
        """Run a batch of a mode. Raises ``RunError``."""
        step = Step(label, 0, label, self.case.bucket, tuple(requests), self.loop.table, 0)
        staged, driver = _loaded(self.schedule(mode), step, ids, states), MODE_RUNNERS[mode]
        trace, state = (_replay if mode in self.graphs else _eager)(self, mode, staged)
        with blame("read back", label):
            assert trace.logits is not None
            bs = step.bucket if mode in self.graphs else step.bs
            live, returned = driver.live_rows(staged, bs), driver.returned_rows(staged, bs)
            attention = torch.stack([out.cpu()[live].flatten(1).float() for out in trace.attention], 1)
            return StageResult(trace.logits.cpu()[returned], attention, staged, state, bs)


def graphs_of(
    harness: ServerHarness, schedules: Sequence[Schedule], clock: Clock
) -> Mapping[ForwardMode, ScheduleGraphs]:
    """Capture the graphs of some schedules. Raises ``RunError``."""
    captured = capture_schedules(harness, schedules, torch.cuda.graph_pool_handle(), clock)
    return {each.schedule.case.mode: each for each in captured}


def make_model(harness: ServerHarness, words: Vocabulary) -> Model:
    """A model whose table has a row for each word, and one row of NaN."""
    layers, device = harness.context.layers, harness.device
    shape = VOCAB + 1, len(layers), row_width(layers, harness.context.dtype)
    table = torch.full(shape, torch.nan, dtype=harness.context.dtype, device=device)
    hidden = torch.full((VOCAB + 1, HIDDEN), torch.nan, device=device)
    upload_into(table[:-1], pack(words.q, words.k, words.v, one_row=layers[0].head_layout.values_in_keys))
    upload_into(hidden[:-1], words.hidden)
    return Model(harness.case, layers, table, hidden)


def _eager(server: LoopServer, mode: ForwardMode, staged: StagedStep) -> tuple[Trace, StateInput | None]:
    harness, driver, label = server.harness, MODE_RUNNERS[mode], staged.step.label
    spec, extends = driver.eager_spec(harness, staged), driver.eager_extends(harness, staged)
    batch, _ = batch_on_device(eager_batch(harness, staged, mode, spec, extends), harness.device)
    with blame("plan", label):
        harness.backend.init_forward_metadata(batch)
    with blame("forward", label):
        return forward(harness, driver, batch, staged.schedule.case), batch.state


def _replay(server: LoopServer, mode: ForwardMode, staged: StagedStep) -> tuple[Trace, StateInput | None]:
    harness, graphs, label = server.harness, server.graphs[mode], staged.step.label
    fill_static(graphs, staged)
    with blame("plan for replay", label):
        harness.backend.init_forward_metadata_out_graph(view_of(graphs, staged))
    captured = graphs.buckets[staged.step.bucket].captured
    with blame("replay", label):
        harness.replay_graph(captured.graph)
    return captured.outputs, captured_states(harness.context, graphs.static, mode, staged.step.bucket)


def _loaded(schedule: Schedule, step: Step, ids: Sequence[int], states: StatesOfStage | None) -> StagedStep:
    """A step whose memory and request table exist already and are not checked afterwards."""
    none = np.zeros(0, np.uint8)
    return StagedStep(
        schedule, step, _numbers(step, states), 0, (), (), Sent((), none, none), none,
        tokens=torch.tensor(list(ids)),
    )  # fmt: skip


def _numbers(step: Step, states: StatesOfStage | None) -> StepData:
    """Numbers of a step's rows that a batch needs; their q, k and v are in the model's table."""
    none, rows = torch.zeros(0), []
    for request in step.requests:
        shape = request.tree or request.draft
        rows += [request.prefix + depth for depth in (shape.depths if shape else range(request.new))]
    slots = np.concatenate([request.slots[request.prefix :] for request in step.requests])
    numbers: dict[str, Any] = {
        "q": none, "k": none, "v": none, "stored_keys": none, "stored_values": None, "kv_scales": none,
        "visible": none, "key_positions": none, "query_positions": none, "row_request": none, "row_offset": none,
        "row_key": none, "hidden": torch.zeros(step.tokens, HIDDEN), "positions": torch.tensor(rows),
        "out_cache_loc": torch.from_numpy(slots),
    }  # fmt: skip
    if states is None:
        return StepData(**numbers)
    found = StateStepData(**numbers, lists=states.lists, taken=states.taken)
    return StepData(**numbers, parts={"recurrent": found})
