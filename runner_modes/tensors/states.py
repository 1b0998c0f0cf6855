"""``ForwardBatch.state``: the slots of a step's requests."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.case import Case
from attn_testkit.contract import BackendContext, ForwardMode, Snapshot, StateBackend, StateInput
from attn_testkit.contract.state import ROLLBACKS, SLOTS_IN_DECODE
from attn_testkit.families.by_layer import schedule_of
from attn_testkit.families.recurrent.data import StateStepData, shape_of, slots_listed, state_places, states_in
from attn_testkit.steps.schedule import Schedule
from attn_testkit.watches.uploads import upload

from ..errors import blame
from ..harness import ServerHarness, StagedStep
from ..step_tensor import BatchField, Buffers, Filling, StepTensor

_OTHER_SLOT = 1
"""Contents of columns of a wider buffer that belong to no request: the slot of some request, or of none."""


def _begun(staged: StagedStep) -> list[bool]:
    return [request.prefix > 0 for request in staged.step.requests]


def _numbers(staged: StagedStep) -> StateStepData:
    data = states_in(staged.data)
    assert data is not None
    return data


def _by_slots(context: BackendContext, mode: ForwardMode) -> bool:
    rollback = context.state.rollback if context.state else ROLLBACKS[0]
    in_decode = mode is ForwardMode.DECODE and rollback == SLOTS_IN_DECODE
    return rollback != ROLLBACKS[0] and (mode.is_target_verify() or in_decode)


def _copies_now(context: BackendContext, mode: ForwardMode) -> bool:
    """True if the forward of a mode is asked for copies. After a verify the commit is asked."""
    return context.state is not None and context.state.snapshots > 0 and not mode.is_target_verify()


def _given_sources(context: BackendContext, mode: ForwardMode) -> bool:
    return context.state is not None and context.state.continues == "source" and not mode.is_target_verify()


def _places(staged: StagedStep) -> npt.NDArray[np.int64]:
    return state_places(schedule_of(staged.schedule, "recurrent"))


def _snapshot(staged: StagedStep, data: StateStepData, padded: int = 0) -> Snapshot:
    """Copies of a step, on the host."""
    none = (0,) * padded
    rows = torch.tensor((*data.snapshot_rows, *none), dtype=torch.int32)
    return Snapshot(rows, torch.from_numpy(_places(staged)[[*data.snapshot_slots, *none]]))


def eager_states(context: BackendContext, staged: StagedStep) -> StateInput | None:
    """``ForwardBatch.state`` of a live batch, on the host."""
    if context.state is None:
        return None
    mode, data = staged.schedule.case.mode, _numbers(staged)
    own = _places(staged)[data.lists if _by_slots(context, mode) else data.lists[:, :1]].astype(np.int32)
    lists = _INDICES.widened(torch.from_numpy(own), staged.schedule.case)
    if _by_slots(context, mode):
        return StateInput(lists, num_accepted=torch.tensor(data.taken, dtype=torch.int32))
    begun = torch.tensor(_begun(staged), dtype=torch.bool) if mode is ForwardMode.EXTEND else None
    sources = torch.from_numpy(_places(staged)[list(data.sources)].astype(np.int32))
    return StateInput(
        lists[:, 0], begun, sources=sources if _given_sources(context, mode) else None,
        snapshot=_snapshot(staged, data) if _copies_now(context, mode) else None,
    )  # fmt: skip


def captured_states(context: BackendContext, buffers: Buffers, mode: ForwardMode, bs: int) -> StateInput | None:
    """``ForwardBatch.state`` of a bucket, at its capture and at its replays: slices of the static buffers."""
    if context.state is None:
        return None
    case = buffers.schedule.case
    lists = buffers.rows(_INDICES.name, _listed(context, case))[:bs]
    if _by_slots(context, mode):
        return StateInput(lists, num_accepted=buffers["state_accepted"][:bs])
    begun = buffers["has_initial_state"][:bs] if mode is ForwardMode.EXTEND else None
    copies = (buffers["snapshot_rows"][:bs], buffers["snapshot_slots"][:bs])
    sources = buffers["state_sources"][:bs] if _given_sources(context, mode) else None
    snapshot = Snapshot(*copies) if _copies_now(context, mode) else None
    return StateInput(lists[:, 0], begun, sources=sources, snapshot=snapshot)


def commit_states(harness: ServerHarness, staged: StagedStep, state: StateInput | None, bs: int) -> None:
    """Commit what a verify of ``bs`` requests accepted, as a server does after the step. Nothing is done in other
    modes, or if the counts of the next step convey it.
    """
    mode = staged.schedule.case.mode
    shape = staged.schedule.case.state
    if state is None or shape is None or not mode.is_target_verify() or not shape.commits:
        return
    # With slots for its nodes a verify stores states before they are accepted.
    for each in harness.memories if not shape.by_slots else ():
        each.memory.before_commit(each.watch)
    data, padded = _numbers(staged), bs - staged.step.bs
    kept = [count - 1 for count in data.kept] + [-1] * padded
    steps = upload(torch.tensor(kept, dtype=torch.int32), harness.device)
    if harness.context.state is not None and harness.context.state.snapshots:
        host = _snapshot(staged, data, padded)
        state = replace(state, snapshot=Snapshot(*(upload(each, harness.device) for each in (host.rows, host.slots))))
    with blame("commit"):
        cast(StateBackend, harness.backend).commit(steps, state)
        torch.cuda.synchronize()


def _listed(context: BackendContext, case: Case) -> int:
    """Slots of states that a batch of a mode lists per request: with rollback by slots each node's."""
    if context.state is None:
        return 0
    return slots_listed(case) if case.by_slots else 1


