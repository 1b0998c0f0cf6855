"""Variants of the FlexAttention adapter: compiled as a whole, and with what goes wrong around compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from attn_testkit.contract import ForwardBatch, KernelPlan
from attn_testkit.examples.flex import FlexBackend

EAGER = FlexBackend.capabilities.with_changes(graph=frozenset())


class WholeCompiled(FlexBackend):
    """Gathering, mask and attention in one compiled region."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._run = torch.compile(super().run)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        return self._run(q, kv, plan)


class SyncInPlan(FlexBackend):
    """A length is read back from the device before compiled code runs."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.longest = int(batch.seq_lens.max().item()) if batch.batch_size else 0
        super().init_forward_metadata(batch)


@torch.compile
def _longest(lens: torch.Tensor) -> torch.Tensor:
    return lens * int(lens.max().item() > 0)


class SyncInCompiled(FlexBackend):
    """The same inside of compiled code, where it breaks the graph."""

    capabilities = EAGER

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        _longest(plan.kv_lens)
        return super().run(q, kv, plan)


class WrongMask(FlexBackend):
    """A row does not see its own key."""

    def block_mask(self, plan: KernelPlan, slots: int) -> BlockMask:
        right = super().block_mask(plan, slots)
        prefix = plan.kv_lens - plan.cu_seqlens_q.diff()

        def visible(request: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return right.mask_mod(request, head, row, key) & ((key < prefix[request] + row) | (key == 0))

        return BlockMask.from_kv_blocks(
            right.kv_num_blocks, right.kv_indices, BLOCK_SIZE=128, mask_mod=visible,
            seq_lengths=right.seq_lengths, compute_q_blocks=False,
        )  # fmt: skip
