"""Taking host copies of what a step left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal

import torch

from attn_testkit.checks.memory import same_pool
from attn_testkit.checks.observation import Observation, StepOutputs
from attn_testkit.contract import ForwardBatch
from attn_testkit.model import Trace

from .asked import lent_mask
from .driver import ModeDriver
from .world import Loaded, World

__all__ = ["Snapshot", "observe", "shape_complaints", "snapshot"]

Snapshot = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Name -> (the tensor itself, a copy from before the step)."""

_BATCH_TENSORS = ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "positions", "seq_lens_cpu")
_SPEC_TENSORS = ("positions", "num_accept_tokens", "num_correct_drafts", "hidden_states", "extend_seq_lens_tensor")


def snapshot(world: World, loaded: Loaded, batch: ForwardBatch) -> Snapshot:
    """Copies of everything that a backend is given and may not write."""
    held: Snapshot = {}
    spec = getattr(batch, "spec_info", None)
    named = [(f"batch.{n}", getattr(batch, n, None)) for n in _BATCH_TENSORS]
    named += [(f"batch.spec_info.{n}", getattr(spec, n, None)) for n in _SPEC_TENSORS if spec is not None]
    named.append(("req_to_token", world.context.req_to_token))
    if lent_mask(world) is None:
        named.append(("batch.spec_info.custom_mask", getattr(spec, "custom_mask", None)))
    seen: set[int] = set()
    for name, tensor in named:
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            held[name] = (tensor, tensor.clone())
    return held


def shape_complaints(world: World, trace: Trace, rows: int) -> tuple[str, ...]:
    """What is wrong with shape, dtype or device of each layer's output."""
    told = []
    for layer, out in zip(world.context.layers, trace.raw, strict=False):
        heads, dim = layer.tp_q_head_num, layer.v_head_dim
        if not isinstance(out, torch.Tensor):
            told.append(f"layer {layer.layer_id} returned {type(out).__name__}, expected a tensor")
        elif tuple(out.shape) not in ((rows, heads, dim), (rows, heads * dim)):
            told.append(
                f"layer {layer.layer_id} returned shape {tuple(out.shape)}, "
                f"expected ({rows}, {heads}, {dim}) or ({rows}, {heads * dim})"
            )
        elif out.dtype != world.context.dtype:
            told.append(f"layer {layer.layer_id} returned {out.dtype}, expected the model's {world.context.dtype}")
        elif out.device.type != world.device.type:
            told.append(f"layer {layer.layer_id} returned a tensor on {out.device}, expected {world.device}")
    return tuple(told)


def _to_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Copies of all of them in one transfer, and how to cut it apart."""
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
    world: World,
    driver: ModeDriver,
    loaded: Loaded,
    trace: Trace,
    held: Snapshot,
    *,
    label: str = "",
    replay: bool = False,
    padded: int = 0,
    damaged: tuple[str, ...] = (),
    among: Literal["", "steps", "graphs"] = "",
) -> Observation:
    """Copy everything to the host."""
    tokens, slots = loaded.step.tokens, loaded.pool_after.shape[2]
    pool = world.context.kv_pool.storage
    pool = (pool if slots == pool.shape[2] else pool[:, :, :slots]).to("cpu", non_blocking=True)
    outputs = driver.outputs(trace, loaded)
    returned = {f.name: value for f in dataclasses.fields(outputs) if (value := getattr(outputs, f.name)) is not None}
    activations = [trace.packed[:tokens], *(dense[:tokens] for dense in trace.dense)]
    attention = [out[:tokens] for out in trace.attention]
    now, before = [pair[0] for pair in held.values()], [pair[1] for pair in held.values()]
    groups = (attention, activations, before, now, list(returned.values()))
    cut = _to_host([tensor for group in groups for tensor in group])
    if same_pool(pool, loaded.pool_after, world.case.page_size):
        # A drive keeps a dozen of them until all are judged.
        pool = loaded.pool_after

    def cut_apart() -> StepOutputs:
        pieces = iter(cut())
        outs, rows, were, are, values = (tuple(islice(pieces, len(group))) for group in groups)
        lent = (*zip(held, were, are, strict=True), *_activations(loaded, rows))
        given = dataclasses.replace(outputs, **dict(zip(returned, values, strict=True)))
        return StepOutputs(outs, given, pool, loaded.pool_after, lent)

    return Observation(loaded.step, label, cut_apart, among, damaged=damaged, replay=replay, padded=padded)


def _activations(loaded: Loaded, rows: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """What the model's tables gave, against what it holds now: the packed rows, then q, k, v where they were copies."""
    data = loaded.data
    wanted = [x for layer in range(data.q.shape[0]) for x in (data.q[layer], data.k[layer], data.v[layer])]
    pairs = enumerate(zip(wanted, rows[1:], strict=False))  # rows of its own only where q, k, v were copies
    copies = [(f"{'qkv'[i % 3]} of layer {i // 3}", want, now) for i, (want, now) in pairs]
    return [("the packed q, k, v", loaded.packed, rows[0]), *copies]
