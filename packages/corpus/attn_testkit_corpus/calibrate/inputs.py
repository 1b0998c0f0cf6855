"""The tensors with which every snippet starts, and their changes between capture and replay."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda"


def _on_device(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)


class Inputs:
    """One set of inputs. Device tensors: lower-case names without prefix; host tensors begin with `h`, pinned ones
    with `p`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x = _on_device(torch.arange(8.0))
        self.i = _on_device(torch.tensor(3))
        self.idx = _on_device(torch.tensor([0, 2, 5, 1]))
        self.mask = _on_device(torch.tensor([0, 0, 0, 1, 0, 1, 1, 0]).bool())
        self.len = _on_device(torch.tensor([1, 3, 2, 2]))
        self.m = _on_device(torch.randn(4, 8))
        self.q = _on_device(torch.randn(2, 4, 1, 16))
        self.k = _on_device(torch.randn(2, 4, 8, 16))
        self.v = _on_device(torch.randn(2, 4, 8, 16))
        self.pair_mask = _on_device(torch.arange(16).view(2, 1, 1, 8) % 3 > 0)
        self.h_len = torch.tensor([1, 3, 2, 2])
        self.h_scalar = torch.tensor(2.0)
        self.h_x = torch.arange(8.0) * 2
        self.h_mask = torch.tensor([0, 0, 0, 1, 0, 1, 1, 0]).bool()
        self.p_x = (torch.arange(8.0) * 3).pin_memory()
        self.p_len = torch.tensor([1, 3, 2, 2], dtype=torch.int32).pin_memory()
        self.p_out = torch.zeros(8).pin_memory()
        self.buf = _on_device(torch.zeros(8))
        self.count = _on_device(torch.zeros(1))
        self.py = 3
        self.generator = torch.Generator(device=DEVICE)
        self._serving_inputs()

    def _serving_inputs(self) -> None:
        """A small paged cache (8 pages of 4 slots, a slot of 2 x 4 numbers) and one batch of four requests."""
        self.cache = _on_device(torch.randn(8, 4, 2, 4))
        self.new_rows = _on_device(torch.randn(4, 2, 4))
        self.slots = _on_device(torch.tensor([4, 9, 14, 23]))
        self.table = _on_device(torch.tensor([[1, 5, 0], [2, 6, 0], [3, 7, 0], [5, 1, 0]], dtype=torch.int32))
        self.seq = _on_device(torch.tensor([3, 7, 5, 8], dtype=torch.int32))
        self.req = _on_device(torch.tensor([2, 0, 3, 1]))
        self.indptr = _on_device(torch.zeros(5, dtype=torch.int32))
        self.workspace = _on_device(torch.zeros(64, dtype=torch.uint8))
        self.scalar = _on_device(torch.tensor(2.5))

    def refresh(self) -> None:
        """New values at the same addresses, as a server does between replays."""
        self.x.copy_(torch.arange(8.0).flip(0) * 1.5)
        self.i.copy_(torch.tensor(5))
        self.idx.copy_(torch.tensor([7, 3, 3, 0]))
        self.mask.copy_(torch.tensor([1, 0, 1, 0, 0, 0, 0, 1]).bool())
        self.len.copy_(torch.tensor([2, 1, 1, 4]))
        for tensor in (self.m, self.q, self.k, self.v, self.cache, self.new_rows):
            tensor.mul_(1.25).add_(0.1)
        self.pair_mask.copy_(torch.arange(16).view(2, 1, 1, 8) % 2 > 0)
        self.h_len.copy_(torch.tensor([4, 1, 1, 2]))
        self.h_scalar.fill_(5.0)
        self.h_x.mul_(3)
        self.h_mask.copy_(torch.tensor([1, 0, 1, 0, 0, 0, 0, 1]).bool())
        self.p_x.mul_(2)
        self.p_len.copy_(torch.tensor([4, 1, 1, 2]))
        self.py = 5
        self.slots.copy_(torch.tensor([5, 11, 13, 28]))
        self.table.copy_(torch.tensor([[7, 2, 1], [4, 3, 0], [6, 5, 2], [1, 2, 3]]))
        self.seq.copy_(torch.tensor([8, 2, 6, 1]))
        self.req.copy_(torch.tensor([1, 3, 0, 2]))
        self.scalar.fill_(-1.5)