def _kept(context: BackendContext, case: Case) -> int:
    return 1 if context.state else 0


def _continued(context: BackendContext, case: Case) -> int:
    return 1 if context.state and context.state.continues == "source" else 0


def _copied(context: BackendContext, case: Case) -> int:
    return 1 if context.state and context.state.snapshots else 0


def _nowhere(harness: ServerHarness, schedule: Schedule, fill: int) -> int:
    """Index of a padded request."""
    return harness.case.state.padded_index if harness.case.state else 0


def _after_indices(filling: Filling) -> int:
    return shape_of(filling.case).padded_index


def _live_lists(filling: Filling) -> npt.NDArray[np.int64]:
    lists, count = _numbers(filling.staged).lists, _listed(filling.harness.context, filling.case)
    return _places(filling.staged)[lists[:, :count]].reshape(-1)


def _live_sources(filling: Filling) -> npt.NDArray[np.int64]:
    return _places(filling.staged)[list(_numbers(filling.staged).sources)]


def _live_copies(filling: Filling) -> npt.NDArray[np.int64]:
    return _places(filling.staged)[list(_numbers(filling.staged).snapshot_slots)]


_INDICES = StepTensor(
    "state_indices",
    torch.int32,
    entries=_listed,
    padded=_nowhere,
    live=_live_lists,
    rest=_after_indices,
    behind=_OTHER_SLOT,
    watched=("batch.state.indices",),
)
TENSORS = (
    StepTensor(
        "snapshot_slots",
        torch.int64,
        entries=_copied,
        live=_live_copies,
        rest=lambda filling: 0,
        watched=("batch.state.snapshot.slots",),
    ),
    _INDICES,
    StepTensor(
        "state_sources",
        torch.int32,
        entries=_continued,
        padded=_nowhere,
        live=_live_sources,
        rest=_after_indices,
        watched=("batch.state.sources",),
    ),
    StepTensor(
        "state_accepted",
        torch.int32,
        entries=_kept,
        padded=lambda harness, schedule, fill: 1,
        live=lambda filling: _numbers(filling.staged).taken,
        rest=lambda filling: 1,
        watched=("batch.state.num_accepted",),
    ),
    StepTensor(
        "snapshot_rows",
        torch.int32,
        entries=_copied,
        live=lambda filling: _numbers(filling.staged).snapshot_rows,
        rest=lambda filling: 0,
        watched=("batch.state.snapshot.rows",),
    ),
    StepTensor(
        "has_initial_state",
        torch.bool,
        entries=_kept,
        live=lambda filling: _begun(filling.staged),
        rest=lambda filling: False,
        watched=("batch.state.has_initial_state",),
    ),
    BatchField(
        "state",
        eager=lambda harness, staged: eager_states(harness.context, staged),
        graph=lambda batch: captured_states(batch.harness.context, batch.buffers, batch.mode, batch.bs),
        given=lambda harness: harness.context.state is not None,
    ),
)
