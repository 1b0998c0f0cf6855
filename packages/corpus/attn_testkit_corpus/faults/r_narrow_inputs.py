"""Class R, narrow inputs: layers with states in bf16 whose inputs pass through fp16."""

from __future__ import annotations

import torch

from attn_testkit.contract import StateLayer

from .catalogue import fault
from .states import StateParent


@fault(
    "general (a kernel that is written for fp16, and given bf16)",
    "finite state-matches-oracle",
    "values in this case are beyond the range of fp16",
)
class ConvolutionInHalf(StateParent):
    """A convolution converts its inputs to fp16, whose largest number is 65,504, also in bf16."""

    def convolved(self, every: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        return super().convolved(every.half().to(every.dtype), layer)
