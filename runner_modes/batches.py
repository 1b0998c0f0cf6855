"""Forward batches: the eager kind, the dummy of a capture, and the view that a backend gets at a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from attn_testkit.contract import DraftExtendInput, ForwardBatch, ForwardMode, SpecInput, VerifyInput
from attn_testkit.watches.packing import Sent, bytes_of, send, sent_alone
from attn_testkit.watches.uploads import upload

from .harness import ServerHarness, StagedStep
from .static_inputs import StaticInputs
from .step_tensor import BatchField, GraphBatch, StepTensor
from .step_tensors import BATCH_FIELDS

ReplayView = SimpleNamespace
"""The batch that a backend gets at a replay: fewer attributes than a ``ForwardBatch``, whose docstring lists them."""


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
    fields = {each.name: _eager(each, harness, staged) for each in BATCH_FIELDS if each.eager and each.given(harness)}
    fields |= {"forward_mode": mode, "batch_size": staged.step.bs, "spec_info": spec_info}
    return ForwardBatch(**{**fields, **extends})


def _eager(field: BatchField, harness: ServerHarness, staged: StagedStep) -> Any:
    """Value of a field in an eager batch. Rows of a request may be columns of a wider buffer."""
    value = field.eager(harness, staged) if field.eager else None
    return field.widened(value, staged.schedule.case) if isinstance(field, StepTensor) and value is not None else value


def batch_on_device(batch: ForwardBatch, device: torch.device) -> tuple[ForwardBatch, tuple[Sent, ...]]:
    """Move an eager batch's host tensors to the device; also return the memory that a backend may not write.

    Fields that end in ``_cpu`` stay where they are. Memory is fresh for each step: a backend that keeps a tensor of an
    earlier step still reads that step's values.
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
    views = {each.name: each.view for each in BATCH_FIELDS if each.view and getattr(given, each.name) is not None}
    parts |= {name: view(getattr(given, name)) for name, view in views.items()}
    return replace(given, **parts), tuple(sent)


Spec = TypeVar("Spec", VerifyInput, DraftExtendInput)


def spec_on_device(spec: Spec, device: torch.device) -> Spec:
    """Move a ``spec_info`` to the device if its tensors exist only for the step, as in some replays."""
    moved: Spec = _moved({"": spec}, device)[0][""]
    return moved


def _moved(owners: Mapping[str, Any], device: torch.device) -> tuple[dict[str, Any], list[Sent]]:
    """Move host tensors of dataclasses, by the prefix of their fields' names, to the device."""
    host = {prefix: _host_tensors(owner) for prefix, owner in owners.items()}
    # A mask is as large as all lengths: it has its own memory, which is reused after the step.
    masks = {prefix: found.pop("custom_mask") for prefix, found in host.items() if "custom_mask" in found}
    packed = {prefix + name: _whole(tensor) for prefix, found in host.items() for name, tensor in found.items()}
    tensors, together = send(packed, device)
    sent = [replace(together, places=tuple(place for place in together.places if place.name in _WATCHED))]
    moved: dict[str, Any] = {}
    for prefix, owner in owners.items():
        fields_of_it = {name: _as_on_host(tensors[prefix + name], found) for name, found in host[prefix].items()}
        if prefix in masks:
            fields_of_it["custom_mask"] = mask = upload(masks[prefix], device)
            sent.append(sent_alone(f"{prefix}custom_mask", mask, bytes_of(masks[prefix])))
        moved[prefix] = replace(owner, **fields_of_it)
    return moved, sent


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of the buffer of which a tensor has the first columns; another tensor itself."""
    if tensor.is_contiguous():
        return tensor
    entry = tensor.shape[2:]
    steps = tuple(math.prod(entry[place:]) for place in range(len(entry) + 1))
    is_first_columns = tensor.stride()[1:] in ((), steps) and not tensor.storage_offset()
    # Of a transposed tensor the rows are not in the memory one after another.
    columns = tensor.stride(0) // steps[0]
    return tensor.as_strided((len(tensor), columns, *entry), (tensor.stride(0), *steps)) if is_first_columns else tensor


def _as_on_host(moved: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``moved``, which is ``_whole(tensor)`` on the device, that ``tensor`` is of its buffer."""
    if _whole(tensor) is tensor:
        return moved
    return moved[:, 0] if tensor.dim() == 1 else moved[:, : tensor.shape[1]]


def _host_tensors(owner: Any) -> dict[str, torch.Tensor]:
    """Fields of a dataclass that are moved to the device."""
    named = ((each.name, getattr(owner, each.name)) for each in fields(owner) if not each.name.endswith("_cpu"))
    return {name: value for name, value in named if isinstance(value, torch.Tensor) and not value.is_cuda}


_WATCHED = frozenset(path for each in BATCH_FIELDS for path in each.watched)
"""Fields of a batch that a step must not change."""


def _in_graph(batch: GraphBatch) -> dict[str, Any]:
    """Fields of a graph's batch."""
    return {each.name: each.graph(batch) for each in BATCH_FIELDS if each.graph and each.given(batch.harness)}


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
    tokens = bs * width
    fields = _in_graph(GraphBatch(harness, static, mode, bs, tokens, requests=bs, ids=tokens, stored=tokens))
    fields |= {"forward_mode": mode, "batch_size": bs, "spec_info": spec}
    return ForwardBatch(**{**fields, **extends})


def replay_view(
    harness: ServerHarness,
    staged: StagedStep,
    static: StaticInputs,
    mode: ForwardMode,
    bs: int,
    width: int,
    spec: SpecInput | None,
    extends: Mapping[str, Any],
) -> ForwardBatch:
    """The batch as production servers pass it: a namespace without some attributes, and with some buffers that are
    longer than the batch.

    ``bs``: the bucket's requests, padded ones included; ``width``: N; ``extends``: fields that the mode adds or
    replaces.
    """
    live, drafts = staged.step.tokens, mode.is_draft_extend(include_v2=True)
    fields = _in_graph(
        GraphBatch(
            harness,
            static,
            mode,
            bs,
            rows=bs * width,
            requests=None if drafts else bs,
            ids=live if drafts else bs * width,
            stored=bs * width if extends else live,
            staged=staged,
        )
    )
    fields |= {"forward_mode": mode, "batch_size": bs, "spec_info": spec}
    if drafts:
        del fields["positions"]
    else:
        fields |= {"num_padding": bs - staged.step.bs, "actual_forward_mode": mode}
    return cast(ForwardBatch, ReplayView(**{**fields, **extends}))
