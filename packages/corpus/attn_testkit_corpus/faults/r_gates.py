"""Class R, gates: products of decays within a chunk that leave out the decays of rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import StateLayer

from .catalogue import fault
from .states import StateParent

_CHUNK = 64


class ChunksParent(StateParent):
    """A right backend that keeps what a chunk hands on to the next one apart from what its rows compute."""

    decays: list[torch.Tensor]
    """Decay of each row of the chunk so far, [bs, Hv, 1]."""
    begun_from: torch.Tensor
    """[bs, Hv, V, K]: state before the chunk."""

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay, beta = super().gates(a, b, layer)
        self.decays.append(decay)
        return decay, beta

    def continued(self, token: int, window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window, state = super().continued(token, window, state)
        if token % _CHUNK == 0:
            if token:
                moved = (self.handed_on() - torch.stack(self.decays).prod(0))[..., None] * self.begun_from
                state = torch.where((token < self.counts)[:, None, None, None], state + moved, state)
            self.decays, self.begun_from = [], state
        return window, state

    def handed_on(self) -> torch.Tensor:
        """[bs, Hv, 1]: decay with which the state before a whole chunk reaches the next chunk."""
        return torch.stack(self.decays).prod(0)


@fault(
    "general (a chunk whose end decays by the gate of its first row)",
    "matches-oracle state-matches-oracle state-counts-tokens",
    "with the decay of the first row only",
    modes="extend",
)
class ChunkDecaysByItsFirstGate(ChunksParent):
    """The state before a chunk reaches the next chunk with the decay of its first row only, not of all its rows."""

    def handed_on(self) -> torch.Tensor:
        return self.decays[0]


class RoundedProductsParent(ChunksParent):
    """A right backend that declares what chunked kernels do: they round factors of products to the model's dtype. The
    limits of data with a decay of 0.998 then hide a single gate.
    """

    capabilities = StateParent.capabilities.with_changes(state=replace(StateParent.declared_state(), products="model"))


@fault(
    "general (a chunk whose last gate is that of the row before its last row)",
    "state-counts-tokens matches-oracle state-matches-oracle",
    "with the decay of the first row only",
    modes="extend",
)
class LastGateOfAChunkLeftOut(RoundedProductsParent):
    """The state before a whole chunk reaches the next chunk without the decay of the last row of the chunk."""

    def handed_on(self) -> torch.Tensor:
        return torch.stack(self.decays[:-1]).prod(0)


@fault(
    "general (an exclusive sum of gates where an inclusive one is meant)",
    "state-counts-tokens matches-oracle state-matches-oracle",
    "whose decay differs from those next to it",
    modes="extend",
)
class FirstGateOfAChunkLeftOut(RoundedProductsParent):
    """The state before a whole chunk reaches the next chunk without the decay of the first row of the chunk."""

    def handed_on(self) -> torch.Tensor:
        return torch.stack(self.decays[1:]).prod(0)
