"""Draft-extend v1: the accepted tokens of each request, packed without gaps; the last of them continues the draft.

A graph of this mode is captured with S + 1 rows per request and replayed with fewer: live rows are packed at the head
of the token buffers, and the rest is padding, even if no request is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attn_testkit.contract import DraftExtendInput, ForwardBatch, ForwardMode
from attn_testkit.model import Trace
from attn_testkit.steps.data import HIDDEN

from .harness import ServerHarness, StagedStep
from .mode_runner import ModeRunner, one_a_request
from .static_inputs import StaticInputs
from .step_tensor import StepTensor


def accepted_counts(staged: StagedStep) -> torch.Tensor:
    """Number of accepted tokens of each live request, [bs] int32, host."""
    return torch.tensor([r.accepted for r in staged.step.requests], dtype=torch.int32)


def extend_fields(harness: ServerHarness, staged: StagedStep) -> Mapping[str, Any]:
    """Fields ``extend_*`` of an eager draft-extend: [bs] int32, and lists if the backend needs them on the host."""
    requests = staged.step.requests
    lens = torch.tensor([r.new for r in requests], dtype=torch.int32)
    prefixes = torch.tensor([r.decoder_prefix for r in requests], dtype=torch.int32)
    mirrors = harness.capabilities.needs.cpu_seq_lens
    return {
        "extend_num_tokens": staged.step.tokens,
        "extend_seq_lens": lens,
        "extend_prefix_lens": prefixes,
        "extend_start_loc": (lens.cumsum(0) - lens).to(torch.int32),
        "extend_seq_lens_cpu": lens.tolist() if mirrors else None,
        "extend_prefix_lens_cpu": prefixes.tolist() if mirrors else None,
    }


def _eager_spec(harness: ServerHarness, staged: StagedStep) -> DraftExtendInput:
    accepted = accepted_counts(staged)
    return DraftExtendInput(
        hidden_states=staged.data.hidden,
        num_correct_drafts=accepted - 1,
        num_accept_tokens=accepted,
        positions=staged.data.positions,
        num_accept_tokens_cpu=accepted.tolist() if harness.capabilities.needs.cpu_seq_lens else None,
    )


def captured_width(harness: ServerHarness, width: int) -> int:
    """Value of ``num_tokens_per_req`` at capture: the width, or unset as in older servers if ``takes_unset_width``."""
    case = harness.case
    # A verify that is captured for its bits shares the instance of an extend, which says nothing of widths.
    drafts = case.mode.is_speculative() or case.multi_mode or case.rounds
    if not harness.capabilities.server.takes_unset_width or not drafts:
        return width
    return -1 if case.derived("num-tokens-per-req") else 0


def captured_draft_spec(harness: ServerHarness, static: StaticInputs, bs: int, width: int) -> DraftExtendInput:
    """Make ``spec_info`` of a bucket's dummy batch, for both draft-extends: every request has the full width."""
    mirrors = harness.capabilities.needs.cpu_seq_lens
    return DraftExtendInput(
        hidden_states=static["hidden_states"][: bs * width],
        num_correct_drafts=static["num_correct_drafts"][:bs],
        num_accept_tokens=static["num_accept_tokens"][:bs],
        positions=static["positions"][: bs * width],
        num_accept_tokens_cpu=[width] * bs if mirrors else None,
        num_tokens_per_req=captured_width(harness, width),
        extend_seq_lens_tensor=static["extend_seq_lens"][:bs],
        extend_seq_lens_cpu=[width] * bs if mirrors or harness.case.mode is ForwardMode.DRAFT_EXTEND_V2 else None,
    )


def fill_draft_buffers(harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int) -> None:
    """Fill accept counts: the live ones, then the width for padded requests, or 0 if those have no row."""
    width, live, host = staged.schedule.case.width, staged.step.bs, static.host
    rows = 0 if harness.pads_with_nothing else width
    accepted = np.array([r.accepted for r in staged.step.requests], dtype=np.int64)
    for name, padding, values in (
        ("num_accept_tokens", rows, accepted),
        ("num_correct_drafts", max(0, rows - 1), accepted - 1),
        ("extend_seq_lens", rows, [r.new for r in staged.step.requests]),
    ):
        host[name][live:] = padding
        host[name][:live] = values
    host["hidden_states"][: staged.step.tokens] = staged.data.hidden.numpy()


def _replay_spec(
    harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int, width: int
) -> DraftExtendInput:
    mirrors = harness.capabilities.needs.cpu_seq_lens
    counts = accepted_counts(staged).tolist() + [0 if harness.pads_with_nothing else width] * (bs - staged.step.bs)
    return DraftExtendInput(
        hidden_states=static["hidden_states"][: staged.step.tokens],
        num_correct_drafts=static["num_correct_drafts"][:bs],
        num_accept_tokens=static["num_accept_tokens"][:bs],
        positions=static["positions"][: bs * width],
        num_accept_tokens_cpu=counts if mirrors else None,
        extend_seq_lens_tensor=static["extend_seq_lens"][:bs],
        extend_seq_lens_cpu=counts if mirrors else None,
    )


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k probabilities [rows, k] float32 and indices [rows, k] int64; for k = 1 the argmax with probability 1.0."""
    if k == 1:
        index = logits.argmax(-1, keepdim=True)
        return torch.ones_like(index, dtype=torch.float32), index
    p, index = torch.softmax(logits, -1).topk(k, -1)
    return p, index


def _finish(harness: ServerHarness, trace: Trace, batch: ForwardBatch, topk: int) -> None:
    """Prune to the last row of each request, then run the head and the top-k, all inside the graph."""
    spec = batch.spec_info
    assert isinstance(spec, DraftExtendInput)
    last = spec.num_accept_tokens[: batch.batch_size].cumsum(0) - 1
    trace.hidden = trace.hidden[last]
    trace.logits = harness.model.logits(trace.hidden)
    trace.topk_p, trace.topk_index = top_k(trace.logits, topk)


DRAFT_EXTEND = ModeRunner(
    mode=ForwardMode.DRAFT_EXTEND,
    eager_spec=_eager_spec,
    eager_extends=extend_fields,
    captured_spec=captured_draft_spec,
    fill=fill_draft_buffers,
    replay_spec=_replay_spec,
    finish=_finish,
    returned_rows=one_a_request,
)
DRAFT_EXTEND_TENSORS = (
    StepTensor(
        "num_accept_tokens",
        torch.int32,
        padded=lambda harness, schedule, fill: schedule.case.width,
        watched=("batch.spec_info.num_accept_tokens",),
    ),
    StepTensor(
        "num_correct_drafts",
        torch.int32,
        padded=lambda harness, schedule, fill: schedule.case.width - 1,
        watched=("batch.spec_info.num_correct_drafts",),
    ),
    StepTensor(
        "hidden_states", torch.float32, per="row", columns=(HIDDEN,), watched=("batch.spec_info.hidden_states",)
    ),
    # Extend has it in the batch.
    StepTensor(
        "extend_seq_lens",
        torch.int32,
        padded=lambda harness, schedule, fill: schedule.case.width,
        watched=("batch.spec_info.extend_seq_lens_tensor", "batch.extend_seq_lens"),
    ),
)
