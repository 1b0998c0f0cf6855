"""Class R: addresses of states that are computed with too few bits, in large pools and across a multiple of 4 GiB."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch

from .catalogue import fault
from .pool_addresses import without_carry
from .states import StateParent


@fault(
    "sglang #33665; vLLM #20938 (seg_la_fwd of SGLang 0.5.23)",
    "conv-window-exact matches-oracle state-matches-oracle",
    modes="decode extend",
    slug="offset-of-a-slot-in-32-bits",
    modelled="upstream a negative offset leaves the pool; here it is taken modulo the pool",
)
class OffsetOfASlotIn32Bits(StateParent):
    """Slot times stride is a product of 32-bit integers, so slots at the far end of the pool wrap to others."""

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        states = self.pools(self.states.layers[0])[1]
        stride, slots = states[0].numel(), super().slots(batch)
        return (slots * stride).to(torch.int32).long() // stride % len(states)


@fault(
    "general; aiter #3824 (of a KV pool)",
    "reads-own-state state-matches-oracle matches-oracle finite",
    modes="decode extend",
    modelled="upstream it reads 4 GiB lower; here that is taken modulo the pool",
)
class StateAddressWithoutCarry(StateParent):
    """The offset of a slot is added to the lower word of the address of a layer's states, and the carry is lost."""

    def loaded(self, pool: torch.Tensor, index: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
        return super().loaded(pool, without_carry(pool, index), begun)
