"""The model's forward on a backend, which eager steps, warm-ups and captures share."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attn_testkit.cases.case import Case
from attn_testkit.contract import AttentionLayer, ForwardBatch
from attn_testkit.model import Trace, joined
from attn_testkit.steps.data import draft_topk
from attn_testkit.steps.schedule import PADDED_TOKENS, Step

from .errors import ShapeError
from .harness import ServerHarness
from .indexing import WithIndexer
from .kv_splits import InParts
from .mode_runner import ModeRunner
from .pieces import MemoryOfOutputs, Pieces
from .returned import check_returned


def forward(
    harness: ServerHarness,
    driver: ModeRunner,
    batch: ForwardBatch,
    case: Case,
    save_kv_cache: bool = True,
    between: Callable[[], None] | None = None,
    other_strides: bool = False,
    pieces: Pieces | None = None,
) -> Trace:
    """Run all layers in every forward of the mode, and the work that the mode adds. Device work only.

    ``between`` is called after each layer, before its output is read. ``other_strides``: see ``Step.turned``.
    ``pieces``: graphs around attention, of at least as many rows.

    Raises ``ShapeError`` at the first layer whose output is not [T, Hq, Dv] or [T, Hq * Dv] in the model's dtype on the
    harness' device, T being the rows of the forward's ``input_ids``; and whatever the backend raises.
    """
    traces: list[Trace] = []
    parts = driver.forwards(harness, batch)
    part: ForwardBatch | None = next(parts)
    with_indexer: WithIndexer | None = None
    while part is not None:
        if traces:
            harness.backend.init_forward_metadata_in_graph(part)
        declared = harness.capabilities
        if "padded_tokens" in case.variants:
            part = _with_more_rows(harness, part)
        loan = _Loan(harness, pieces) if "given_out" in case.variants else None
        check = partial(_check, harness, part.input_ids.shape[0], loan)
        look = check if between is None else partial(_checked, check, between)
        selects = part.input_ids.shape[0] - (PADDED_TOKENS if _has_fewer_selections(harness) else 0)
        with_kv_splits = InParts(harness) if harness.context.kv_splits else None
        attends = with_kv_splits or harness.backend
        with_indexer = WithIndexer(harness, case.indexer, attends, with_indexer) if case.indexer else None
        if pieces:
            pieces.load(part.input_ids)
        traces.append(
            harness.model.forward(
                with_indexer or attends,
                part,
                look,
                save_kv_cache,
                none_kv=declared.server.takes_none_kv,
                lend=loan,
                at_once=declared.server.output_lifetime == "layer",
                other_strides=other_strides,
                selects=selects,
                around=pieces,
            )
        )
        if with_kv_splits:
            with_kv_splits.leave_in(traces[-1])
        if with_indexer:
            with_indexer.leave_in(traces[-1])
        if loan:
            traces[-1].beside_out += loan.beside
        part = _after(parts, traces[-1])
    trace = traces[0] if len(traces) == 1 else joined(traces)
    driver.finish(harness, trace, batch, draft_topk(case))
    return trace


def _checked(check: Callable[[Trace], None], between: Callable[[], None], trace: Trace) -> None:
    check(trace)
    between()


def _after(parts: Generator[ForwardBatch, Trace, None], trace: Trace) -> ForwardBatch | None:
    """The batch of the forward after ``trace``'s; None if that was the last forward."""
    try:
        return parts.send(trace)
    except StopIteration:
        return None


def pieces_for(harness: ServerHarness, case: Case, step: Step) -> Pieces | None:
    """Graphs around attention for an eager step; None if the server uses none. May capture them."""
    if "piecewise" not in case.variants:
        return None
    key = pieces_key(harness, case, step)
    if key not in harness.pieces:
        harness.pieces[key] = Pieces(harness.model, *key, harness.replay_graph)
    return harness.pieces[key]


def pieces_key(harness: ServerHarness, case: Case, step: Step) -> tuple[int, bool]:
    """Rows of the graphs around the attention of a step, and whether their q, k and v are contiguous."""
    more = PADDED_TOKENS if "padded_tokens" in case.variants else 0
    return Pieces.rows_for(step.tokens + more), harness.model.contiguous != step.other_strides


def _has_fewer_selections(harness: ServerHarness) -> bool:
    """True if the indexer ran before the rows that belong to no request were appended."""
    sparse = harness.capabilities.sparse
    return sparse is not None and sparse.fewer_rows and "padded_tokens" in harness.case.variants


def _with_more_rows(harness: ServerHarness, batch: ForwardBatch) -> ForwardBatch:
    """A batch with extra rows that belong to no request: token 0 at position 0, as in servers."""
    values = {"input_ids": 0, "positions": 0, "out_cache_loc": harness.padding_slot(0)}
    longer: dict[str, Any] = {}
    for name, value in values.items():
        own: torch.Tensor = getattr(batch, name)
        longer[name] = torch.cat([own, own.new_full((PADDED_TOKENS,), value)])
    by_group = getattr(batch, "group_cache_locs", None)
    if by_group is not None:
        slots = by_group.new_full((len(by_group), PADDED_TOKENS), values["out_cache_loc"])
        longer["group_cache_locs"] = torch.cat([by_group, slots], 1)
    return replace(batch, **longer)


class _Loan:
    """Poisoned memory for outputs, in which unwritten rows are detected, and writes around them."""

    def __init__(self, harness: ServerHarness, pieces: Pieces | None) -> None:
        self._harness, self._pieces = harness, pieces
        self.beside: list[torch.Tensor] = []
        """Memory before and after each output, [rows, Hq, Dv] each: a server stores other rows there."""

    def __call__(self, layer: AttentionLayer, rows: int) -> torch.Tensor:
        harness, heads, dim = self._harness, layer.tp_q_head_num, layer.v_head_dim
        if self._pieces is None:
            memory = MemoryOfOutputs(heads, dim, rows, harness.context.dtype, harness.device)
        else:
            memory = self._pieces.outputs[harness.context.layers.index(layer)]
        self.out, beside = memory.lend(rows, harness.fill)
        self.beside += beside
        return self.out


def _check(harness: ServerHarness, rows: int, loan: _Loan | None, trace: Trace) -> None:
    """Check the output of the layer that ran last."""
    layer = harness.context.layers[len(trace.raw) - 1]
    heads, dim = layer.tp_q_head_num, layer.v_head_dim
    shapes = ((rows, heads, dim), (rows, heads * dim))
    out, name = trace.raw[-1], f"layer {layer.layer_id}"
    check_returned(name, out, shapes, harness.context.dtype, harness.device)
    if loan is not None and out.data_ptr() != loan.out.data_ptr():
        raise ShapeError(f"{name} was given out=, but returned other memory; write the output to out and return it")
    if harness.capabilities.server.output_lifetime == "model":
        earlier = {each.data_ptr(): layer for each, layer in zip(trace.raw[:-1], harness.context.layers, strict=False)}
        if out.numel() and out.data_ptr() in earlier:
            raise ShapeError(
                f"{name} returned the memory of layer {earlier[out.data_ptr()].layer_id}'s output, which must remain "
                "until all layers have run; return another tensor, or declare "
                "server=ServerConventions(output_lifetime='layer')"
            )
