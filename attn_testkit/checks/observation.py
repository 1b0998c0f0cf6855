"""What one step of a backend left behind, on the host, and what it should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from ..cases.schedule import Step

__all__ = ["Observation", "Outputs", "StepOutputs"]


@dataclass(frozen=True)
class Outputs:
    """What the mode returns to its caller, live rows only. A field that the mode does not have is None."""

    next_token_logits: torch.Tensor | None
    """[R, vocab] float32; R output rows: T, or one a request in draft-extend v1."""
    hidden_states: torch.Tensor | None
    """[R, hidden] float32."""
    topk_p: torch.Tensor | None = None
    """[B, k] float32; draft-extend v1 alone."""
    topk_index: torch.Tensor | None = None
    """[B, k] int64."""


@dataclass(frozen=True)
class StepOutputs:
    """Host tensors, as a step left them. L layers, T live rows."""

    attention: tuple[torch.Tensor, ...]
    """L tensors [T, Hq, Dv] or [T, Hq * Dv] in the model's dtype: the live rows, as the backend returned them."""
    outputs: Outputs
    pool: torch.Tensor
    """[L, 2 or 1, slots, Hk, Dqk] in the pool's dtype: the KV pool after the step."""
    pool_after: torch.Tensor
    """What it should hold. The same tensor as ``pool`` where that is right."""
    inputs: tuple[tuple[str, torch.Tensor, torch.Tensor], ...] = ()
    """(name, what it held before, what it holds now) of everything that the backend may read and not write."""


@dataclass(frozen=True)
class Observation:
    """Host copies taken right after a step."""

    step: Step
    label: str
    """Empty for a lone eager step, else ``replay 4 of 7 (long beside short), bucket 4, 3 live``."""
    cut: Callable[[], StepOutputs] = field(repr=False)
    """Cuts the copies apart. Asked once, when somebody looks: in a drive every operation on a tensor has its price."""
    among: Literal["", "steps", "graphs"] = ""
    """What else ran on the instance before an eager run: nothing, other eager steps, or graphs."""
    damaged: tuple[str, ...] = ()
    """Blocks that were freed after capture and that the replay wrote into."""
    replay: bool = False
    padded: int = 0
    """Padded requests."""
    eager_run: Observation | None = field(default=None, repr=False)
    """The backend's own eager run of the same step, where there was one."""

    @cached_property
    def _step(self) -> StepOutputs:
        return self.cut()

    @property
    def attention(self) -> tuple[torch.Tensor, ...]:
        """L tensors [T, Hq, Dv] or [T, Hq * Dv] in the model's dtype: the live rows, as the backend returned them."""
        return self._step.attention

    @property
    def outputs(self) -> Outputs:
        """What the mode returns to its caller, live rows only."""
        return self._step.outputs

    @property
    def pool(self) -> torch.Tensor:
        """[L, 2 or 1, slots, Hk, Dqk] in the pool's dtype: the KV pool after the step."""
        return self._step.pool

    @property
    def pool_after(self) -> torch.Tensor:
        """What the KV pool should hold after the step. The same tensor as ``pool`` where that is right."""
        return self._step.pool_after

    @cached_property
    def modified(self) -> tuple[str, ...]:
        """Names of inputs that no longer hold what they held before the step."""
        return tuple(name for name, before, now in self._step.inputs if not _same_bits(before, now))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
