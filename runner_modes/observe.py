"""Taking host copies of what a step left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal

import torch

from attn_testkit.checks.memory import same_pool
from attn_testkit.checks.observation import Left, Observation, Outputs
from attn_testkit.contract import ForwardBatch
from attn_testkit.model import Trace

from .harness import LoadedStep, ServerHarness
from .hook_answers import verify_mask_of
from .mode_driver import ModeDriver

__all__ = ["Snapshot", "observe", "snapshot"]

Snapshot = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Name -> (the tensor itself, a copy from before the step)."""

_BATCH_TENSORS = ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "positions", "seq_lens_cpu")
_SPEC_TENSORS = ("positions", "num_accept_tokens", "num_correct_drafts", "hidden_states", "extend_seq_lens_tensor")


def snapshot(harness: ServerHarness, loaded: LoadedStep, batch: ForwardBatch) -> Snapshot:
    """Copies of everything that a backend is given and may not write, on the devices of the originals.

    A mask buffer of the backend's own is left out. Raises ``DriveError`` when ``verify_mask`` does.
    """
    inputs: Snapshot = {}
    spec = getattr(batch, "spec_info", None)
    named = [(f"batch.{n}", getattr(batch, n, None)) for n in _BATCH_TENSORS]
    named += [(f"batch.spec_info.{n}", getattr(spec, n, None)) for n in _SPEC_TENSORS if spec is not None]
    named.append(("req_to_token", harness.context.req_to_token))
    if verify_mask_of(harness) is None:
        named.append(("batch.spec_info.custom_mask", getattr(spec, "custom_mask", None)))
    seen: set[int] = set()
    for name, tensor in named:
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            inputs[name] = (tensor, tensor.clone())
    return inputs


def _to_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Copy all of them in one transfer. Returns what cuts it apart: host tensors of the same shapes and dtypes."""
    pieces = {i: tensor.clone() for i, tensor in enumerate(tensors) if tensor.device.type == "cpu"}
    # Wide elements first, so that each piece stands at a multiple of its element's size.
    order = sorted(set(range(len(tensors))) - set(pieces), key=lambda i: -tensors[i].dtype.itemsize)
    layout = [(i, tensors[i].dtype, tensors[i].shape) for i in order]
    flat = torch.cat([tensors[i].reshape(-1).view(torch.uint8) for i in order]).cpu()

    def cut() -> list[torch.Tensor]:
        start = 0
        for i, dtype, shape in layout:
            end = start + shape.numel() * dtype.itemsize
            pieces[i] = flat[start:end].view(dtype).view(shape)
            start = end
        return [pieces[i] for i in range(len(pieces))]

    return cut


def observe(
    harness: ServerHarness,
    driver: ModeDriver,
    loaded: LoadedStep,
    trace: Trace,
    inputs: Snapshot,
    *,
    label: str = "",
    replay: bool = False,
    padded: int = 0,
    damaged: tuple[str, ...] = (),
    among: Literal["", "steps", "graphs"] = "",
) -> Observation:
    """Copy what a step left behind to the host. The observation keeps no device tensor alive.

    ``inputs``: from before the step. ``padded``: padded requests. ``damaged``: what canaries say. ``label`` and
    ``among``: as in ``Observation``. Raises what a pending error of the device raises.
    """
    tokens, slots = loaded.step.tokens, loaded.pool_after.shape[2]
    pool = harness.context.kv_pool.storage
    pool = (pool if slots == pool.shape[2] else pool[:, :, :slots]).to("cpu", non_blocking=True)
    outputs = driver.outputs(trace, loaded)
    fields = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    returned = [name for name, value in fields.items() if value is not None]
    activations = [trace.packed[:tokens], *(dense[:tokens] for dense in trace.dense)]
    attention = [out[:tokens] for out in trace.attention]
    now, before = [pair[0] for pair in inputs.values()], [pair[1] for pair in inputs.values()]
    groups = (attention, activations, before, now, [fields[name] for name in returned])
    cut = _to_host([tensor for group in groups for tensor in group])
    names, sizes, absent = list(inputs), [len(group) for group in groups], dict.fromkeys(fields)
    if same_pool(pool, loaded.pool_after, harness.case.page_size):
        # A drive keeps a dozen of them until all are judged.
        pool = loaded.pool_after

    def left() -> Left:
        pieces = iter(cut())
        outs, rows, were, are, values = (tuple(islice(pieces, size)) for size in sizes)
        owned_by_kit = (*zip(names, were, are, strict=True), *_activations(loaded, rows))
        given = Outputs(**absent | dict(zip(returned, values, strict=True)))
        return Left(outs, given, pool, loaded.pool_after, owned_by_kit)

    return Observation(loaded.step, label, left, among, damaged=damaged, replay=replay, padded=padded)


def _activations(loaded: LoadedStep, rows: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """What the model's tables gave, against what it holds now: the packed rows, then q, k, v where they were copies."""
    data = loaded.data
    wanted = [x for layer in range(data.q.shape[0]) for x in (data.q[layer], data.k[layer], data.v[layer])]
    pairs = enumerate(zip(wanted, rows[1:], strict=False))  # rows of its own only where q, k, v were copies
    copies = [(f"{'qkv'[i % 3]} of layer {i // 3}", want, now) for i, (want, now) in pairs]
    return [("the packed q, k, v", loaded.packed, rows[0]), *copies]
