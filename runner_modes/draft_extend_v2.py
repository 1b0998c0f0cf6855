"""Draft-extend v2: all N rows of each request, accepted or not. Logits and hidden states of live rows, no top-k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_testkit.contract import DraftExtendInput, ForwardBatch, ForwardMode
from attn_testkit.model import Trace

from .draft_extend import accepted_counts, captured_draft_spec, extend_fields, fill_draft_buffers
from .harness import LoadedStep, ServerHarness
from .mode_driver import ModeDriver, every_token
from .static_inputs import StaticInputs

__all__ = ["DRAFT_EXTEND_V2"]


def _eager_spec(harness: ServerHarness, loaded: LoadedStep) -> DraftExtendInput:
    accepted, n = accepted_counts(loaded), loaded.schedule.case.width
    return DraftExtendInput(
        hidden_states=loaded.data.hidden,
        num_correct_drafts=accepted - 1,
        num_accept_tokens=accepted,
        positions=loaded.data.positions,
        num_accept_tokens_cpu=accepted.tolist() if harness.capabilities.needs_cpu_seq_lens else None,
        num_tokens_per_req=n,
        extend_seq_lens_cpu=[n] * loaded.step.bs,
        select_index=torch.arange(loaded.step.bs) * n + accepted - 1,
    )


def _eager_extends(harness: ServerHarness, loaded: LoadedStep) -> Mapping[str, Any]:
    """Fields with the list of rows, which a server knows on the host whatever the backend needs."""
    rows = [request.new for request in loaded.step.requests]
    return {**extend_fields(harness, loaded), "extend_seq_lens_cpu": rows}


def _fill(harness: ServerHarness, static: StaticInputs, loaded: LoadedStep, bs: int) -> None:
    fill_draft_buffers(harness, static, loaded, bs)
    last = [i * loaded.schedule.case.width + r.accepted - 1 for i, r in enumerate(loaded.step.requests)]
    # The tail stays as an earlier replay left it, in range and unused.
    static.host["select_index"][: len(last)] = last


def _replay_spec(
    harness: ServerHarness, static: StaticInputs, loaded: LoadedStep, bs: int, width: int
) -> DraftExtendInput:
    live = loaded.step.bs
    return DraftExtendInput(
        hidden_states=static.hidden_states[: loaded.step.tokens],
        num_correct_drafts=static.num_correct_drafts[:bs],
        num_accept_tokens=static.num_accept_tokens[:bs],
        positions=static.positions[: bs * width],
        num_accept_tokens_cpu=None,
        num_tokens_per_req=width,
        extend_seq_lens_tensor=static.extend_seq_lens[:bs],
        extend_seq_lens_cpu=[width] * live + [0 if harness.pads_with_nothing else width] * (bs - live),
        select_index=static.select_index[:bs],
    )


def _finish(harness: ServerHarness, trace: Trace, batch: ForwardBatch, topk: int) -> None:
    trace.logits = harness.model.logits(trace.hidden)
    # A graph anchors its full logits with a reduction, whose value is not used. Without rows there is none.
    if len(trace.logits):
        trace.logits.amax()


DRAFT_EXTEND_V2 = ModeDriver(
    mode=ForwardMode.DRAFT_EXTEND_V2,
    eager_spec=_eager_spec,
    eager_extends=_eager_extends,
    captured_spec=captured_draft_spec,
    fill=_fill,
    replay_spec=_replay_spec,
    finish=_finish,
    returned_rows=every_token,
)
