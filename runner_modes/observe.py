"""Taking host copies of what a step left behind, and noticing inputs that changed."""

from __future__ import annotations

import torch

from attn_testkit.checks.observation import Observation, Outputs
from attn_testkit.contract import ForwardBatch
from attn_testkit.model import Trace

from .driver import ModeDriver
from .world import Loaded, World

__all__ = ["Snapshot", "observe", "shape_complaints", "snapshot"]

Snapshot = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Name -> (the tensor itself, a host copy from before the step)."""

_BATCH_TENSORS = ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "positions", "seq_lens_cpu")
_SPEC_TENSORS = ("positions", "num_accept_tokens", "num_correct_drafts", "hidden_states", "extend_seq_lens_tensor")


def snapshot(world: World, loaded: Loaded, batch: ForwardBatch) -> Snapshot:
    """Copies of everything that a backend is given and may not write."""
    held: Snapshot = {}
    spec = getattr(batch, "spec_info", None)
    named = [(f"batch.{n}", getattr(batch, n, None)) for n in _BATCH_TENSORS]
    named += [(f"batch.spec_info.{n}", getattr(spec, n, None)) for n in _SPEC_TENSORS if spec is not None]
    named.append(("req_to_token", world.context.req_to_token))
    if world.backend.verify_mask is None:
        named.append(("batch.spec_info.custom_mask", getattr(spec, "custom_mask", None)))
    seen: set[tuple[int, int]] = set()
    for name, tensor in named:
        if tensor is None or (tensor.data_ptr(), tensor.numel()) in seen:
            continue
        seen.add((tensor.data_ptr(), tensor.numel()))
        held[name] = (tensor, tensor.cpu().clone())
    return held


def _changed(held: Snapshot) -> list[str]:
    return [name for name, (tensor, before) in held.items() if not _same_bits(tensor.cpu(), before)]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


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


def _modified_activations(trace: Trace, loaded: Loaded) -> list[str]:
    tokens, data = loaded.step.tokens, loaded.data
    names = []
    if not _same_bits(trace.packed[:tokens].cpu(), loaded.packed):
        names.append("the packed q, k, v")
    wanted = [x for layer in range(data.q.shape[0]) for x in (data.q[layer], data.k[layer], data.v[layer])]
    for i, (dense, want) in enumerate(zip(trace.dense, wanted, strict=False)):
        if not _same_bits(dense[:tokens].cpu(), want):
            names.append(f"{'qkv'[i % 3]} of layer {i // 3}")
    return names


def _host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu().clone()


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
) -> Observation:
    """Copy everything to the host."""
    tokens = loaded.step.tokens
    outputs = driver.outputs(trace, loaded)
    return Observation(
        step=loaded.step,
        label=label,
        attention=tuple(out[:tokens].cpu().clone() for out in trace.attention),
        outputs=Outputs(
            _host(outputs.next_token_logits),
            _host(outputs.hidden_states),
            _host(outputs.topk_p),
            _host(outputs.topk_index),
        ),
        pool=world.context.kv_pool.storage.cpu()[:, :, : loaded.pool_after.shape[2]].clone(),
        modified=tuple(_changed(held) + _modified_activations(trace, loaded)),
        damaged=damaged,
        replay=replay,
        padded=padded,
    )
