"""Decode: one new token per request; ``seq_lens`` counts it."""

from __future__ import annotations

from attn_testkit.contract import ForwardBatch, ForwardMode
from attn_testkit.model import Trace

from .harness import ServerHarness
from .mode_runner import ModeRunner, every_token


def head_over_all_rows(harness: ServerHarness, trace: Trace, batch: ForwardBatch, topk: int) -> None:
    """Logits of every row, padding included: [T, vocab] float32."""
    trace.logits = harness.model.logits(trace.hidden)


DECODE = ModeRunner(
    mode=ForwardMode.DECODE,
    eager_spec=lambda harness, staged: None,
    eager_extends=lambda harness, staged: {},
    captured_spec=lambda harness, static, bs, width: None,
    fill=lambda harness, static, staged, bs: None,
    replay_spec=lambda harness, static, staged, bs, width: None,
    finish=head_over_all_rows,
    returned_rows=every_token,
)
