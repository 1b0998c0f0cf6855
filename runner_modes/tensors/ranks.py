"""Lengths of requests on ranks with their own pools, as vLLM gives them: ``dcp_local_seq_lens``.

Batches of the harness have the lengths of all ranks, [R, bs]; ``ranks.py`` gives each rank its row. Slots of new tokens
are ``group_cache_locs`` in the same way. All ranks have the same slots of index keys, ``index_cache_loc``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.features.kv_splits import has_own_pools, splits_of
from attn_testkit.cases.fields import Fields
from attn_testkit.contract import BackendContext, ForwardMode
from attn_testkit.steps.schedule import Schedule

from ..harness import ServerHarness, StagedStep
from ..step_tensor import BatchField, Buffers, Filling, GraphBatch, StepTensor

_NAME = "dcp_local_seq_lens"


def _ranks(context: BackendContext, case: Fields | None = None) -> int:
    """R; 0 without ranks that have their own pools."""
    return context.dcp_world_size if context.dcp_world_size > 1 else 0


def local_lens(case: Fields, lens: Sequence[int]) -> npt.NDArray[np.int32]:
    """[R, n] int32: keys of requests of ``lens`` [n] keys on each rank."""
    every = torch.tensor(list(lens), dtype=torch.int64)
    of_ranks = torch.stack([split.lens(every, every * 0) for split in splits_of(case)])
    found: npt.NDArray[np.int32] = of_ranks.to(torch.int32).numpy()
    return found


def _padded_len(harness: ServerHarness, case: Fields, fill: int) -> int:
    """Keys of a padded request, those of its rows included."""
    of_prefix = case.mode is ForwardMode.TARGET_VERIFY and harness.context.dialect.verify_lens == "prefix"
    return fill + case.width if of_prefix and not harness.pads_with_nothing else fill


def _all_padded(harness: ServerHarness, schedule: Schedule, fill: int) -> npt.NDArray[np.int32] | int:
    if not has_own_pools(schedule.case):
        return 0
    lens = [_padded_len(harness, schedule.case, fill)] * schedule.max_bs
    return local_lens(schedule.case, lens).reshape(-1)


def _live(filling: Filling) -> npt.NDArray[np.int32]:
    """Lengths of all ranks, each with its padding."""
    case, live = filling.case, filling.step.lens
    padding = filling.staged.schedule.max_bs - len(live)
    return local_lens(case, [*live, *[_padded_len(filling.harness, case, filling.fill)] * padding]).reshape(-1)


def fill_local_lens(buffers: Buffers, lens: Sequence[int]) -> None:
    """Write the lengths of the first requests, ``lens`` keys each, as a capture has them. Only for cases with ranks."""
    case = buffers.schedule.case
    if has_own_pools(case):
        own = local_lens(case, lens)
        buffers.host[_NAME].reshape(len(own), -1)[:, : len(lens)] = own


def _of_graph(batch: GraphBatch) -> torch.Tensor:
    """[R, bs] of the first requests."""
    lens = batch.buffers[_NAME].view(_ranks(batch.harness.context), -1)
    return lens[:, : batch.requests]


def _eager(harness: ServerHarness, staged: StagedStep) -> torch.Tensor:
    return torch.from_numpy(local_lens(staged.schedule.case, staged.step.lens))


TENSORS: tuple[BatchField, ...] = (
    StepTensor(
        _NAME,
        torch.int32,
        entries=_ranks,
        padded=_all_padded,
        live=_live,
        eager=_eager,
        graph=_of_graph,
        given=lambda harness: _ranks(harness.context) > 0,
        watched=(f"batch.{_NAME}",),
    ),
    StepTensor(
        "index_cache_loc",
        torch.int64,
        per="row",
        padded=lambda harness, schedule, fill: harness.padding_slot(0),
        live=lambda filling: filling.data.out_cache_loc.numpy(),
        rest=lambda filling: filling.harness.padding_slot(filling.step.index),
        eager=lambda harness, staged: staged.data.out_cache_loc,
        graph=lambda batch: batch.buffers["index_cache_loc"][: batch.stored],
        given=lambda harness: harness.context.index_req_to_token is not None,
        watched=("batch.index_cache_loc",),
    ),
)
