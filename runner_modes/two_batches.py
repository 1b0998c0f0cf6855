"""Two-batch overlap in one process: an instance for each of two batches behind the interface of one.

As in SGLang's ``TboAttnBackend``, one instance more plans the whole batch, and runs it if it cannot be cut. All three
share the pool and the request table. Both batches are planned before the first layer; then their layers run in turn.
The tensors of a batch are slices of those of the step, which are the static buffers of a graph. All work is device
work, and may be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import torch

from attn_testkit.cases.features.server.two_batch_overlap import may_cut_prompts
from attn_testkit.cases.fields import Fields
from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    StateInput,
    TreeMaskMode,
    VerifyInput,
    VerifyMask,
)

from .returned import check_returned

_OF_REQUESTS = (
    "req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_prefix_lens", "extend_seq_lens_cpu",
    "extend_prefix_lens_cpu", "mm_prefix_range", "mm_prefix_range_tensor",
)  # fmt: skip
_OF_ROWS = ("input_ids", "positions", "out_cache_loc", "qq_bias")
_OF_STATES = ("indices", "has_initial_state", "num_accepted", "sources")
_EVEN = 0.48
"""Least part of the rows in the smaller batch if the cut is between two prompts (SGLang's
``tbo_token_distribution_threshold``); else a prompt is cut."""


@dataclass
class CutVerifyInput(VerifyInput):
    """``spec_info`` of a step that is cut."""

    prefixes: tuple[int, ...] = ()
    """Keys before the step of each live request, from which the place of its mask follows."""


@dataclass(frozen=True)
class Part:
    """Requests and rows of one of the two batches. Ends are exclusive."""

    requests: slice
    rows: slice
    before: int = 0
    """Rows of its first request that the other batch has."""
    after: int = 0
    """Rows of its last request that the other batch has."""


def cut_evenly(requests: int, width: int) -> tuple[Part, Part] | None:
    """Cut a batch of ``requests`` with ``width`` rows each. None if it has only one request."""
    half = requests // 2
    ends = slice(0, half), slice(half, requests)
    first, second = (Part(end, slice(end.start * width, end.stop * width)) for end in ends)
    return (first, second) if half else None


def cut_prompts(lens: Sequence[int], *, inside: bool) -> tuple[Part, Part] | None:
    """Cut a batch of prompts with these numbers of new rows: between two of them if the two batches then have about
    as many rows, else inside one. ``inside``: false if none may be cut inside. None if a batch would have no row.
    """
    ends, total = [0, *accumulate(lens)], sum(lens)
    at = min(range(1, len(lens)), key=lambda i: abs(total - 2 * ends[i]), default=0)
    if inside and not total * _EVEN <= ends[at] <= total * (1 - _EVEN):
        row = total // 2
        which = next((i for i in range(len(lens)) if ends[i] < row < ends[i + 1]), None)
        if which is not None:
            before, after = row - ends[which], ends[which + 1] - row
            return (
                Part(slice(0, which + 1), slice(0, row), after=after),
                Part(slice(which, len(lens)), slice(row, total), before=before),
            )
    if not 0 < ends[at] < total:
        return None
    return Part(slice(0, at), slice(0, ends[at])), Part(slice(at, len(lens)), slice(ends[at], total))


def _context_of_part(context: BackendContext) -> BackendContext:
    """The context of the instance of a batch: graphs are captured with half of the requests."""
    sizes, tokens = context.capture_sizes, context.capture_tokens
    # Several modes of an instance may have other numbers of sizes than of tokens; then tokens are not known.
    halves = [(bs // 2, rows // 2) for bs, rows in zip(sizes, tokens, strict=False) if bs % 2 == 0]
    known = len(sizes) == len(tokens)
    return replace(
        context,
        capture_sizes=tuple(bs // 2 for bs in sizes if bs % 2 == 0),
        capture_tokens=tuple(rows for _, rows in halves) if known else (),
    )


@dataclass(frozen=True)
class _Cut:
    """The two batches of a step, in the order in which they run."""

    parts: tuple[Part, Part]
    batches: tuple[ForwardBatch, ForwardBatch]


class TwoBatches(AttentionBackend):
    """Three instances of a backend: for whole batches, and for each of two batches."""

    def __init__(
        self, backend_class: type[AttentionBackend], context: BackendContext, case: Fields, declared: Capabilities
    ) -> None:
        """Construct the instances. Errors of their constructor are passed on."""
        self._inside = may_cut_prompts(declared, case)
        self.context = context
        of_part = _context_of_part(context)
        self.instances = [backend_class(each) for each in (context, of_part, of_part)]
        self.kernels = self.instances[0].kernels
        self.uncut = False
        """True: steps are not cut."""
        self._starts: dict[tuple[int, int, int], torch.Tensor] = {}

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager step: the whole batch, then both batches."""
        self._plan(batch, self._parts(batch), lambda instance, own: instance.init_forward_metadata(own), in_graph=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the graph state of every instance, each for the whole batch, as SGLang does."""
        for instance in self.instances:
            instance.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Prepare a capture or a replay. Only even batches are cut: servers capture no others."""
        named = {"in_capture": True} if in_capture else {}
        parts = None if batch.batch_size % 2 or batch.forward_mode is ForwardMode.EXTEND else self._parts(batch)

        def plan(instance: AttentionBackend, own: ForwardBatch) -> None:
            instance.init_forward_metadata_out_graph(own, **named)

        self._plan(batch, parts, plan, in_graph=True)

    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:
        """Prepare a capture for the second time."""
        self._each(batch, lambda instance, own: instance.init_forward_metadata_before_capture(own))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Do the device work of all plans."""
        self._each(batch, lambda instance, own: instance.init_forward_metadata_in_graph(own))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return ``seq_lens`` of a padded request."""
        return self.instances[0].get_cuda_graph_seq_len_fill_value()

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The mask buffer of the instance for whole batches, which the kit fills; the others get copies in theirs."""
        return self.instances[0].verify_mask

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        """Outputs of both batches, [T, Hq, Dv]: the first one's is read only after the second one has run.

        Raises ``ShapeError``; passes errors on.
        """
        named = more if save_kv_cache else {**more, "save_kv_cache": False}
        cut = self._cut(batch)
        if cut is None:
            return self.instances[0].forward(q, k, v, layer, batch, **named)  # type: ignore[arg-type]
        shape, outs = (layer.tp_q_head_num, layer.v_head_dim), []
        for instance, part, own in zip(self.instances[1:], cut.parts, cut.batches, strict=True):
            keys = tuple(None if each is None else each[part.rows] for each in (k, v))
            of_part = {
                name: each[part.rows] if isinstance(each, torch.Tensor) else each for name, each in named.items()
            }
            outs.append(instance.forward(q[part.rows], *keys, layer, own, **of_part))  # type: ignore[call-arg, arg-type]
        lent = more.get("out")
        for number, (part, out) in enumerate(zip(cut.parts, outs, strict=True)):
            rows = part.rows.stop - part.rows.start
            shapes = ((rows, *shape), (rows, shape[0] * shape[1]))
            name = f"layer {layer.layer_id} for batch {number} of two"
            check_returned(name, out, shapes, self.context.dtype, self.context.device)
        if lent is not None and all(
            out.data_ptr() == lent[part.rows].data_ptr() for part, out in zip(cut.parts, outs, strict=True)
        ):
            return cast(torch.Tensor, lent)
        return torch.cat([out.reshape(-1, *shape) for out in outs])

    def store_index(self, k_index: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Store the index keys of both batches."""
        self._in_turn(batch, lambda instance, rows, own: instance.store_index(k_index[rows], layer, own))

    def select(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Selections of both batches, [T, topk]."""
        found = self._in_turn(
            batch, lambda instance, rows, own: instance.select(q_index[rows], weights[rows], layer, own)
        )
        return found[0] if len(found) == 1 else torch.cat(found)

    def _in_turn(self, batch: ForwardBatch, call: Callable[[AttentionBackend, slice, ForwardBatch], Any]) -> list[Any]:
        cut = self._cut(batch)
        if cut is None:
            return [call(self.instances[0], slice(None), batch)]
        pairs = zip(self.instances[1:], cut.parts, cut.batches, strict=True)
        return [call(instance, part.rows, own) for instance, part, own in pairs]

    def _parts(self, batch: ForwardBatch) -> tuple[Part, Part] | None:
        if self.uncut:
            return None
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens_cpu is not None, "prompts have their lengths on the host"
            return cut_prompts(batch.extend_seq_lens_cpu, inside=self._inside)
        if batch.forward_mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
            return cut_evenly(batch.batch_size, _width(batch))
        return None

    def _plan(
        self,
        batch: ForwardBatch,
        parts: tuple[Part, Part] | None,
        plan: Callable[[AttentionBackend, ForwardBatch], None],
        *,
        in_graph: bool,
    ) -> None:
        own_batches = [self._of_part(batch, i, part, in_graph=in_graph) for i, part in enumerate(parts or ())]
        cut = parts and _Cut(parts, (own_batches[0], own_batches[1]))
        if not isinstance(batch, SimpleNamespace):
            # The batches stay the same objects from the plan to the last layer.
            batch.extras["two batches"] = cut
        plan(self.instances[0], batch)
        for instance, own in zip(self.instances[1:], cut.batches if cut else (), strict=bool(cut)):
            plan(instance, own)

    def _cut(self, batch: ForwardBatch) -> _Cut | None:
        return cast("_Cut | None", batch.extras.get("two batches"))

    def _each(self, batch: ForwardBatch, call: Callable[[AttentionBackend, ForwardBatch], None]) -> None:
        cut = self._cut(batch)
        for instance, own in zip(self.instances, (batch, *(cut.batches if cut else ())), strict=False):
            call(instance, own)

    def _of_part(self, batch: ForwardBatch, number: int, part: Part, *, in_graph: bool) -> ForwardBatch:
        """One of the two batches, as a server has it."""
        own = dict(vars(batch)) if isinstance(batch, SimpleNamespace) else _fields_of(batch)
        own |= {name: own[name][part.requests] for name in _OF_REQUESTS if own.get(name) is not None}
        own |= {name: own[name][part.rows] for name in _OF_ROWS if own.get(name) is not None}
        requests = part.requests.stop - part.requests.start
        own["batch_size"] = requests
        if own.get("seq_lens_sum") is not None:
            own["seq_lens_sum"] = int(own["seq_lens_cpu"].sum())
        if "num_padding" in own:
            after = batch.batch_size - part.requests.stop
            own["num_padding"] = min(requests, max(0, batch.num_padding - after))
        if own.get("group_cache_locs") is not None:
            own["group_cache_locs"] = own["group_cache_locs"][:, part.rows]
        if own.get("extend_num_tokens") is not None:
            own |= _of_prompts(own, part)
        elif own.get("query_start_loc") is not None:
            own["query_start_loc"] = self._starts_of(batch, number, part, in_graph=in_graph)
        if own.get("mm_prefix_range_tensor") is not None and not in_graph:
            own |= _of_spans(own)
        if own.get("state") is not None:
            own["state"] = _state(own["state"], part)
        if isinstance(batch.spec_info, VerifyInput):
            own["spec_info"] = self._verify(batch.spec_info, number, part)
        if isinstance(batch, SimpleNamespace):
            return cast(ForwardBatch, SimpleNamespace(**own))
        return ForwardBatch(**{**own, "extras": {}})

    def _starts_of(self, batch: ForwardBatch, number: int, part: Part, *, in_graph: bool) -> torch.Tensor:
        """``query_start_loc`` of a batch. A graph reads that of its capture, which replays fill."""
        assert batch.query_start_loc is not None
        given = batch.query_start_loc[part.requests.start : part.requests.stop + 1]
        starts, key = given - given[:1], (number, batch.batch_size, _width(batch))
        if not in_graph:
            return starts
        if isinstance(batch, SimpleNamespace):
            return self._starts[key].copy_(starts)
        return self._starts.setdefault(key, starts)

    def _verify(self, spec: VerifyInput, number: int, part: Part) -> VerifyInput:
        """``spec_info`` of one of the two batches."""
        requests, rows = part.requests, part.rows
        plain = {each.name: getattr(spec, each.name) for each in fields(VerifyInput)}
        found = replace(
            VerifyInput(**plain),
            draft_token=spec.draft_token[rows],
            positions=spec.positions[rows],
            seq_lens_cpu=None if spec.seq_lens_cpu is None else spec.seq_lens_cpu[requests],
        )
        if found.seq_lens_cpu is not None:
            found.seq_lens_sum = int(found.seq_lens_cpu.sum())
        if spec.retrieve_index is not None and spec.retrieve_next_token is not None:
            assert spec.retrieve_next_sibling is not None
            found.retrieve_index = spec.retrieve_index[requests] - rows.start
            found.retrieve_next_token = spec.retrieve_next_token[requests]
            found.retrieve_next_sibling = spec.retrieve_next_sibling[requests]
        if spec.custom_mask is not None:
            found.custom_mask = self._mask(spec, spec.custom_mask, number, part)
        return found

    def _mask(self, spec: VerifyInput, mask: torch.Tensor, number: int, part: Part) -> torch.Tensor:
        """Mask of one of the two batches, in the buffer of its instance if the whole mask is in such a buffer."""
        filled, buffer = self.verify_mask, self.instances[number + 1].verify_mask
        prefixes = spec.prefixes if isinstance(spec, CutVerifyInput) else ()
        ends = [0, *accumulate(_items(spec.tree_mask_mode, spec.draft_token_num, prefix) for prefix in prefixes)]
        first, last = (ends[min(at, len(prefixes))] for at in (part.requests.start, part.requests.stop))
        own = mask[first:last]
        if filled is not None and buffer is not None and mask.data_ptr() == filled.buffer.data_ptr():
            buffer.buffer[: last - first].copy_(own)
            return buffer.buffer
        # A batch without a live request has no mask, like a whole batch without one: SGLang gives it all of the mask.
        return own if last > first else mask


def _width(batch: ForwardBatch) -> int:
    return batch.spec_info.draft_token_num if isinstance(batch.spec_info, VerifyInput) else 1


def _items(mode: TreeMaskMode, nodes: int, prefix: int) -> int:
    """Number of items in the mask of a request."""
    if mode is TreeMaskMode.FULL_MASK:
        return nodes * (prefix + nodes)
    return nodes * nodes if mode is TreeMaskMode.QLEN_ONLY else nodes


def _fields_of(batch: ForwardBatch) -> dict[str, Any]:
    return {each.name: getattr(batch, each.name) for each in fields(batch)}


def _changed(lens: torch.Tensor, at: int, by: int) -> torch.Tensor:
    """``lens`` with another entry, without a wait for the device."""
    found = lens.clone()
    found[at : at + 1] += by
    return found


def _of_prompts(own: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Lengths of prompts of which the other batch may have rows."""
    found = {name: own[name] for name in _OF_REQUESTS if name.startswith("extend_") and own.get(name) is not None}
    found["seq_lens"], last = own["seq_lens"], part.requests.stop - part.requests.start - 1
    if part.before:
        found["extend_seq_lens"] = _changed(found["extend_seq_lens"], 0, -part.before)
        found["extend_prefix_lens"] = _changed(found["extend_prefix_lens"], 0, part.before)
        found["extend_seq_lens_cpu"] = _on_host(found["extend_seq_lens_cpu"], 0, -part.before)
        found["extend_prefix_lens_cpu"] = _on_host(found["extend_prefix_lens_cpu"], 0, part.before)
    if part.after:
        found["extend_seq_lens"] = _changed(found["extend_seq_lens"], last, -part.after)
        found["extend_seq_lens_cpu"] = _on_host(found["extend_seq_lens_cpu"], last, -part.after)
        found["seq_lens"] = _changed(found["seq_lens"], last, -part.after)
        if own.get("seq_lens_cpu") is not None:
            found["seq_lens_cpu"] = _changed(own["seq_lens_cpu"], last, -part.after)
            found["seq_lens_sum"] = own["seq_lens_sum"] - part.after
    lens = found["extend_seq_lens"]
    found["extend_start_loc"] = (lens.cumsum(0) - lens).to(torch.int32)
    found["extend_num_tokens"] = part.rows.stop - part.rows.start
    if own.get("query_start_loc") is not None:
        found["query_start_loc"] = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    return found


def _on_host(lens: list[int], at: int, by: int) -> list[int]:
    return [length + by * (place == at) for place, length in enumerate(lens)]


def _of_spans(own: Mapping[str, Any]) -> dict[str, Any]:
    """Spans of an eager batch, as many as one of its requests has."""
    most = max((len(spans) for spans in own["mm_prefix_range"]), default=0)
    return {"mm_prefix_range_tensor": own["mm_prefix_range_tensor"][:, :most].contiguous() if most else None}


def _state(state: StateInput, part: Part) -> StateInput:
    """States of one of the two batches. The second continues a prompt of which the first has rows."""
    found = {name: getattr(state, name) for name in _OF_STATES}
    own = replace(state, **{name: each[part.requests] for name, each in found.items() if each is not None})
    if state.snapshot is not None:
        copies = state.snapshot
        own.snapshot = replace(copies, rows=copies.rows[part.requests], slots=copies.slots[part.requests])
    if part.before and own.has_initial_state is not None:
        own.has_initial_state = own.has_initial_state.clone()
        own.has_initial_state[:1] = True
    return own
