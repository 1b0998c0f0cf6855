"""The device buffers that every graph of one runner reads: one block of memory, filled by one transfer per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.steps.data import HIDDEN
from attn_testkit.steps.schedule import Schedule, Step
from attn_testkit.watches.packing import Bytes, Place, Sent, pack_places, sent_alone
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.uploads import upload_into

from .harness import ServerHarness
from .query_bias import bias_stride, clear_bias


@dataclass(frozen=True)
class StaticInputs:
    """Buffers whose heads are live and whose tails are padding."""

    schedule: Schedule
    """Schedule whose steps they hold."""
    input_ids: torch.Tensor
    """Rows of the model's table, [max_bs * N] int64."""
    positions: torch.Tensor
    """Positions, [max_bs * N] int64."""
    out_cache_loc: torch.Tensor
    """KV slots, [max_bs * N] int64; 0 for padded rows."""
    group_cache_locs: torch.Tensor
    """KV slots in the pool of each KV group in sequence, [G * max_bs * N] int64; empty if there is one group."""
    req_pool_indices: torch.Tensor
    """Rows of ``req_to_token``, [max_bs] int64."""
    seq_lens: torch.Tensor
    """Lengths, [max_bs] int64; the fill value for padded requests."""
    num_accept_tokens: torch.Tensor
    """Number of accepted tokens, [max_bs] int32; N for padded requests."""
    num_correct_drafts: torch.Tensor
    """Number of accepted tokens minus one, [max_bs] int32."""
    extend_seq_lens: torch.Tensor
    """Rows of the step, [max_bs] int32; N for padded requests, in extend 0."""
    extend_prefix_lens: torch.Tensor
    """Keys before the step in extend, [max_bs] int32."""
    extend_start_loc: torch.Tensor
    """First row of each request in extend, [max_bs] int32."""
    query_start_loc: torch.Tensor
    """First row of each request, and from the last live one on the number of live rows, [max_bs + 1] int32."""
    select_index: torch.Tensor
    """Flat row of each request's last accepted token, [max_bs] int64."""
    hidden_states: torch.Tensor
    """Hidden states, [max_bs * N, hidden] float32."""
    draft_slots: torch.Tensor
    """Slots of all forwards in draft-decode, [max_bs * K * S] int64; 0 for padded requests."""
    mm_prefix_range_tensor: torch.Tensor
    """Bidirectional spans, [max_bs * R, 2] int32; 0 for padded requests and behind a request's last one. Empty if there
    are none."""
    state_indices: torch.Tensor
    """Slots of states, [max_bs] or flat [max_bs * N] int32; -1 or 0 for padded requests. Empty if no layer keeps a
    state."""
    state_sources: torch.Tensor
    """Slots whose states requests continue, [max_bs] int32; as ``state_indices`` for padded requests. Empty if those
    are their own."""
    state_accepted: torch.Tensor
    """Accepted nodes of the step before, [max_bs] int32; 1 for padded requests. Empty, likewise."""
    has_initial_state: torch.Tensor
    """Flags of requests that have a state, in extend, [max_bs] bool. Empty, likewise."""
    snapshot_rows: torch.Tensor
    """Rows that a copy of a state includes, [max_bs] int32; 0: no copy. Empty if there are none."""
    snapshot_slots: torch.Tensor
    """Slots of copies, [max_bs] int64. Empty, likewise."""
    qq_bias: torch.Tensor
    """Bias among rows, flat [max_bs * N * stride] float32 (``query_bias.py``). Empty if batches have none."""
    encoder_lens: torch.Tensor
    """Encoder keys, [max_bs] int64. Empty without cross-attention layers."""
    custom_mask: torch.Tensor
    """Flat bool mask buffer of the runner, for the captured batch if the backend has none. It is never updated."""
    seq_lens_cpu: torch.Tensor
    """Lengths on the host, [max_bs] int64."""
    host: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    """Host copies by name, without the last two. A step writes here, and ``send`` takes them to the device."""
    left: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    """Contents of ``host`` if a server resets nothing: those of the last replay with so many live rows."""
    memory: torch.Tensor = field(repr=False)
    """Device memory of the buffers, [n] uint8."""
    staged: Bytes = field(repr=False)
    """Memory of ``host``, [n]."""
    places: tuple[Place, ...] = field(repr=False)
    """Places of buffers in ``memory`` and ``staged``."""
    counts: Mapping[str, int]
    """Number of entries per request of each buffer."""

    def by_group(self, tokens: int) -> torch.Tensor | None:
        """Slots [G, tokens] of the first tokens in each group's pool; None if all layers share one."""
        if not len(self.group_cache_locs):
            return None
        return self.group_cache_locs.view(-1, len(self.out_cache_loc))[:, :tokens]

    def spans(self, bs: int) -> torch.Tensor:
        """Bidirectional spans of the first requests, [bs, R, 2]."""
        each = self.counts["mm_prefix_range_tensor"]
        return self.mm_prefix_range_tensor[: bs * each].view(bs, each, 2)

    def send(self) -> None:
        """Copy ``host`` to the buffers."""
        with past_modes():
            upload_into(self.memory, torch.from_numpy(self.staged))
            self.seq_lens_cpu.numpy()[:] = self.host["seq_lens"]

    def pad(self, step: Step, rows: int, nan_row: int) -> None:
        """Fill everything after the live requests of ``step`` and its ``rows`` live rows, according to its padding."""
        for name, live in (("positions", rows), ("req_pool_indices", step.bs), ("input_ids", rows)):
            zeroed = name != "input_ids" and step.padding != "stale"
            self.host[name][live:] = 0 if zeroed else self.left[name][live:]
            self.left[name][:live] = self.host[name][:live]
        if step.padding == "nan":
            self.host["input_ids"][rows:] = nan_row

    def sent(self, bs: int, *, spec: bool, mask: bool) -> tuple[Sent, ...]:
        """Memory that a graph of ``bs`` requests may not write, with its contents.

        ``spec``: true if its batch has a ``spec_info``. ``mask``: true if the backend got the runner's mask.
        """
        names = {name: buffer.watched for name, buffer in _BUFFERS.items()}
        if not spec:
            names["extend_seq_lens"] = "batch.extend_seq_lens"
        places = tuple(
            replace(
                place,
                name=names[place.name],
                shape=(bs * self.counts[place.name] + _BUFFERS[place.name].more, *place.shape[1:]),
            )
            for place in self.places
            if names[place.name] and self.counts[place.name]
        )
        sent = [Sent(places, self.memory, self.staged)]
        sent.append(sent_alone("batch.seq_lens_cpu", self.seq_lens_cpu[:bs], self.host["seq_lens"][:bs].view(np.uint8)))
        if mask and (size := self.custom_mask.numel()):
            sent.append(sent_alone("batch.spec_info.custom_mask", self.custom_mask, np.ones(size, np.uint8)))
        return tuple(sent)


