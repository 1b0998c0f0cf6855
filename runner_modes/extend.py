"""Extend (prefill): ragged new tokens over a cached prefix, packed; the last row of each request gives its logits.

A graph of this mode has a fixed number of rows in total, not per request: a replay packs its requests at the head of
them, padded requests have no row, and the rows after the last live one belong to no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from attn_testkit.contract import ForwardBatch, ForwardMode
from attn_testkit.model import Trace

from .draft_extend import extend_fields
from .harness import ServerHarness, StagedStep
from .mode_runner import ModeRunner, one_a_request
from .static_inputs import StaticInputs
from .step_tensor import StepTensor
from .tensors.ranks import fill_local_lens


def _eager_extends(harness: ServerHarness, staged: StagedStep) -> Mapping[str, Any]:
    """Fields with both lists: a scheduler cuts the chunks, so the lists are on the host whatever the backend needs."""
    requests = staged.step.requests
    lists = {
        "extend_seq_lens_cpu": [request.new for request in requests],
        "extend_prefix_lens_cpu": [request.decoder_prefix for request in requests],
    }
    return {**extend_fields(harness, staged), **lists}


def _fields(static: StaticInputs, bs: int, tokens: int, lens: list[int], prefixes: list[int]) -> dict[str, Any]:
    """Fields ``extend_*`` of a graph's batch. ``lens``, ``prefixes``: of ``bs`` requests, padded ones included."""
    return {
        "extend_num_tokens": tokens,
        "extend_seq_lens": static["extend_seq_lens"][:bs],
        "extend_prefix_lens": static["extend_prefix_lens"][:bs],
        "extend_start_loc": static["extend_start_loc"][:bs],
        "extend_seq_lens_cpu": lens,
        "extend_prefix_lens_cpu": prefixes,
    }


def _captured_extends(
    harness: ServerHarness, static: StaticInputs, bs: int, width: int, fill: int
) -> Mapping[str, Any]:
    """Give the first requests as many rows as one may have, and no prefix; requests for which no row is left are
    padding."""
    left, most, lens = bs * width, harness.context.max_extend_tokens, list[int]()
    for _ in range(bs):
        lens.append(min(most, left))
        left -= lens[-1]
    keys = [rows or fill for rows in lens]
    prefixes = [length - rows for length, rows in zip(keys, lens, strict=True)]
    static.host["seq_lens"][:bs] = keys
    fill_local_lens(static, keys)
    _share_out(static, lens)
    static.send()
    mirrors = {"seq_lens_sum": sum(keys)} if harness.capabilities.needs.cpu_seq_lens else {}
    return {**_fields(static, bs, bs * width, lens, prefixes), **mirrors}


def _share_out(static: StaticInputs, lens: Sequence[int]) -> None:
    """Give rows to the first requests, and none to those after them. Prefixes and first rows follow from that."""
    host = static.host
    host["extend_seq_lens"][:] = 0
    host["extend_seq_lens"][: len(lens)] = lens
    host["extend_prefix_lens"][:] = host["seq_lens"] - host["extend_seq_lens"]
    host["query_start_loc"][:] = np.pad(host["extend_seq_lens"].cumsum(), (1, 0))
    host["extend_start_loc"][:] = host["extend_seq_lens"].cumsum() - host["extend_seq_lens"]


def _fill(harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int) -> None:
    _share_out(static, [request.new for request in staged.step.requests])


def _replay_extends(
    harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int, fill: int
) -> Mapping[str, Any]:
    requests, padded = staged.step.requests, bs - staged.step.bs
    lens = [request.new for request in requests] + [0] * padded
    prefixes = [request.decoder_prefix for request in requests] + [fill] * padded
    return _fields(static, bs, staged.step.tokens, lens, prefixes)


def _finish(harness: ServerHarness, trace: Trace, batch: ForwardBatch, topk: int) -> None:
    """Prune to the last row of each request, then run the head, inside the graph.

    For a request without rows the row before it is used, or row 0 if there is none.
    """
    assert batch.extend_seq_lens is not None
    last = (batch.extend_seq_lens.cumsum(0) - 1).clamp(min=0)
    trace.hidden = trace.hidden[last]
    trace.logits = harness.model.logits(trace.hidden)


EXTEND = ModeRunner(
    mode=ForwardMode.EXTEND,
    eager_spec=lambda harness, staged: None,
    eager_extends=_eager_extends,
    captured_spec=lambda harness, static, bs, width: None,
    captured_extends=_captured_extends,
    fill=_fill,
    replay_spec=lambda harness, static, staged, bs, width: None,
    replay_extends=_replay_extends,
    finish=_finish,
    returned_rows=one_a_request,
)
EXTEND_TENSORS = (
    StepTensor("extend_prefix_lens", torch.int32, watched=("batch.extend_prefix_lens",)),
    StepTensor("extend_start_loc", torch.int32, watched=("batch.extend_start_loc",)),
)
