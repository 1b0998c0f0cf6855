"""Class R: tokens of long prompts, whose effect is not in the state afterwards."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import ForwardMode
from .catalogue import fault
from .states import StateParent


@fault(
    slug="token-lost-behind-many-chunks",
    source="general",
    modes=[ForwardMode.EXTEND],
    checks=("state-counts-tokens", "matches-oracle"),
    hint="was not applied",
)
class TokenLostBehindManyChunks(StateParent):
    """A chunk's first token is lost once there are 512 before it: a decay below 1 hides it from the state."""

    @override
    def kept_state(self, before: torch.Tensor, after: torch.Tensor, token: int) -> torch.Tensor:
        return before if token == 512 else after
