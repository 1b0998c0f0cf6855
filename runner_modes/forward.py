"""The model's forward on a backend, which eager steps, warm-ups and captures share."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from attn_testkit.cases.case import Case
from attn_testkit.cases.data import draft_topk
from attn_testkit.contract import ForwardBatch
from attn_testkit.model import Trace, joined

from .harness import ServerHarness
from .mode_driver import ModeDriver
from .parts import InParts
from .returned import check_returned

__all__ = ["forward"]


def forward(
    harness: ServerHarness, driver: ModeDriver, batch: ForwardBatch, case: Case, save_kv_cache: bool = True
) -> Trace:
    """All layers, in every forward of the mode, and what the mode adds to them. Device work only.

    Raises ``ShapeError`` at the first layer whose output is not [T, Hq, Dv] or [T, Hq * Dv] in the model's dtype on the
    harness' device, T being the rows of the forward's ``input_ids``; and whatever the backend raises.
    """
    traces: list[Trace] = []
    parts = driver.forwards(harness, batch)
    part: ForwardBatch | None = next(parts)
    while part is not None:
        if traces:
            harness.backend.init_forward_metadata_in_graph(part)
        look = partial(_check, harness, part.input_ids.shape[0])
        none_kv = harness.capabilities.takes_none_kv
        in_parts = InParts(harness) if harness.context.kv_parts else None
        attends = in_parts or harness.backend
        traces.append(harness.model.forward(attends, part, look, save_kv_cache, none_kv=none_kv))
        if in_parts:
            in_parts.leave_in(traces[-1])
        part = _after(parts, traces[-1])
    trace = traces[0] if len(traces) == 1 else joined(traces)
    driver.finish(harness, trace, batch, draft_topk(case))
    return trace


def _after(parts: Generator[ForwardBatch, Trace, None], trace: Trace) -> ForwardBatch | None:
    """The batch of the forward behind that of ``trace``; None: it was the last."""
    try:
        return parts.send(trace)
    except StopIteration:
        return None


def _check(harness: ServerHarness, rows: int, trace: Trace) -> None:
    """The output of the layer that ran last."""
    layer = harness.context.layers[len(trace.raw) - 1]
    heads, dim = layer.tp_q_head_num, layer.v_head_dim
    shapes = ((rows, heads, dim), (rows, heads * dim))
    check_returned(f"layer {layer.layer_id}", trace.raw[-1], shapes, harness.context.dtype, harness.device)
