"""Taking host copies of what a step left behind."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from attn_testkit.checks.observation import Group, Observation, copies_of
from attn_testkit.contract import ForwardBatch
from attn_testkit.model import Trace

from .harness import LoadedStep, ServerHarness
from .hook_answers import verify_mask_of
from .mode_driver import ModeDriver
from .uploads import upload

__all__ = ["Snapshot", "observe", "snapshot"]

Snapshot = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Name -> (the tensor itself, a copy from before the step)."""

_BATCH_TENSORS = ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "positions", "seq_lens_cpu")
_EXTEND_TENSORS = ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc")
_SPEC_TENSORS = ("positions", "num_accept_tokens", "num_correct_drafts", "hidden_states", "extend_seq_lens_tensor")
_DRAFT_TENSORS = ("out_cache_loc",)


def snapshot(harness: ServerHarness, loaded: LoadedStep, batch: ForwardBatch) -> Snapshot:
    """Copies of everything that a backend is given and may not write."""
    held: Snapshot = {}
    spec = getattr(batch, "spec_info", None)
    named = [(f"batch.{n}", getattr(batch, n, None)) for n in (*_BATCH_TENSORS, *_EXTEND_TENSORS)]
    named += [
        (f"batch.spec_info.{n}", getattr(spec, n, None)) for n in (*_SPEC_TENSORS, *_DRAFT_TENSORS) if spec is not None
    ]
    named.append(("req_to_token", harness.context.req_to_token))
    if verify_mask_of(harness) is None:
        named.append(("batch.spec_info.custom_mask", getattr(spec, "custom_mask", None)))
    seen: set[int] = set()
    for name, tensor in named:
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            held[name] = (tensor, tensor.clone())
    return held


def observe(
    harness: ServerHarness,
    driver: ModeDriver,
    loaded: LoadedStep,
    trace: Trace,
    held: Snapshot,
    *,
    label: str = "",
    replay: bool = False,
    padded: int = 0,
    damaged: tuple[str, ...] = (),
    among: Literal["", "steps", "graphs"] = "",
) -> Observation:
    """Copy everything to the host and hand it on."""
    live, outputs = _on(harness, driver.live_rows(loaded, loaded.step.bs + padded)), driver.outputs(trace, loaded)
    found: list[tuple[Group, str, torch.Tensor]] = []
    found += [("attention", str(layer), out[live]) for layer, out in enumerate(trace.attention)]
    found.append(("activations", "packed 0", trace.packed[live]))
    # q, k and v of each layer, where they were copies of the packed rows.
    found += [("activations", f"{'qkv'[i % 3]} {i // 3}", dense[live]) for i, dense in enumerate(trace.dense)]
    for name, (now, before) in held.items():
        found += [("before", name, before), ("now", name, now)]
    for each in dataclasses.fields(outputs):
        value = getattr(outputs, each.name)
        if value is not None:
            found.append(("outputs", each.name, value))
    if harness.copies_pool:
        slots, rows = harness.written(loaded)
        found += [("pool", "slots", slots), ("pool", "rows", rows)]
    copies = copies_of(found)
    observed = Observation(
        loaded.schedule, loaded.step, label, copies, among, damaged=damaged, replay=replay, padded=padded
    )
    return harness.deliver(observed)


def _on(harness: ServerHarness, rows: torch.Tensor | slice) -> torch.Tensor | slice:
    return rows if isinstance(rows, slice) else upload(rows, harness.device)
