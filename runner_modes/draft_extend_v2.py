"""Draft-extend v2: all N rows of each request, accepted or not. Logits and hidden states of live rows, no top-k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attn_testkit.contract import DraftExtendInput, ForwardBatch, ForwardMode
from attn_testkit.model import Trace

from .draft_extend import accepted_counts, captured_draft_spec, extend_fields, fill_draft_buffers
from .harness import ServerHarness, StagedStep
from .mode_runner import ModeRunner, every_token
from .static_inputs import StaticInputs
from .step_tensor import StepTensor


def _eager_spec(harness: ServerHarness, staged: StagedStep) -> DraftExtendInput:
    accepted, n = accepted_counts(staged), staged.schedule.case.width
    return DraftExtendInput(
        hidden_states=staged.data.hidden,
        num_correct_drafts=accepted - 1,
        num_accept_tokens=accepted,
        positions=staged.data.positions,
        num_accept_tokens_cpu=accepted.tolist() if harness.capabilities.needs.cpu_seq_lens else None,
        num_tokens_per_req=n,
        extend_seq_lens_cpu=[n] * staged.step.bs,
        select_index=torch.arange(staged.step.bs) * n + accepted - 1,
    )


def _eager_extends(harness: ServerHarness, staged: StagedStep) -> Mapping[str, Any]:
    """Fields with the list of rows, which a server has on the host whatever the backend needs."""
    rows = [request.new for request in staged.step.requests]
    return {**extend_fields(harness, staged), "extend_seq_lens_cpu": rows}


def _fill(harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int) -> None:
    fill_draft_buffers(harness, static, staged, bs)
    last = [i * staged.schedule.case.width + r.accepted - 1 for i, r in enumerate(staged.step.requests)]
    # The tail stays as an earlier replay left it, in range and unused.
    static.host["select_index"][: len(last)] = last


def _replay_spec(
    harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int, width: int
) -> DraftExtendInput:
    live = staged.step.bs
    return DraftExtendInput(
        hidden_states=static["hidden_states"][: staged.step.tokens],
        num_correct_drafts=static["num_correct_drafts"][:bs],
        num_accept_tokens=static["num_accept_tokens"][:bs],
        positions=static["positions"][: bs * width],
        num_accept_tokens_cpu=None,
        num_tokens_per_req=width,
        extend_seq_lens_tensor=static["extend_seq_lens"][:bs],
        extend_seq_lens_cpu=[width] * live + [0 if harness.pads_with_nothing else width] * (bs - live),
        select_index=static["select_index"][:bs],
    )


def _finish(harness: ServerHarness, trace: Trace, batch: ForwardBatch, topk: int) -> None:
    trace.logits = harness.model.logits(trace.hidden)
    # A graph anchors its full logits with a reduction, whose value is not used. Without rows there is none.
    if len(trace.logits):
        trace.logits.amax()


DRAFT_EXTEND_V2 = ModeRunner(
    mode=ForwardMode.DRAFT_EXTEND_V2,
    eager_spec=_eager_spec,
    eager_extends=_eager_extends,
    captured_spec=captured_draft_spec,
    fill=_fill,
    replay_spec=_replay_spec,
    finish=_finish,
    returned_rows=every_token,
)
DRAFT_EXTEND_V2_TENSORS = (
    StepTensor(
        "select_index",
        torch.int64,
        padded=lambda harness, schedule, fill: np.arange(1, schedule.max_bs + 1) * schedule.case.width - 1,
    ),
)
"""Flat row of the last accepted token of each request, which only the caller reads."""
