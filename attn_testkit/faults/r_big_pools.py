"""Class R: pools of states in which an element's place takes more than 31 bits."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import ForwardBatch, ForwardMode
from .catalogue import fault
from .states import StateParent


@fault(
    slug="offset-of-a-slot-in-32-bits",
    source="sglang #33665; vLLM #20938 (seg_la_fwd of SGLang 0.5.23)",
    modes=[ForwardMode.DECODE, ForwardMode.EXTEND],
    checks=("conv-window-exact", "matches-oracle", "state-matches-oracle"),
    modelled="upstream a negative offset leaves the pool; here it is taken modulo the pool",
)
class OffsetOfASlotIn32Bits(StateParent):
    """Slot times stride is a product of 32-bit integers, so that slots at the far end of the pool are others."""

    @override
    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        states = self.pools(self.states.layers[0])[1]
        stride, slots = states[0].numel(), super().slots(batch)
        return (slots * stride).to(torch.int32).long() // stride % len(states)