class _Buffer(NamedTuple):
    dtype: torch.dtype
    by: Literal[
        "request", "token", "slot", "token of each group", "span", "state", "state list", "source", "copy", "bias",
        "encoder",
    ]  # fmt: skip
    """Unit that it has an entry for; slot: of a draft."""
    watched: str
    """Name in messages; empty if a step may write it."""
    columns: tuple[int, ...] = ()
    more: int = 0
    """Number of extra entries."""


_BUFFERS: Mapping[str, _Buffer] = {
    "input_ids": _Buffer(torch.int64, "token", "batch.input_ids"),
    "req_pool_indices": _Buffer(torch.int64, "request", "batch.req_pool_indices"),
    "seq_lens": _Buffer(torch.int64, "request", "batch.seq_lens"),
    "out_cache_loc": _Buffer(torch.int64, "token", "batch.out_cache_loc"),
    "group_cache_locs": _Buffer(torch.int64, "token of each group", "batch.group_cache_locs"),
    "positions": _Buffer(torch.int64, "token", "batch.positions"),
    "num_accept_tokens": _Buffer(torch.int32, "request", "batch.spec_info.num_accept_tokens"),
    "num_correct_drafts": _Buffer(torch.int32, "request", "batch.spec_info.num_correct_drafts"),
    "hidden_states": _Buffer(torch.float32, "token", "batch.spec_info.hidden_states", (HIDDEN,)),
    "extend_seq_lens": _Buffer(torch.int32, "request", "batch.spec_info.extend_seq_lens_tensor"),
    "extend_prefix_lens": _Buffer(torch.int32, "request", "batch.extend_prefix_lens"),
    "extend_start_loc": _Buffer(torch.int32, "request", "batch.extend_start_loc"),
    "query_start_loc": _Buffer(torch.int32, "request", "batch.query_start_loc", more=1),
    "draft_slots": _Buffer(torch.int64, "slot", "batch.spec_info.out_cache_loc"),
    "select_index": _Buffer(torch.int64, "request", ""),
    "mm_prefix_range_tensor": _Buffer(torch.int32, "span", "batch.mm_prefix_range_tensor", (2,)),
    "snapshot_slots": _Buffer(torch.int64, "copy", "batch.state.snapshot.slots"),
    "state_indices": _Buffer(torch.int32, "state list", "batch.state.indices"),
    "state_sources": _Buffer(torch.int32, "source", "batch.state.sources"),
    "state_accepted": _Buffer(torch.int32, "state", "batch.state.num_accepted"),
    "snapshot_rows": _Buffer(torch.int32, "copy", "batch.state.snapshot.rows"),
    "has_initial_state": _Buffer(torch.bool, "state", "batch.state.has_initial_state"),
    "qq_bias": _Buffer(torch.float32, "bias", "batch.qq_bias"),
    "encoder_lens": _Buffer(torch.int64, "encoder", "batch.encoder_lens"),
}
"""Buffers in the order in which messages name them."""


