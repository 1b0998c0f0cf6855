"""Class R, chunks and slots: mistakes within a chunk of a prompt, and slots of other requests."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch, StateLayer

from .catalogue import fault
from .states import StateParent

_CHUNK = 64


def _later_chunk(token: int, counts: torch.Tensor) -> torch.Tensor:
    """[bs, 1, 1, 1] bool: requests of ``counts`` rows whose row number ``token`` begins their second chunk or later."""
    begins = token > 0 and token % _CHUNK == 0
    return ((token < counts) & begins)[:, None, None, None]


@fault(
    "general (a state that decays once more at the end of a chunk)",
    "matches-oracle state-matches-oracle state-counts-tokens",
    "from row 64 on, the first row of its second chunk",
    modes="extend",
)
class ChunkBeginsWithAHalvedState(StateParent):
    """The state that a chunk passes to the next chunk decays once more."""

    def continued(self, token: int, window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window, state = super().continued(token, window, state)
        return window, torch.where(_later_chunk(token, self.counts), state * 0.5, state)


@fault(
    "general (a strict lower triangle that is off by one)",
    "matches-oracle state-matches-oracle state-counts-tokens",
    "the strict mask of a chunk is off by one",
    modes="extend",
)
class RowBeforeLeftOutOfAChunk(StateParent):
    """The update of a row in a chunk ignores the row right before it: the triangle begins at -2 instead of -1."""

    capabilities = StateParent.capabilities.with_changes(heads={"families": {"gdn"}})
    stored: torch.Tensor
    """[bs, Hv, V, K]: what the row before stored."""
    inside: bool
    """True for a row that is not the first of its chunk."""

    def token(
        self, rows: torch.Tensor, state: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (layer.k_heads, layer.k_dim), (layer.v_heads, layer.v_dim)
        q, k = (
            self.for_value_heads(part.reshape(-1, *keys), layer)
            for part in rows[:, : -values[0] * values[1]].chunk(2, -1)
        )
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        v, (decay, beta) = rows[:, -values[0] * values[1] :].reshape(-1, *values), gates
        state = state * decay[..., None]
        unread = self.stored * decay[..., None] if self.inside else torch.zeros_like(state)
        stored = beta * (v - torch.einsum("bhvk,bhk->bhv", state - unread, k))
        self.stored = stored[..., None] * k[:, :, None]
        after = state + self.stored
        return after, torch.einsum("bhvk,bhk->bhv", after, q * layer.scaling)

    def continued(self, token: int, window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.inside = token % _CHUNK > 0
        return super().continued(token, window, state)


@fault(
    "general (indices of slots that are shifted by a place)",
    "matches-oracle reads-own-state writes-own-state state-matches-oracle conv-window-exact finite",
    "slots of the request before|state of the request before|slots are paired with the wrong requests",
    modes="decode",
)
class SlotsOfTheRequestBefore(StateParent):
    """A request reads and writes the slot of the request before it in the batch, and the first one its own."""

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        own = super().slots(batch)
        return torch.cat((own[:1], own[:-1]))
