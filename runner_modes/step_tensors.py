"""The table of all tensors of a step, and those that every batch has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.features.found import modules_of
from attn_testkit.contract import ForwardMode

from . import tensors
from .draft_decode import DRAFT_DECODE_TENSORS
from .draft_extend import DRAFT_EXTEND_TENSORS
from .draft_extend_v2 import DRAFT_EXTEND_V2_TENSORS
from .extend import EXTEND_TENSORS
from .harness import ServerHarness, StagedStep
from .step_tensor import BatchField, Filling, GraphBatch, StepTensor, of_requests


def seq_lens_of(harness: ServerHarness, mode: ForwardMode, staged: StagedStep) -> list[int]:
    """``seq_lens`` of the live requests, in tokens, by the convention of each mode and of the server."""
    of_prefixes = mode is ForwardMode.TARGET_VERIFY and harness.context.dialect.verify_lens == "prefix"
    if of_prefixes or mode is ForwardMode.DRAFT_DECODE:
        return [r.prefix for r in staged.step.requests]
    return [r.decoder_prefix + r.new for r in staged.step.requests]


def _lens(harness: ServerHarness, staged: StagedStep) -> torch.Tensor:
    return torch.tensor(seq_lens_of(harness, staged.schedule.case.mode, staged), dtype=torch.int64)


def _lens_on_host(harness: ServerHarness, staged: StagedStep) -> torch.Tensor | None:
    return _lens(harness, staged) if harness.capabilities.needs.cpu_seq_lens else None


def _lens_on_host_in_graph(batch: GraphBatch) -> torch.Tensor | None:
    return batch.buffers.seq_lens_cpu[: batch.requests] if batch.harness.capabilities.needs.cpu_seq_lens else None


def _sum(harness: ServerHarness, staged: StagedStep) -> int | None:
    return int(_lens(harness, staged).sum()) if harness.capabilities.needs.cpu_seq_lens else None


def _sum_in_graph(batch: GraphBatch) -> int | None:
    lens = batch.buffers.host["seq_lens"][: batch.bs]
    return int(lens.sum()) if batch.harness.capabilities.needs.cpu_seq_lens else None


def _pool_rows(staged: StagedStep) -> list[int]:
    return [request.pool_row for request in staged.step.requests]


def _slots(harness: ServerHarness, staged: StagedStep) -> npt.NDArray[Any]:
    """Slots of the new tokens in the pool of each KV group, [G, T]."""
    return harness.slots_in_groups(staged)


def _padding(filling: Filling) -> int:
    return filling.harness.padding_slot(filling.step.index)


def _slots_by_group(filling: Filling) -> npt.NDArray[np.int64]:
    """Slots of all groups, each with its padding."""
    case, groups = filling.case, len(filling.harness.context.kv_groups)
    slots = np.full((groups, filling.staged.schedule.max_bs * case.width), _padding(filling))
    slots[:, : filling.step.tokens] = _slots(filling.harness, filling.staged)
    return slots.reshape(-1)


def _by_group(batch: GraphBatch) -> torch.Tensor:
    """[G, tokens] of the first tokens in each group's pool."""
    buffers = batch.buffers
    return buffers["group_cache_locs"].view(-1, len(buffers["out_cache_loc"]))[:, : batch.stored]


def query_starts_of(staged: StagedStep) -> npt.NDArray[np.int32]:
    """First row of each live request in a forward, and the end of the last one, [R + 1]."""
    draft = staged.schedule.case.draft
    rows = [draft.branches if draft else request.new for request in staged.step.requests]
    return np.cumsum([0, *rows], dtype=np.int32)


_OF_EVERY_BATCH = (
    StepTensor(
        "input_ids",
        torch.int64,
        per="row",
        live=lambda filling: filling.staged.ids.numpy(),
        stale="always",
        eager=lambda harness, staged: staged.ids,
        graph=lambda batch: batch.buffers["input_ids"][: batch.ids],
        watched=("batch.input_ids",),
    ),
    StepTensor(
        "req_pool_indices",
        torch.int64,
        live=lambda filling: _pool_rows(filling.staged),
        stale="asked",
        eager=lambda harness, staged: torch.tensor(_pool_rows(staged), dtype=torch.int64),
        graph=of_requests("req_pool_indices"),
        watched=("batch.req_pool_indices",),
    ),
    StepTensor(
        "seq_lens",
        torch.int64,
        padded=lambda harness, schedule, fill: fill,
        live=lambda filling: seq_lens_of(filling.harness, filling.case.mode, filling.staged),
        rest=lambda filling: filling.fill,
        eager=_lens,
        graph=of_requests("seq_lens"),
        watched=("batch.seq_lens",),
    ),
    BatchField("seq_lens_cpu", eager=_lens_on_host, graph=_lens_on_host_in_graph),
    BatchField("seq_lens_sum", eager=_sum, graph=_sum_in_graph),
    StepTensor(
        "out_cache_loc",
        torch.int64,
        per="row",
        padded=lambda harness, schedule, fill: harness.padding_slot(0),
        live=lambda filling: _slots(filling.harness, filling.staged)[0],
        rest=_padding,
        eager=lambda harness, staged: torch.from_numpy(_slots(harness, staged)[0]),
        graph=lambda batch: batch.buffers["out_cache_loc"][: batch.stored],
        watched=("batch.out_cache_loc",),
    ),
    StepTensor(
        "group_cache_locs",
        torch.int64,
        per="row",
        entries=lambda context, case: len(context.kv_groups),
        padded=lambda harness, schedule, fill: harness.padding_slot(0),
        live=_slots_by_group,
        eager=lambda harness, staged: torch.from_numpy(_slots(harness, staged)),
        graph=_by_group,
        given=lambda harness: bool(harness.context.kv_groups),
        watched=("batch.group_cache_locs",),
    ),
    # A draft-extend has them in its ``spec_info`` too.
    StepTensor(
        "positions",
        torch.int64,
        per="row",
        live=lambda filling: filling.data.positions.numpy(),
        stale="asked",
        eager=lambda harness, staged: staged.data.positions,
        graph=lambda batch: batch.buffers["positions"][: batch.rows],
        watched=("batch.positions", "batch.spec_info.positions"),
    ),
)
_ROW_STARTS = StepTensor(
    "query_start_loc",
    torch.int32,
    more=1,
    padded=lambda harness, schedule, fill: np.arange(schedule.max_bs + 1) * schedule.case.rows_at_once,
    live=lambda filling: query_starts_of(filling.staged),
    rest=lambda filling: query_starts_of(filling.staged)[-1],
    eager=lambda harness, staged: torch.from_numpy(query_starts_of(staged)),
    graph=lambda batch: batch.buffers["query_start_loc"][: batch.bs + 1],
    given=lambda harness: harness.pads_with_nothing or harness.context.layers[0].encoder_only,
    watched=("batch.query_start_loc",),
)
BATCH_FIELDS: tuple[BatchField, ...] = (
    *_OF_EVERY_BATCH,
    *DRAFT_EXTEND_TENSORS,
    *EXTEND_TENSORS,
    _ROW_STARTS,
    *DRAFT_DECODE_TENSORS,
    *DRAFT_EXTEND_V2_TENSORS,
    *(each for module in modules_of(tensors.__name__) for each in module.TENSORS),
)
"""Fields of batches, in the order in which messages name them."""
STEP_TENSORS = tuple(each for each in BATCH_FIELDS if isinstance(each, StepTensor))
"""Tensors that have a static buffer, in the order of their memory."""