def make_static_inputs(harness: ServerHarness, schedule: Schedule, fill: int, listed: int = 1) -> StaticInputs:
    """Make buffers as before a capture: lengths at ``fill``, accept counts at N, tokens and rows zero.

    ``listed``: slots of states that a batch lists per request.
    """
    context, case, max_bs = harness.context, schedule.case, schedule.max_bs
    width, rows = case.width, case.rows_at_once
    each = {
        "request": 1,
        "token": width,
        "slot": case.draft.branches * case.draft.steps if case.draft else 0,
        "token of each group": width * len(context.kv_groups),
        "span": context.max_spans,
        "state": 1 if context.state else 0,
        "state list": listed if context.state else 0,
        "source": 1 if context.state and context.state.continues == "source" else 0,
        "copy": 1 if context.state and context.state.snapshots else 0,
        "bias": width * bias_stride(context, case),
        "encoder": 1 if context.max_encoder_len else 0,
    }
    counts = {name: each[buffer.by] for name, buffer in _BUFFERS.items()}
    packing = pack_places(
        tuple(
            (name, buffer.dtype, (max_bs * counts[name] + buffer.more, *buffer.columns))
            for name, buffer in _BUFFERS.items()
        )
    )
    staged = packing.fresh()
    host = packing.arrays(staged)
    padding = harness.padding_slot(0)
    values = {
        "out_cache_loc": padding,
        "group_cache_locs": padding,
        "draft_slots": padding,
        "seq_lens": fill,
        "encoder_lens": context.max_encoder_len,
        "num_accept_tokens": width,
        "num_correct_drafts": width - 1,
        "extend_seq_lens": width,
        "state_accepted": 1,
        **dict.fromkeys(
            ("state_indices", "state_sources"), harness.case.state.padded_index if harness.case.state else 0
        ),
    }
    for name, array in host.items():
        array[:] = values.get(name, 0)
    if stride := bias_stride(context, case):
        clear_bias(host["qq_bias"].reshape(-1, stride))
    host["query_start_loc"][:] = np.arange(max_bs + 1) * rows
    host["select_index"][:] = np.arange(1, max_bs + 1) * width - 1
    memory = torch.empty(packing.size, dtype=torch.uint8, device=harness.device)
    mask_size = max_bs * width * (fill + width) if context.topk else 0
    static = StaticInputs(
        schedule=schedule,
        **packing.tensors(memory),
        custom_mask=torch.ones(mask_size, dtype=torch.bool, device=harness.device),
        seq_lens_cpu=torch.zeros(max_bs, dtype=torch.int64),
        host=host,
        left={name: host[name].copy() for name in ("positions", "req_pool_indices", "input_ids")},
        memory=memory,
        staged=staged,
        places=packing.places,
        counts=counts,
    )
    static.send()
    return static
