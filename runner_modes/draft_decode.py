"""Draft-decode: all forwards of a draft from one plan, each with one row per branch; ``seq_lens`` is only the prefix.

A graph holds all forwards. Values that change between them are computed on the device, as servers do: each branch's
next token, positions that advance by one in place and are restored, and the slots of a forward, a slice of those of the
draft. The trace has the rows of all forwards in sequence.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attn_testkit.cases.draft import Draft
from attn_testkit.contract import DraftDecodeInput, ForwardBatch, ForwardMode
from attn_testkit.model import Trace

from .decode import head_over_all_rows
from .harness import ServerHarness, StagedStep
from .mode_runner import ModeRunner, Rows
from .static_inputs import StaticInputs
from .step_tensor import StepTensor


def _draft(staged: StagedStep) -> Draft:
    draft = staged.schedule.case.draft
    assert draft is not None
    return draft


def _slots(staged: StagedStep) -> torch.Tensor:
    """Slots of all branches by request, branch and step, [bs * K * S] int64, host."""
    page, found = staged.schedule.case.page_size, []
    for request in staged.step.requests:
        assert request.columns is not None
        found.append(request.columns[_draft(staged).columns(request.prefix, page)].reshape(-1))
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *found]))


def _first(per_row: torch.Tensor, draft: Draft) -> torch.Tensor:
    """Select the rows of the first forward [bs * K] from those of a step [T]."""
    # By index: a slice of one row would keep its stride, even after ``contiguous``.
    return per_row[torch.arange(0, len(per_row), draft.forwards)]


def _spec(slots: torch.Tensor, branches: int, steps: int) -> DraftDecodeInput:
    return DraftDecodeInput(topk=branches, num_steps=steps, out_cache_loc=slots)


def _eager_spec(harness: ServerHarness, staged: StagedStep) -> DraftDecodeInput:
    draft = _draft(staged)
    return _spec(_slots(staged), draft.branches, draft.steps)


def _first_forward(staged: StagedStep) -> Mapping[str, torch.Tensor]:
    """Tensors of a batch with one row per branch, of the live requests, on the host."""
    draft = _draft(staged)
    return {
        "input_ids": _first(staged.ids, draft),
        "positions": _first(staged.data.positions, draft),
        "out_cache_loc": _first(staged.data.out_cache_loc, draft),
    }


def _captured_spec(harness: ServerHarness, static: StaticInputs, bs: int, width: int) -> DraftDecodeInput:
    draft = static.schedule.case.draft
    assert draft is not None
    branches, steps = draft.branches, draft.steps
    return _spec(static["draft_slots"][: bs * branches * steps], branches, steps)


def _static_rows(static: StaticInputs, bs: int, branches: int) -> dict[str, torch.Tensor]:
    names = ("input_ids", "positions", "out_cache_loc")
    return {name: static[name][: bs * branches] for name in names}


def _captured_extends(
    harness: ServerHarness, static: StaticInputs, bs: int, width: int, fill: int
) -> Mapping[str, Any]:
    return _static_rows(static, bs, harness.context.draft_branches)


def _fill(harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int) -> None:
    """Fill slots of all forwards, and replace the rows of all forwards by the rows of the first forward."""
    step, rows, host = staged.step, staged.step.bs * _draft(staged).branches, static.host
    for name, first in _first_forward(staged).items():
        host[name][:rows] = first.numpy()
    host["out_cache_loc"][rows:] = padding = harness.padding_slot(step.index)
    static.pad(step, rows, harness.model.nan_row)
    slots = _slots(staged).numpy()
    host["draft_slots"][:] = padding
    host["draft_slots"][: len(slots)] = slots


def _replay_spec(
    harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int, width: int
) -> DraftDecodeInput:
    draft = _draft(staged)
    live = staged.step.bs * draft.branches * draft.steps
    return _spec(static["draft_slots"][:live], draft.branches, draft.steps)


def _replay_extends(
    harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int, fill: int
) -> Mapping[str, Any]:
    branches = _draft(staged).branches
    live = static["out_cache_loc"][: staged.step.bs * branches]
    return {**_static_rows(static, bs, branches), "out_cache_loc": live}


def _forwards(harness: ServerHarness, batch: ForwardBatch) -> Generator[ForwardBatch, Trace, None]:
    spec, ids = batch.spec_info, batch.input_ids
    assert isinstance(spec, DraftDecodeInput)
    slots = spec.out_cache_loc.view(batch.batch_size * spec.topk, spec.num_steps).t().contiguous()
    for step in range(spec.num_steps - 1):
        trace = yield replace(batch, input_ids=ids, out_cache_loc=slots[step], spec_info=replace(spec, step=step))
        ids = harness.follow(ids, trace)
        batch.positions.add_(1)
    batch.positions.sub_(spec.num_steps - 1)


def _live_rows(staged: StagedStep, bs: int) -> Rows:
    """Rows by request, branch and forward, like the tokens of the step."""
    draft, live = _draft(staged), staged.step.bs
    rows = np.arange(draft.forwards * bs * draft.branches).reshape(draft.forwards, bs, draft.branches)
    return rows[:, :live].transpose(1, 2, 0).reshape(-1)


DRAFT_DECODE = ModeRunner(
    mode=ForwardMode.DRAFT_DECODE,
    eager_spec=_eager_spec,
    eager_extends=lambda harness, staged: _first_forward(staged),
    captured_spec=_captured_spec,
    captured_extends=_captured_extends,
    fill=_fill,
    replay_spec=_replay_spec,
    replay_extends=_replay_extends,
    forwards=_forwards,
    live_rows=_live_rows,
    returned_rows=_live_rows,
    finish=head_over_all_rows,
)
DRAFT_DECODE_TENSORS = (
    StepTensor(
        "draft_slots",
        torch.int64,
        entries=lambda context, case: case.draft.branches * case.draft.steps if case.draft else 0,
        padded=lambda harness, schedule, fill: harness.padding_slot(0),
        watched=("batch.spec_info.out_cache_loc",),
    ),
)
"""Slots of all forwards."""
