"""Encoder keys of a batch: their lengths, and in the step that stores them their slots."""

from __future__ import annotations

from typing import Any

import torch

from ..harness import ServerHarness, StagedStep
from ..step_tensor import BatchField, Filling, GraphBatch, StepTensor, of_requests


def _given(harness: ServerHarness) -> bool:
    return harness.context.max_encoder_len > 0


def _lens(harness: ServerHarness, staged: StagedStep) -> torch.Tensor | None:
    return None if staged.data.encoder is None else staged.data.encoder.lens.clone()


def _lens_on_host(harness: ServerHarness, staged: StagedStep) -> list[int] | None:
    lens = _lens(harness, staged)
    return None if lens is None or not harness.capabilities.needs.cpu_seq_lens else lens.tolist()


def _lens_on_host_in_graph(batch: GraphBatch) -> list[int] | None:
    """Lengths, including lengths of padded requests."""
    lens: list[int] = batch.buffers.host["encoder_lens"][: batch.bs].tolist()
    return lens if batch.harness.capabilities.needs.cpu_seq_lens else None


def _slots(harness: ServerHarness, staged: StagedStep) -> torch.Tensor | None:
    if staged.data.encoder is None:
        return None
    # The last KV group is that of the cross-attention layers, if they have one.
    slots = harness.in_groups(staged.schedule, staged.data.encoder.slots.numpy())[-1]
    return torch.from_numpy(slots) if len(slots) else None


def _rest(filling: Filling) -> Any:
    # SGLang leaves what an earlier replay had (``PaddingPolicy.FILL_ONCE``), and vLLM writes 0.
    return 0 if filling.data.encoder is not None and filling.step.index % 2 else None


TENSORS = (
    StepTensor(
        "encoder_lens",
        torch.int64,
        entries=lambda context, case: 1 if context.max_encoder_len else 0,
        padded=lambda harness, schedule, fill: harness.context.max_encoder_len,
        live=lambda filling: None if filling.data.encoder is None else filling.data.encoder.lens.numpy(),
        rest=_rest,
        eager=_lens,
        graph=of_requests("encoder_lens"),
        given=_given,
        watched=("batch.encoder_lens",),
    ),
    BatchField("encoder_lens_cpu", eager=_lens_on_host, graph=_lens_on_host_in_graph, given=_given),
    BatchField("encoder_out_cache_loc", eager=_slots, given=_given, watched=("batch.encoder_out_cache_loc",)),
)
