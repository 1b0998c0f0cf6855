"""Decode: one new token a request; ``seq_lens`` counts it."""

from __future__ import annotations

from attn_testkit.checks.observation import Outputs
from attn_testkit.contract import ForwardBatch, ForwardMode
from attn_testkit.model import Trace

from .harness import LoadedStep, ServerHarness
from .mode_driver import ModeDriver

__all__ = ["DECODE", "all_live_rows", "head_over_all_rows"]


def head_over_all_rows(harness: ServerHarness, trace: Trace, batch: ForwardBatch, topk: int) -> None:
    """Logits of every row, padding included: [T, vocab] float32."""
    trace.logits = harness.model.logits(trace.hidden)


def all_live_rows(trace: Trace, loaded: LoadedStep) -> Outputs:
    """Logits and hidden states of every live row."""
    assert trace.logits is not None
    return Outputs(trace.logits[: loaded.step.tokens], trace.hidden[: loaded.step.tokens])


DECODE = ModeDriver(
    mode=ForwardMode.DECODE,
    eager_spec=lambda harness, loaded: None,
    eager_extends=lambda harness, loaded: {},
    captured_spec=lambda harness, static, bs, width: None,
    fill=lambda harness, static, loaded, bs: None,
    replay_spec=lambda harness, static, loaded, bs, width: None,
    finish=head_over_all_rows,
    outputs=all_live_rows,
)
