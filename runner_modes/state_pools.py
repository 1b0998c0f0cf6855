"""The pool of states of an instance, and the slot of each row of the request table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from attn_testkit.contract import BackendContext, StateContext, StateLayer, StatePool
from attn_testkit.families.by_layer import schedule_of
from attn_testkit.families.recurrent.data import shape_of, slots_listed, state_places, state_table
from attn_testkit.steps.data import DTYPES
from attn_testkit.steps.schedule import Schedule, Step
from attn_testkit.watches.uploads import upload_into

from .pool_address import allocate_for


def with_states(context: BackendContext, schedules: Sequence[Schedule]) -> BackendContext:
    """The context with a pool of states, if its layers keep any."""
    layers = tuple(layer for layer in context.layers if isinstance(layer, StateLayer))
    if not layers:
        return context
    shape, listed = shape_of(schedules[0].case), slots_listed(schedules[0].case)
    last = max(int(state_places(schedule_of(each, "recurrent"))[-1]) for each in schedules)
    pool = StatePool(
        last + 1, layers, context.dtype, DTYPES[shape.dtype], context.device, shape.order,
        strided=shape.strided, cleared=not shape.big, drafts=(0, 0) if listed > 1 else _drafts(schedules),
        more_columns=listed - 1 + shape.more_columns,
        make=allocate_for(schedules[0].case, len(layers), cleared=not shape.big),
    )  # fmt: skip
    rows = max(schedule.pool_rows for schedule in schedules)
    table = torch.zeros(rows + 1, listed, dtype=torch.int32, device=context.device)
    if listed == 1:
        table = table[:, 0]
    state = StateContext(
        layers,
        pool,
        table,
        shape.padding,
        shape.fresh,
        shape.rollback,
        shape.snapshots,
        shape.continues or "copy",
        shape.rounding,
        shape.conv_windows,
    )
    return replace(context, state=state)


def _drafts(schedules: Sequence[Schedule]) -> tuple[int, int]:
    """Requests and nodes that the scratch of target-verify has room for."""
    verify = [schedule for schedule in schedules if schedule.case.tree is not None]
    return max([0] + [each.most_requests for each in verify]), max([0] + [each.case.width for each in verify])


def load_states(context: BackendContext, schedule: Schedule, step: Step) -> None:
    """Put the slot of each row of the request table in place."""
    if context.state is not None:
        of_states = schedule_of(schedule, "recurrent")
        listed = state_table(of_states, step)[:, : slots_listed(schedule.case)]
        table = torch.from_numpy(state_places(of_states)[listed].astype(np.int32))
        upload_into(context.state.req_to_state[: len(table)], table.view(-1, *context.state.req_to_state.shape[1:]))
