"""Forward batches: the eager kind, the dummy of a capture, and the view that a backend gets at a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.spans import Span
from attn_testkit.contract import DraftExtendInput, ForwardBatch, ForwardMode, SpecInput, VerifyInput
from attn_testkit.watches.packing import Sent, bytes_of, send, sent_alone
from attn_testkit.watches.uploads import upload

from .harness import ServerHarness, StagedStep
from .query_bias import bias_of_rows, of_buffer, padded_bias
from .states import captured_states, eager_states
from .static_inputs import StaticInputs

ReplayView = SimpleNamespace
"""The batch that a backend gets at a replay: fewer attributes than a ``ForwardBatch``, whose docstring lists them."""


def seq_lens_of(harness: ServerHarness, mode: ForwardMode, staged: StagedStep) -> list[int]:
    """``seq_lens`` of the live requests, in tokens, by the convention of each mode and of the server."""
    of_prefixes = mode is ForwardMode.TARGET_VERIFY and harness.context.dialect.verify_lens == "prefix"
    if of_prefixes or mode is ForwardMode.DRAFT_DECODE:
        return [r.prefix for r in staged.step.requests]
    return [r.decoder_prefix + r.new for r in staged.step.requests]


def query_starts_of(staged: StagedStep) -> npt.NDArray[np.int32]:
    """First row of each live request in a forward, and the end of the last one, [R + 1]."""
    draft = staged.schedule.case.draft
    rows = [draft.branches if draft else request.new for request in staged.step.requests]
    return np.cumsum([0, *rows], dtype=np.int32)


def eager_batch(
    harness: ServerHarness,
    staged: StagedStep,
    mode: ForwardMode,
    spec_info: SpecInput | None,
    extends: Mapping[str, Any],
) -> ForwardBatch:
    """The live batch, unpadded, on the host: [T] and [bs] int64, with host lengths if the backend needs them.

    ``spec_info`` and ``extends``: fields that the mode adds or replaces.
    """
    step, data = staged.step, staged.data
    lens = torch.tensor(seq_lens_of(harness, mode, staged), dtype=torch.int64)
    mirrors = harness.capabilities.needs_cpu_seq_lens
    fields: dict[str, Any] = {
        "forward_mode": mode,
        "batch_size": step.bs,
        "input_ids": staged.ids,
        "req_pool_indices": torch.tensor([r.pool_row for r in step.requests], dtype=torch.int64),
        "seq_lens": lens,
        "out_cache_loc": torch.from_numpy(harness.in_groups(staged.schedule, data.out_cache_loc.numpy())[0]),
        "group_cache_locs": _by_group(harness, staged),
        "positions": data.positions,
        "seq_lens_cpu": lens.clone() if mirrors else None,
        "seq_lens_sum": int(lens.sum()) if mirrors else None,
        "query_start_loc": torch.from_numpy(query_starts_of(staged)) if harness.pads_with_nothing else None,
        "spec_info": spec_info,
        **_eager_spans(harness, staged),
        "state": eager_states(harness.context, staged),
        "qq_bias": padded_bias(harness.context, staged.schedule.case, data),
        **_encoder_fields(harness, staged),
    }
    return ForwardBatch(**{**fields, **extends})


def _eager_spans(harness: ServerHarness, staged: StagedStep) -> dict[str, Any]:
    """Bidirectional spans of the batch, as vLLM pads them; no tensor if no request has any."""
    if not harness.context.max_spans:
        return {}
    ranges = spans_of(staged)
    most = max(map(len, ranges), default=0)
    padded = [[*each, *[(0, 0)] * (most - len(each))] for each in ranges]
    return {
        "mm_prefix_range": ranges,
        "mm_prefix_range_tensor": torch.tensor(padded, dtype=torch.int32) if most else None,
    }


def spans_of(staged: StagedStep, padded: int = 0) -> list[list[Span]]:
    """Bidirectional spans of each live request of a step, and none of so many padded ones."""
    return [list(request.spans) for request in staged.step.requests] + [[] for _ in range(padded)]


def _encoder_fields(harness: ServerHarness, staged: StagedStep) -> dict[str, Any]:
    """Fields ``encoder_*`` of an eager batch, on the host."""
    encoder = staged.data.encoder
    if encoder is None:
        return {}
    # The last KV group is that of the cross-attention layers, if they have one.
    slots = harness.in_groups(staged.schedule, encoder.slots.numpy())[-1]
    return {
        "encoder_lens": encoder.lens.clone(),
        "encoder_lens_cpu": encoder.lens.tolist() if harness.capabilities.needs_cpu_seq_lens else None,
        "encoder_out_cache_loc": torch.from_numpy(slots) if len(slots) else None,
    }


def _by_group(harness: ServerHarness, staged: StagedStep) -> torch.Tensor | None:
    if not harness.context.kv_groups:
        return None
    return torch.from_numpy(harness.in_groups(staged.schedule, staged.data.out_cache_loc.numpy()))


def batch_on_device(batch: ForwardBatch, device: torch.device) -> tuple[ForwardBatch, tuple[Sent, ...]]:
    """Move an eager batch's host tensors to the device; also return the memory that a backend may not write.

    Fields that end in ``_cpu`` stay where they are. Memory is fresh for each step: a backend that keeps a tensor of an
    earlier step goes on reading that step's numbers.
    """
    owners: dict[str, Any] = {"batch.": batch}
    if batch.spec_info is not None:
        owners["batch.spec_info."] = batch.spec_info
    if batch.state is not None:
        owners["batch.state."] = batch.state
        if batch.state.snapshot is not None:
            owners["batch.state.snapshot."] = batch.state.snapshot
    moved, sent = _moved(owners, device)
    if batch.seq_lens_cpu is not None:
        kept = batch.seq_lens_cpu.numpy().copy().view(np.uint8)
        sent.append(sent_alone("batch.seq_lens_cpu", batch.seq_lens_cpu, kept))
    given = moved["batch."]
    parts: dict[str, Any] = {name: moved.get(f"batch.{name}.", getattr(given, name)) for name in ("spec_info", "state")}
    if "batch.state.snapshot." in moved:
        parts["state"] = replace(parts["state"], snapshot=moved["batch.state.snapshot."])
    if given.qq_bias is not None:
        parts["qq_bias"] = of_buffer(given.qq_bias)
    return replace(given, **parts), tuple(sent)


Spec = TypeVar("Spec", VerifyInput, DraftExtendInput)


def spec_on_device(spec: Spec, device: torch.device) -> Spec:
    """Move a ``spec_info`` to the device whose tensors exist only for the step, as some of a replay do."""
    moved: Spec = _moved({"": spec}, device)[0][""]
    return moved


def _moved(owners: Mapping[str, Any], device: torch.device) -> tuple[dict[str, Any], list[Sent]]:
    """Move host tensors of dataclasses, by the prefix of their fields' names, to the device."""
    host = {prefix: _host_tensors(owner) for prefix, owner in owners.items()}
    # A mask is as large as all lengths: it has its own memory, which is reused after the step.
    masks = {prefix: found.pop("custom_mask") for prefix, found in host.items() if "custom_mask" in found}
    packed = {prefix + name: tensor for prefix, found in host.items() for name, tensor in found.items()}
    tensors, together = send(packed, device)
    sent = [replace(together, places=tuple(place for place in together.places if place.name in _WATCHED))]
    moved: dict[str, Any] = {}
    for prefix, owner in owners.items():
        fields_of_it = {name: tensors[prefix + name] for name in host[prefix]}
        if prefix in masks:
            fields_of_it["custom_mask"] = mask = upload(masks[prefix], device)
            sent.append(sent_alone(f"{prefix}custom_mask", mask, bytes_of(masks[prefix])))
        moved[prefix] = replace(owner, **fields_of_it)
    return moved, sent


