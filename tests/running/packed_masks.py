"""Backends that give the draft stage a bit-packed mask buffer."""

from __future__ import annotations

import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import BackendContext, TreeMaskMode, VerifyInput, VerifyMask

_ITEMS = {1: (torch.uint8, torch.uint8), 2: (torch.uint16, torch.int16), 4: (torch.uint32, torch.int32)}
"""Bytes of an item -> its dtype, and one that torch can shift."""


class Packed(TorchNativeBackend):
    """One buffer from the start, for eager steps and graphs alike."""

    capabilities = TorchNativeBackend.capabilities.with_changes(eager={"target-verify"}, graph={"target-verify"})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        n = context.num_draft_tokens
        self.owned_dtype, self.read_dtype = _ITEMS[1 if n <= 8 else 2 if n <= 16 else 4]
        # Full of ones: whatever is not filled hides nothing.
        ones = torch.full((context.max_bs * n,), -1, dtype=self.read_dtype if n > 8 else torch.int8)
        buffer = ones.to(context.device).view(self.owned_dtype)
        self.mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY_BITPACKING, context.max_bs)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: the constructor made it."""

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self.mask

    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        assert spec.tree_mask_mode is TreeMaskMode.QLEN_ONLY_BITPACKING
        assert spec.custom_mask is self.mask.buffer
        bs, n = len(prefix), len(offset)
        items = spec.custom_mask[: bs * n].view(self.read_dtype).view(bs, n, 1)
        return (items >> self.bit(node)[:, None]) & 1 == 1

    def bit(self, node: torch.Tensor) -> torch.Tensor:
        return node


class FirstNodeInTheHighestBit(Packed):
    def bit(self, node: torch.Tensor) -> torch.Tensor:
        return 8 * self.owned_dtype.itemsize - 1 - node


class RowsOfAnotherWidth(Packed):
    """Takes every item for a byte."""

    def _tree(self, spec: VerifyInput, prefix: torch.Tensor, offset: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        bs, n = len(prefix), len(offset)
        assert spec.custom_mask is not None
        items = spec.custom_mask.view(torch.uint8)[: bs * n].view(bs, n, 1)
        return (items >> node[:, None]) & 1 == 1
