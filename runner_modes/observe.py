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
    if world.backend.verify_mask is None:
        named.append(("batch.spec_info.custom_mask", getattr(spec, "custom_mask", None)))
    seen: set[tuple[int, int]] = set()
    for name, tensor in named:
        if tensor is None or (tensor.data_ptr(), tensor.numel()) in seen:
            continue
        seen.add((tensor.data_ptr(), tensor.numel()))
        held[name] = (tensor, tensor.clone())
    return held


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


def _modified_activations(packed: torch.Tensor, dense: list[torch.Tensor], loaded: Loaded) -> list[str]:
    data, names = loaded.data, []
    if not _same_bits(packed, loaded.packed):
        names.append("the packed q, k, v")
    wanted = [x for layer in range(data.q.shape[0]) for x in (data.q[layer], data.k[layer], data.v[layer])]
    for i, (given, want) in enumerate(zip(dense, wanted, strict=False)):
        if not _same_bits(given, want):
            names.append(f"{'qkv'[i % 3]} of layer {i // 3}")
    return names


def _to_host(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copies of all of them, waiting for the device once."""
    copies = [None if t is None else t.to("cpu", non_blocking=True) for t in tensors]
    torch.cuda.synchronize()
    return copies


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
    tokens, slots = loaded.step.tokens, loaded.pool_after.shape[2]
    outputs = driver.outputs(trace, loaded)
    fields = [outputs.next_token_logits, outputs.hidden_states, outputs.topk_p, outputs.topk_index]
    pool = world.context.kv_pool.storage
    groups: list[list[torch.Tensor | None]] = [
        [pool if slots == pool.shape[2] else pool[:, :, :slots]],
        [out[:tokens] for out in trace.attention],
        [trace.packed[:tokens], *(dense[:tokens] for dense in trace.dense)],
        [tensor for pair in held.values() for tensor in pair],
        list(fields),
    ]
    flat = iter(_to_host([tensor for group in groups for tensor in group]))
    copies = [[next(flat) for _ in group] for group in groups]
    (after,), attention, activations, inputs, returned = copies
    given = [t for t in activations if t is not None]
    pairs = zip(held, inputs[::2], inputs[1::2], strict=True)
    changed = [n for n, now, then in pairs if now is not None and then is not None and not _same_bits(now, then)]
    assert after is not None
    return Observation(
        step=loaded.step,
        label=label,
        attention=tuple(out for out in attention if out is not None),
        outputs=Outputs(*returned),
        pool=after,
        modified=tuple(changed + _modified_activations(given[0], given[1:], loaded)),
        damaged=damaged,
        replay=replay,
        padded=padded,
    )
