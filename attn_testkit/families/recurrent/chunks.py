"""Mistakes of kernels that compute prompts in chunks, and the results of a backend with such a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

ChunkSlip = Literal["lost", "first decay", "last decay", "no decay", "decay twice", "row before"]
"""Name of a mistake."""
CHUNKS = (256, 128, 64, 32, 16)
"""Rows of a chunk in such kernels."""
HANDED_ON: Mapping[ChunkSlip, str] = {
    "lost": "does not reach the next chunk, which begins from zeros",
    "first decay": "holds the state before the chunk with the decay of the first row only, and not of all its rows",
    "last decay": "holds the state before the chunk with the decay of the last row only, and not of all its rows",
    "no decay": "holds the state before the chunk without any decay",
    "decay twice": "holds the state before the chunk with the decay of the chunk twice",
}
"""Mistake in the state at the end of a chunk -> description of such a state."""


@dataclass(frozen=True)
class ChunkMistake:
    """A mistake in chunks of ``rows`` rows, counted from the first row of each request.

    ``row before``: the values that a row overwrites do not include the row right before it in its chunk.
    """

    rows: int
    slip: ChunkSlip


class ChunkedStates:
    """The states of prompts from chunk to chunk, for a backend that makes a mistake."""

    def __init__(self, mistake: ChunkMistake, state: torch.Tensor) -> None:
        self._mistake, self._state, self._stored = mistake, state.clone(), torch.zeros_like(state)
        self._decays: list[torch.Tensor] = []

    def begun(self, token: int, state: torch.Tensor) -> torch.Tensor:
        """[L, B, Hv, V, K]: the state that row number ``token`` of each request continues."""
        if token % self._mistake.rows:
            return state
        if token and self._mistake.slip == "lost":
            state = torch.zeros_like(state)
        elif token:
            state = self.ended(state)
        self._state, self._stored, self._decays = state.clone(), torch.zeros_like(state), []
        return state

    def ended(self, state: torch.Tensor) -> torch.Tensor:
        """[L, B, Hv, V, K]: the state that is stored at the end of a chunk, or of its request."""
        if not self._decays or self._mistake.slip in ("row before", "lost"):
            return state
        every = torch.stack(self._decays)
        factor = {
            "first decay": every[0],
            "last decay": every[-1],
            "no decay": torch.ones_like(every[0]),
            "decay twice": every.prod(0).square(),
        }[self._mistake.slip]
        return state + (factor - every.prod(0)) * self._state

    def unread(self, who: torch.Tensor) -> torch.Tensor | None:
        """[L, b, Hv, V, K]: the values that the row before stored, if a row does not read them; None if it does."""
        return self._stored[:, who] if self._mistake.slip == "row before" else None

    def note(self, who: torch.Tensor, before: torch.Tensor, after: torch.Tensor, decay: torch.Tensor) -> None:
        """Note a row: decayed state before it, state after it [L, b, Hv, V, K], decay [L, b, Hv, 1 or K]."""
        self._stored = torch.zeros_like(self._stored)
        self._stored[:, who] = after - before
        whole = torch.ones_like(self._state[..., :1, :])
        whole[:, who] = decay[..., None, :].expand(*decay.shape[:-1], 1, whole.shape[-1])
        self._decays.append(whole)
