"""Target-verify: N draft nodes a request, visible along their tree; ``seq_lens`` is the prefix alone."""

from __future__ import annotations

import numpy as np
import torch

from attn_testkit.cases.trees import Tree, full_mask, qlen_only_mask
from attn_testkit.contract import ForwardMode, TreeMaskMode, VerifyInput, VerifyMask

from .batches import StaticInputs
from .decode import all_live_rows, head_over_all_rows
from .driver import ModeDriver
from .world import Loaded, World

__all__ = ["TARGET_VERIFY"]


def _trees(loaded: Loaded) -> list[Tree]:
    trees = [request.tree for request in loaded.step.requests]
    assert all(trees)
    return [tree for tree in trees if tree is not None]


def _verify_input(world: World, loaded: Loaded, mask: torch.Tensor, layout: TreeMaskMode) -> VerifyInput:
    trees, step, device = _trees(loaded), loaded.step, world.device
    n = len(trees[0])
    links = [tree.links for tree in trees]
    mirrors = world.capabilities.needs_cpu_seq_lens
    prefixes = torch.tensor([r.prefix for r in step.requests], dtype=torch.int64)
    return VerifyInput(
        draft_token=torch.arange(step.tokens).to(device),
        custom_mask=mask,
        positions=loaded.data.positions.to(device),
        retrieve_index=torch.arange(step.bs * n).view(step.bs, n).to(device),
        retrieve_next_token=torch.from_numpy(np.stack([first for first, _ in links])).to(device),
        retrieve_next_sibling=torch.from_numpy(np.stack([sibling for _, sibling in links])).to(device),
        spec_steps=loaded.schedule.spec_steps,
        topk=loaded.schedule.case.topk,
        draft_token_num=n,
        num_tokens_per_req=n,
        tree_mask_mode=layout,
        seq_lens_cpu=prefixes if mirrors else None,
        seq_lens_sum=int(prefixes.sum()) if mirrors else None,
    )


def _fresh(world: World, loaded: Loaded) -> VerifyInput:
    """The mask in memory of its own, allocated for this step: what a server does for a backend without a buffer."""
    mask = full_mask(_trees(loaded), [r.prefix for r in loaded.step.requests])
    return _verify_input(world, loaded, torch.from_numpy(mask).to(world.device), TreeMaskMode.FULL_MASK)


def _eager_spec(world: World, loaded: Loaded) -> VerifyInput:
    owned = world.backend.verify_mask
    if owned is None or not owned.fits(loaded.step.bs):
        return _fresh(world, loaded)
    return _in_owned_buffer(world, loaded, owned)


def _in_owned_buffer(world: World, loaded: Loaded, owned: VerifyMask) -> VerifyInput:
    """Fill the head of the backend's buffer in place; its tail keeps what an earlier step left."""
    trees = _trees(loaded)
    if owned.mode is TreeMaskMode.FULL_MASK:
        mask = full_mask(trees, [r.prefix for r in loaded.step.requests])
    else:
        mask = qlen_only_mask(trees)
    if loaded.schedule.case.padding == "stale":
        owned.buffer.fill_(1)
    owned.buffer[: mask.size].copy_(torch.from_numpy(mask))
    return _verify_input(world, loaded, owned.buffer, owned.mode)


def _captured_spec(world: World, static: StaticInputs, bs: int, width: int) -> VerifyInput:
    owned = world.backend.verify_mask
    device = world.device
    none = torch.full((bs, width), -1, dtype=torch.int64, device=device)
    return VerifyInput(
        draft_token=static.input_ids[: bs * width],
        custom_mask=owned.buffer if owned else static.custom_mask,
        positions=static.positions[: bs * width],
        retrieve_index=torch.arange(bs * width, device=device).view(bs, width),
        retrieve_next_token=none,
        retrieve_next_sibling=none,
        spec_steps=world.context.speculative_num_steps,
        topk=world.context.topk,
        draft_token_num=width,
        # Servers have captured with the field unset, and baked a stride of -1 into a graph (sglang #31367).
        num_tokens_per_req=-1 if world.case.digest % 2 else 0,
        tree_mask_mode=owned.mode if owned else TreeMaskMode.FULL_MASK,
    )


def _replay_spec(world: World, static: StaticInputs, loaded: Loaded, bs: int, width: int) -> VerifyInput:
    owned = world.backend.verify_mask
    return _fresh(world, loaded) if owned is None or not owned.fits(bs) else _in_owned_buffer(world, loaded, owned)


TARGET_VERIFY = ModeDriver(
    mode=ForwardMode.TARGET_VERIFY,
    eager_spec=_eager_spec,
    eager_extends=lambda world, loaded: {},
    captured_spec=_captured_spec,
    fill=lambda world, static, loaded, bs: None,
    replay_spec=_replay_spec,
    finish=head_over_all_rows,
    outputs=all_live_rows,
)
