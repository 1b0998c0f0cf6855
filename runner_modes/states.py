"""``ForwardBatch.state``: which slots the requests of a step have."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from attn_testkit.contract import BackendContext, ForwardMode, StateBackend, StateInput
from attn_testkit.families.hybrid.data import states_in
from attn_testkit.families.recurrent.data import shape_of, state_table
from attn_testkit.families.recurrent.memory import StateWatch
from attn_testkit.watches.uploads import upload

from .errors import blame
from .harness import ServerHarness, StagedStep
from .static_inputs import StaticInputs

__all__ = ["captured_states", "commit_states", "eager_states", "fill_states"]


def _slots_of(staged: StagedStep) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    rows = [request.pool_row for request in staged.step.requests]
    return state_table(staged.schedule, staged.step)[rows]


def _begun(staged: StagedStep) -> list[bool]:
    return [request.prefix > 0 for request in staged.step.requests]


def eager_states(context: BackendContext, staged: StagedStep) -> StateInput | None:
    """``ForwardBatch.state`` of a live batch, on the host."""
    if context.state is None:
        return None
    flags = staged.schedule.case.mode is ForwardMode.EXTEND
    begun = torch.tensor(_begun(staged), dtype=torch.bool) if flags else None
    return StateInput(torch.from_numpy(_slots_of(staged)), begun)


def captured_states(context: BackendContext, static: StaticInputs, mode: ForwardMode, bs: int) -> StateInput | None:
    """``ForwardBatch.state`` of a bucket, at its capture and at its replays: slices of the static buffers."""
    if context.state is None:
        return None
    begun = static.has_initial_state[:bs] if mode is ForwardMode.EXTEND else None
    return StateInput(static.state_indices[:bs], begun)


def commit_states(harness: ServerHarness, staged: StagedStep, state: StateInput | None, bs: int) -> None:
    """Commit what a verify of ``bs`` requests accepted, as a server does after the step; nothing in other modes."""
    if state is None or staged.schedule.case.mode is not ForwardMode.TARGET_VERIFY:
        return
    assert isinstance(harness.pool, StateWatch)
    data = states_in(staged.data)
    assert data is not None
    harness.pool.before_commit()
    kept = [count - 1 for count in data.kept] + [-1] * (bs - staged.step.bs)
    steps = upload(torch.tensor(kept, dtype=torch.int32), harness.device)
    with blame("commit"):
        cast(StateBackend, harness.backend).commit(steps, state)
        torch.cuda.synchronize()


def fill_states(context: BackendContext, static: StaticInputs, staged: StagedStep) -> None:
    """Fill the static buffers: live requests, then padded ones."""
    if context.state is None:
        return
    host, live = static.host, staged.step.bs
    host["state_indices"][:] = shape_of(staged.schedule.case).padded_index
    host["state_indices"][:live] = _slots_of(staged)
    host["has_initial_state"][:] = False
    host["has_initial_state"][:live] = _begun(staged)
