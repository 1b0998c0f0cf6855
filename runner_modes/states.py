"""``ForwardBatch.state``: which slots the requests of a step have."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.contract import BackendContext, ForwardMode, Snapshot, StateBackend, StateInput
from attn_testkit.families.hybrid.data import schedule_of_states, states_in
from attn_testkit.families.recurrent.data import StateStepData, shape_of, state_places
from attn_testkit.watches.uploads import upload

from .errors import blame
from .harness import ServerHarness, StagedStep
from .static_inputs import StaticInputs


def _begun(staged: StagedStep) -> list[bool]:
    return [request.prefix > 0 for request in staged.step.requests]


def _numbers(staged: StagedStep) -> StateStepData:
    data = states_in(staged.data)
    assert data is not None
    return data


def _by_slots(context: BackendContext, mode: ForwardMode) -> bool:
    return context.state is not None and context.state.rollback == "slots" and mode.is_target_verify()


def _copies_now(context: BackendContext, mode: ForwardMode) -> bool:
    """True if the forward of a mode gets copies to make. After a verify the commit does."""
    return context.state is not None and context.state.snapshots > 0 and not mode.is_target_verify()


def _given_sources(context: BackendContext, mode: ForwardMode) -> bool:
    return context.state is not None and context.state.continues == "source" and not mode.is_target_verify()


def _places(staged: StagedStep) -> npt.NDArray[np.int64]:
    return state_places(schedule_of_states(staged.schedule))


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
    lists = torch.from_numpy(_places(staged)[data.lists].astype(np.int32))
    if _by_slots(context, mode):
        return StateInput(lists, num_accepted=torch.tensor(data.taken, dtype=torch.int32))
    begun = torch.tensor(_begun(staged), dtype=torch.bool) if mode is ForwardMode.EXTEND else None
    sources = torch.from_numpy(_places(staged)[list(data.sources)].astype(np.int32))
    return StateInput(
        lists[:, 0].clone(), begun, sources=sources if _given_sources(context, mode) else None,
        snapshot=_snapshot(staged, data) if _copies_now(context, mode) else None,
    )  # fmt: skip


def captured_states(context: BackendContext, static: StaticInputs, mode: ForwardMode, bs: int) -> StateInput | None:
    """``ForwardBatch.state`` of a bucket, at its capture and at its replays: slices of the static buffers."""
    if context.state is None:
        return None
    if _by_slots(context, mode):
        lists = static.state_indices.view(-1, static.counts["state_indices"])[:bs]
        return StateInput(lists, num_accepted=static.state_accepted[:bs])
    begun = static.has_initial_state[:bs] if mode is ForwardMode.EXTEND else None
    copies = Snapshot(static.snapshot_rows[:bs], static.snapshot_slots[:bs]) if _copies_now(context, mode) else None
    sources = static.state_sources[:bs] if _given_sources(context, mode) else None
    return StateInput(static.state_indices[:bs], begun, sources=sources, snapshot=copies)


def commit_states(harness: ServerHarness, staged: StagedStep, state: StateInput | None, bs: int) -> None:
    """Commit what a verify of ``bs`` requests accepted, as a server does after the step; nothing in other modes, and
    where the next step's counts say it.
    """
    mode = staged.schedule.case.mode
    if state is None or not mode.is_target_verify() or _by_slots(harness.context, mode):
        return
    harness.family.memory.before_commit(harness.pool)
    data, padded = _numbers(staged), bs - staged.step.bs
    kept = [count - 1 for count in data.kept] + [-1] * padded
    steps = upload(torch.tensor(kept, dtype=torch.int32), harness.device)
    if harness.context.state is not None and harness.context.state.snapshots:
        host = _snapshot(staged, data, padded)
        state = replace(state, snapshot=Snapshot(*(upload(each, harness.device) for each in (host.rows, host.slots))))
    with blame("commit"):
        cast(StateBackend, harness.backend).commit(steps, state)
        torch.cuda.synchronize()


def fill_states(context: BackendContext, static: StaticInputs, staged: StagedStep) -> None:
    """Fill the static buffers: live requests, then padded ones."""
    if context.state is None:
        return
    host, live, data = static.host, staged.step.bs, _numbers(staged)
    host["state_indices"][:] = shape_of(staged.schedule.case).padded_index
    lists = host["state_indices"].reshape(-1, static.counts["state_indices"])
    places = _places(staged)
    lists[:live] = places[data.lists if lists.shape[1] > 1 else data.lists[:, :1]]
    if len(host["state_sources"]):
        host["state_sources"][:] = host["state_indices"]
        host["state_sources"][:live] = places[list(data.sources)]
    host["has_initial_state"][:] = False
    host["has_initial_state"][:live] = _begun(staged)
    host["state_accepted"][:] = 1
    host["state_accepted"][:live] = data.taken
    copied = places[list(data.snapshot_slots)]
    for name, values in (("snapshot_rows", data.snapshot_rows), ("snapshot_slots", copied)):
        if len(host[name]):
            host[name][:] = 0
            host[name][:live] = values
