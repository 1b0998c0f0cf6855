"""Class R, chunks and slots: mistakes within a chunk of a prompt, and slots of other requests."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch

from .catalogue import fault
from .states import StateParent

_CHUNK = 64


@fault(
    "general (a state that decays once more at the end of a chunk)",
    "matches-oracle state-matches-oracle state-counts-tokens",
    modes="extend",
)
class ChunkBeginsWithAHalvedState(StateParent):
    """The state that a chunk hands to the next one decays once more."""

    def continued(self, token: int, window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window, state = super().continued(token, window, state)
        return window, state * 0.5 if token and token % _CHUNK == 0 else state


@fault(
    "general (indices of slots that are shifted by a place)",
    "matches-oracle reads-own-state writes-own-state state-matches-oracle conv-window-exact finite",
    "slots of the request before|state of the request before|slots and requests do not go together",
    modes="decode",
)
class SlotsOfTheRequestBefore(StateParent):
    """A request reads and writes the slot of the request before it in the batch, and the first one its own."""

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        own = super().slots(batch)
        return torch.cat((own[:1], own[:-1]))
