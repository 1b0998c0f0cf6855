"""Class S, blocks: the meaning of a block index, the end of the last block, and the meaning of -1."""

from __future__ import annotations

import torch

from attn_testkit.contract import KernelPlan

from .catalogue import fault
from .sparse import SparseBlocks


@fault(
    "general; fla-org/native-sparse-attention (block_indices times block_size)",
    "reads-own-kv matches-oracle finite",
    "numbers of blocks are multiplied by another number",
)
class BlockTakenForItsFirstKey(SparseBlocks):
    """The number of a block is used as the position of its first key."""

    def keys_of(self, selected: torch.Tensor) -> torch.Tensor:
        return selected[..., None].long() + torch.arange(self.block, device=selected.device)


@fault(
    "flashinfer #5090; VSA (FastVideo #925)",
    "reads-own-kv matches-oracle finite",
    modelled="upstream the tail is zeros or padding; here it is what the request table holds",
)
class OwnBlockNotCutOff(SparseBlocks):
    """All keys of the row's own block are attended to, including those after the row."""

    def clipped(self, there: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return there


@fault(
    "general; lucidrains/native-sparse-attention-pytorch #18 (an index out of range)",
    "matches-oracle reads-own-kv finite",
    "loaded as block 0",
)
class BlockZeroForMinusOne(SparseBlocks):
    """An index of -1 is clamped to block 0, which is attended to once more for each."""

    def is_block(self, selected: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(selected, dtype=torch.bool)

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().prepared(selected.clamp(min=0), plan)


@fault(
    "general; MoBA #26 (which part of a row's own block it attends)",
    "matches-oracle finite",
    modelled="upstream more is attended; here less",
)
class OwnBlockLeftOut(SparseBlocks):
    """Blocks count as visible if they end before the row, as those of finished pages do."""

    def clipped(self, there: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return there & (keys[..., -1:] < seen[:, None, None])


@fault(
    "general; kernels whose block size is a constant",
    "matches-oracle reads-own-kv finite",
    "numbers of blocks are multiplied by another number",
)
class BlocksOfAnotherSize(SparseBlocks):
    """The kernel's blocks are half as large as the selected ones."""

    def keys_of(self, selected: torch.Tensor) -> torch.Tensor:
        half = self.block // 2
        inside = torch.arange(half, device=selected.device)
        return selected[..., None].long() * half + inside
