"""What one step of a backend left behind, on the host, and what it should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from ..cases.schedule import Step

__all__ = ["Left", "Observation", "Outputs"]


@dataclass(frozen=True)
class Outputs:
    """What the mode returns to its caller, live rows only. A field that the mode does not have is None."""

    next_token_logits: torch.Tensor | None
    hidden_states: torch.Tensor | None
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None


@dataclass(frozen=True)
class Left:
    """Tensors on the host, as a step left them."""

    attention: tuple[torch.Tensor, ...]
    """Output of every layer for the live rows, as the backend returned it."""
    outputs: Outputs
    pool: torch.Tensor
    """The KV pool after the step."""
    pool_after: torch.Tensor
    """What it should hold."""
    lent: tuple[tuple[str, torch.Tensor, torch.Tensor], ...] = ()
    """(name, what it held before, what it holds now) of everything that the backend was given to read."""


@dataclass(frozen=True)
class Observation:
    """Host copies taken right after a step."""

    step: Step
    label: str
    """Empty for a lone eager step, else ``replay 4 of 7 (long beside short), bucket 4, 3 live``."""
    left: Callable[[], Left] = field(repr=False)
    """Cuts the copies apart. Asked once, when somebody looks: in a drive every operation on a tensor has its price."""
    among: Literal["", "steps", "graphs"] = ""
    """What else ran on the instance before an eager run: nothing, other eager steps, or graphs."""
    damaged: tuple[str, ...] = ()
    """Blocks that were freed after capture and that the replay wrote into."""
    replay: bool = False
    padded: int = 0
    """Padded requests."""
    eager_twin: Observation | None = field(default=None, repr=False)
    """The backend's own eager run of the same step, where there was one."""

    @cached_property
    def _left(self) -> Left:
        return self.left()

    @property
    def attention(self) -> tuple[torch.Tensor, ...]:
        """Output of every layer for the live rows, as the backend returned it."""
        return self._left.attention

    @property
    def outputs(self) -> Outputs:
        """What the mode returns to its caller."""
        return self._left.outputs

    @property
    def pool(self) -> torch.Tensor:
        """The KV pool after the step."""
        return self._left.pool

    @property
    def pool_after(self) -> torch.Tensor:
        """What the KV pool should hold after the step. The same tensor as ``pool`` where that is right."""
        return self._left.pool_after

    @cached_property
    def modified(self) -> tuple[str, ...]:
        """Names of inputs that no longer hold what they held before the step."""
        return tuple(name for name, before, now in self._left.lent if not _same_bits(before, now))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
