"""Variants of the FlexAttention adapter: as torch compiles it in other ways, and with what goes wrong around it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from attn_testkit.contract import ForwardBatch, KernelPlan
from attn_testkit.examples import flex
from attn_testkit.examples.flex import FlexBackend

_automatic = torch.compile(flex_attention)
_static = torch.compile(flex_attention, dynamic=False)
_tuned = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")
EAGER = FlexBackend.capabilities.with_changes(graph=frozenset())


class _Compiled(FlexBackend):
    """The adapter around another compiled function."""

    function: Any = None

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        before, flex._attend = flex._attend, type(self).function
        try:
            return super().run(q, kv, plan)
        finally:
            flex._attend = before


class Automatic(_Compiled):
    """Sizes are constants until torch has seen two of them."""

    function = staticmethod(_automatic)


class Tuned(_Compiled):
    """Inductor times its kernels where they are compiled."""

    function = staticmethod(_tuned)


class WholeCompiled(FlexBackend):
    """Gathering, mask and attention in one compiled region."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._run = torch.compile(super().run)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        return self._run(q, kv, plan)


class WholeUncompiled(FlexBackend):
    """The same region as torch traces it, run operation by operation."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._run = torch.compile(super().run, backend="aot_eager")

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        return self._run(q, kv, plan)


class EveryLength(_Compiled):
    """As many slots as the longest request has keys, in a region that is compiled for that number."""

    function = staticmethod(_static)
    capabilities = EAGER.with_changes(needs_cpu_seq_lens=True)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        assert batch.seq_lens_cpu is not None
        extra = self.context.num_draft_tokens + self.context.speculative_num_steps
        self.longest = int(batch.seq_lens_cpu.max()) + extra
        super().init_forward_metadata(batch)

    def gathered(self, cache: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().gathered(cache, plan)[:, :, : self.longest]


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
