"""A backend that loses the device in some batches, for a GPU: right otherwise."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from attn_testkit.backends.torch_native import TorchNativeBackend


@triton.jit
def store_far_away(place):
    tl.store(place + (1 << 44), 1.0)


class WritesFarAway(TorchNativeBackend):
    """An illegal memory access after every forward of a batch of three."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        out = super().forward(*args, **more)
        if args[4].batch_size == 3:
            store_far_away[(1,)](torch.zeros(1, device=out.device))
        return out