def _host_tensors(owner: Any) -> dict[str, torch.Tensor]:
    """Fields of a dataclass that are moved to the device."""
    named = ((each.name, getattr(owner, each.name)) for each in fields(owner) if not each.name.endswith("_cpu"))
    return {name: value for name, value in named if isinstance(value, torch.Tensor) and not value.is_cuda}


_OF_BATCH = (
    *("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "group_cache_locs", "positions"),
    *("extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "query_start_loc", "mm_prefix_range_tensor"),
    *("qq_bias", "encoder_lens", "encoder_out_cache_loc"),
)
_OF_SPEC = (
    *("positions", "num_accept_tokens", "num_correct_drafts", "hidden_states", "extend_seq_lens_tensor"),
    "out_cache_loc",
)
_OF_STATE = ("indices", "has_initial_state", "num_accepted", "snapshot.rows", "snapshot.slots")
_WATCHED = frozenset(
    f"batch.{prefix}{name}"
    for prefix, names in (("", _OF_BATCH), ("spec_info.", _OF_SPEC), ("state.", _OF_STATE))
    for name in names
)
"""Fields of a batch that a step must not change."""


def captured_batch(
    harness: ServerHarness,
    static: StaticInputs,
    mode: ForwardMode,
    bs: int,
    width: int,
    spec: SpecInput | None,
    extends: Mapping[str, Any],
) -> ForwardBatch:
    """The batch of a bucket of ``bs`` requests of ``width`` rows: slices of the static buffers, which are all padding.

    ``extends``: fields that the mode replaces or adds.
    """
    tokens, mirrors = bs * width, harness.capabilities.needs_cpu_seq_lens
    fields: dict[str, Any] = {
        "forward_mode": mode,
        "batch_size": bs,
        "input_ids": static.input_ids[:tokens],
        "req_pool_indices": static.req_pool_indices[:bs],
        "seq_lens": static.seq_lens[:bs],
        "out_cache_loc": static.out_cache_loc[:tokens],
        "group_cache_locs": static.by_group(tokens),
        "positions": static.positions[:tokens],
        "seq_lens_cpu": static.seq_lens_cpu[:bs] if mirrors else None,
        "seq_lens_sum": int(static.host["seq_lens"][:bs].sum()) if mirrors else None,
        "query_start_loc": static.query_start_loc[: bs + 1] if harness.pads_with_nothing else None,
        "spec_info": spec,
        **_captured_spans(harness, static, [[] for _ in range(bs)]),
        "state": captured_states(harness.context, static, mode, bs),
        "qq_bias": bias_of_rows(harness.context, static.schedule.case, static.qq_bias, tokens),
        **_captured_encoder_fields(harness, static, bs),
    }
    return ForwardBatch(**{**fields, **extends})


def _captured_spans(harness: ServerHarness, static: StaticInputs, ranges: list[list[Span]]) -> dict[str, Any]:
    """Fields ``mm_prefix_range*`` of a graph's batch. ``ranges``: spans of each request, padded ones included."""
    if not harness.context.max_spans:
        return {}
    return {"mm_prefix_range": ranges, "mm_prefix_range_tensor": static.spans(len(ranges))}


def _captured_encoder_fields(harness: ServerHarness, static: StaticInputs, bs: int) -> dict[str, Any]:
    """Fields ``encoder_*`` of a graph's batch, those of padded requests too."""
    if not harness.context.max_encoder_len:
        return {}
    lens = static.host["encoder_lens"][:bs].tolist()
    return {
        "encoder_lens": static.encoder_lens[:bs],
        "encoder_lens_cpu": lens if harness.capabilities.needs_cpu_seq_lens else None,
    }


def replay_view(
    harness: ServerHarness,
    staged: StagedStep,
    static: StaticInputs,
    mode: ForwardMode,
    bs: int,
    width: int,
    fill: int,
    spec: SpecInput | None,
    extends: Mapping[str, Any],
) -> ForwardBatch:
    """The batch as production servers pass it: a namespace, with attributes missing and some buffers longer than it.

    ``bs``: the bucket's requests, padded ones included; ``width``: N; ``fill``: ``seq_lens`` of padded requests;
    ``extends``: fields that the mode adds or replaces.
    """
    live, mirrors = staged.step.bs, harness.capabilities.needs_cpu_seq_lens
    drafts = mode.is_draft_extend(include_v2=True)
    upto, tokens = None if drafts else bs, bs * width if extends else staged.step.tokens
    view = SimpleNamespace(
        forward_mode=mode,
        batch_size=bs,
        input_ids=static.input_ids[: staged.step.tokens] if drafts else static.input_ids[: bs * width],
        req_pool_indices=static.req_pool_indices[:upto],
        seq_lens=static.seq_lens[:upto],
        seq_lens_cpu=static.seq_lens_cpu[:upto] if mirrors else None,
        seq_lens_sum=sum(seq_lens_of(harness, mode, staged)) + (bs - live) * fill if mirrors else None,
        out_cache_loc=static.out_cache_loc[:tokens],
        spec_info=spec,
    )
    if harness.context.state is not None:
        view.state = captured_states(harness.context, static, mode, bs)
    if harness.context.qq_bias != "none":
        view.qq_bias = bias_of_rows(harness.context, static.schedule.case, static.qq_bias, bs * width)
    if harness.pads_with_nothing:
        view.query_start_loc = static.query_start_loc[: bs + 1]
    if harness.context.kv_groups:
        view.group_cache_locs = static.by_group(tokens)
    if not drafts:
        view.positions = static.positions[: bs * width]
        view.num_padding = bs - live
        view.actual_forward_mode = mode
    vars(view).update(_captured_spans(harness, static, spans_of(staged, bs - live)))
    vars(view).update(_captured_encoder_fields(harness, static, bs) | dict(extends))
    return cast(ForwardBatch, view)
