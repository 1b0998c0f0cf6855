"""Class R: tokens of long prompts whose effect is lost from the state."""

from __future__ import annotations

import torch

from .catalogue import fault
from .states import StateParent


@fault("general", "state-counts-tokens matches-oracle", "was not applied", modes="extend")
class TokenLostBehindManyChunks(StateParent):
    """A chunk's first token is lost once there are 128 before it: a decay below 1 hides it from the state."""

    def kept_state(self, before: torch.Tensor, after: torch.Tensor, token: int) -> torch.Tensor:
        return before if token == 128 else after


@fault(
    "syv-ai/qwen38-27b-rtx3090 #43",
    "matches-oracle state-matches-oracle state-counts-tokens",
    modes="extend",
    modelled="upstream the block is not initialized; here it holds zeros",
)
class ChunkBeginsFromAnEmptyBlock(StateParent):
    """A chunk that begins in a new block of the cache reads the state from it, not from the block before."""

    def kept_state(self, before: torch.Tensor, after: torch.Tensor, token: int) -> torch.Tensor:
        return torch.zeros_like(after) if token == 63 else after
