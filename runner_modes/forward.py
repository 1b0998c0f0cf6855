"""The model's forward on a backend, which eager steps, warm-ups and captures share."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import torch

from attn_testkit.cases.case import Case
from attn_testkit.cases.data import draft_topk
from attn_testkit.contract import ForwardBatch
from attn_testkit.model import Trace, joined

from .errors import ShapeError
from .harness import ServerHarness
from .mode_driver import ModeDriver

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
        traces.append(harness.model.forward(harness.backend, part, look, save_kv_cache, none_kv=none_kv))
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
    layer, out = harness.context.layers[len(trace.raw) - 1], trace.raw[-1]
    heads, dim, name = layer.tp_q_head_num, layer.v_head_dim, f"layer {layer.layer_id}"
    if not isinstance(out, torch.Tensor):
        raise ShapeError(f"{name} returned {type(out).__name__}, expected a tensor")
    if type(out) not in (torch.Tensor, torch.nn.Parameter):
        # What torch computes of one need not be what stands in its memory, which is what kernels read.
        raise ShapeError(f"{name} returned a {type(out).__name__}, expected a torch.Tensor and no class of its own")
    if tuple(out.shape) not in ((rows, heads, dim), (rows, heads * dim)):
        raise ShapeError(
            f"{name} returned shape {tuple(out.shape)}, expected ({rows}, {heads}, {dim}) or ({rows}, {heads * dim})"
        )
    if out.dtype != harness.context.dtype:
        raise ShapeError(f"{name} returned {out.dtype}, expected the model's {harness.context.dtype}")
    if out.device.type != harness.device.type:
        raise ShapeError(f"{name} returned a tensor on {out.device}, expected {harness.device}")
