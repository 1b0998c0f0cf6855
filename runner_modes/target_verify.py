"""Target-verify: N draft nodes per request, visible along their tree; ``seq_lens`` is only the prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.case import Case
from attn_testkit.cases.features.server.table import variant_of
from attn_testkit.cases.features.server.two_batch_overlap import is_cut
from attn_testkit.cases.trees import Tree, bit_packed, full_mask, qlen_only_mask
from attn_testkit.contract import ForwardMode, TreeMaskMode, VerifyInput, VerifyMask
from attn_testkit.watches.uploads import upload_into

from .batches import spec_on_device
from .decode import head_over_all_rows
from .draft_extend import captured_width
from .errors import blame
from .harness import ServerHarness, StagedStep
from .hook_answers import verify_mask_of
from .mode_runner import ModeRunner, every_token
from .static_inputs import StaticInputs
from .step_tensors import seq_lens_of
from .two_batches import CutVerifyInput


def _trees(staged: StagedStep) -> list[Tree]:
    trees = [request.tree for request in staged.step.requests]
    assert all(trees)
    return [tree for tree in trees if tree is not None]


def _verify_input(harness: ServerHarness, staged: StagedStep, mask: torch.Tensor, layout: TreeMaskMode) -> VerifyInput:
    """Make ``spec_info`` on the host, except for a mask that is on the device."""
    step, n = staged.step, staged.schedule.case.width
    links = np.array([tree.links for tree in _trees(staged)], dtype=np.int64).reshape(step.bs, 2, n)
    mirrors = harness.capabilities.needs.cpu_seq_lens
    lens = torch.tensor(seq_lens_of(harness, ForwardMode.TARGET_VERIFY, staged), dtype=torch.int64)
    make = (
        partial(CutVerifyInput, prefixes=tuple(r.prefix for r in step.requests))
        if is_cut(harness.case)
        else VerifyInput
    )
    return make(
        draft_token=torch.arange(step.tokens),
        custom_mask=mask,
        positions=staged.data.positions,
        retrieve_index=torch.arange(step.bs * n).view(step.bs, n),
        retrieve_next_token=torch.from_numpy(links[:, 0].copy()),
        retrieve_next_sibling=torch.from_numpy(links[:, 1].copy()),
        spec_steps=staged.schedule.spec_steps,
        topk=staged.schedule.case.topk,
        draft_token_num=n,
        num_tokens_per_req=n,
        tree_mask_mode=layout,
        seq_lens_cpu=lens if mirrors else None,
        seq_lens_sum=int(lens.sum()) if mirrors else None,
    )


def _without_tree(spec: VerifyInput) -> VerifyInput:
    """Remove the tree tensors, as with a draft method without trees."""
    return replace(spec, custom_mask=None, retrieve_index=None, retrieve_next_token=None, retrieve_next_sibling=None)


def _is_bare(case: Case) -> bool:
    return variant_of(case).gives_none


def _fresh(harness: ServerHarness, staged: StagedStep) -> VerifyInput:
    """Make ``spec_info`` with a mask for this step, as a server does for a backend without a buffer."""
    mask = full_mask(_trees(staged), [r.prefix for r in staged.step.requests])
    return _verify_input(harness, staged, torch.from_numpy(mask), TreeMaskMode.FULL_MASK)


def _eager_spec(harness: ServerHarness, staged: StagedStep) -> VerifyInput:
    owned = verify_mask_of(harness, harness.context.num_draft_tokens)
    if _is_bare(staged.schedule.case):
        return _without_tree(_fresh(harness, staged))
    if owned is None or not owned.fits(staged.step.bs):
        return _fresh(harness, staged)
    return _in_owned_buffer(harness, staged, owned)


_LAYOUTS: Mapping[TreeMaskMode, Callable[[list[Tree], list[int]], npt.NDArray[Any]]] = {
    TreeMaskMode.FULL_MASK: full_mask,
    TreeMaskMode.QLEN_ONLY: lambda trees, prefixes: qlen_only_mask(trees),
    TreeMaskMode.QLEN_ONLY_BITPACKING: lambda trees, prefixes: bit_packed(trees),
}
_ALL_VISIBLE = {TreeMaskMode.FULL_MASK: 1, TreeMaskMode.QLEN_ONLY: 1, TreeMaskMode.QLEN_ONLY_BITPACKING: 0xFF}
"""The byte of a stale tail, which hides nothing."""


def _in_owned_buffer(harness: ServerHarness, staged: StagedStep, owned: VerifyMask) -> VerifyInput:
    """Fill the head of the backend's buffer in place; its tail keeps the values of an earlier step."""
    with blame("verify mask"):
        room = owned.buffer.view(torch.uint8)
        if staged.step.padding == "stale":
            room.fill_(_ALL_VISIBLE[owned.mode])
        if trees := _trees(staged):
            mask = _LAYOUTS[owned.mode](trees, [r.prefix for r in staged.step.requests])
            if owned.mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
                # Items are as wide as the widest batch of the instance needs.
                mask = mask.astype(f"u{owned.buffer.dtype.itemsize}")
            # Converted to bytes: few operations are implemented for uint16 and uint32.
            data = torch.from_numpy(mask.view(np.uint8))
            upload_into(room[: len(data)], data)
    return _verify_input(harness, staged, owned.buffer, owned.mode)


def _captured_spec(harness: ServerHarness, static: StaticInputs, bs: int, width: int) -> VerifyInput:
    owned = verify_mask_of(harness, harness.context.num_draft_tokens)
    device = harness.device
    none = torch.full((bs, width), -1, dtype=torch.int64, device=device)
    spec = VerifyInput(
        draft_token=static["input_ids"][: bs * width],
        custom_mask=owned.buffer if owned else static.custom_mask,
        positions=static["positions"][: bs * width],
        retrieve_index=torch.arange(bs * width, device=device).view(bs, width),
        retrieve_next_token=none,
        retrieve_next_sibling=none,
        spec_steps=static.schedule.spec_steps,
        topk=harness.context.topk,
        draft_token_num=width,
        num_tokens_per_req=captured_width(harness, width),
        tree_mask_mode=owned.mode if owned else TreeMaskMode.FULL_MASK,
    )
    return _without_tree(spec) if _is_bare(harness.case) else spec


def _replay_spec(harness: ServerHarness, static: StaticInputs, staged: StagedStep, bs: int, width: int) -> VerifyInput:
    owned = verify_mask_of(harness, harness.context.num_draft_tokens)
    fits = owned is not None and owned.fits(bs)
    if _is_bare(staged.schedule.case):
        spec = _without_tree(_fresh(harness, staged))
    elif owned is not None and fits:
        spec = _in_owned_buffer(harness, staged, owned)
    elif staged.step.requests:
        spec = _fresh(harness, staged)
    else:
        # Without a live request no mask is made: the runner's own mask stays.
        spec = _verify_input(harness, staged, static.custom_mask, TreeMaskMode.FULL_MASK)
    return spec_on_device(spec, harness.device)


TARGET_VERIFY = ModeRunner(
    mode=ForwardMode.TARGET_VERIFY,
    eager_spec=_eager_spec,
    eager_extends=lambda harness, staged: {},
    captured_spec=_captured_spec,
    fill=lambda harness, static, staged, bs: None,
    replay_spec=_replay_spec,
    finish=head_over_all_rows,
    returned_rows=every_token,
)
