"""What one step of a backend left behind, on the host, and what it should have."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..cases.schedule import Step

__all__ = ["Observation", "Outputs"]


@dataclass(frozen=True)
class Outputs:
    """What the mode returns to its caller, live rows only. A field that the mode does not have is None."""

    next_token_logits: torch.Tensor | None
    hidden_states: torch.Tensor | None
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None


@dataclass(frozen=True)
class Observation:
    """Host copies taken right after a step."""

    step: Step
    label: str
    """Empty for a lone eager step, else ``replay 4 of 7 (long beside short), bucket 4, 3 live``."""
    attention: tuple[torch.Tensor, ...]
    """Output of every layer for the live rows, as the backend returned it."""
    outputs: Outputs
    pool: torch.Tensor
    """The KV pool after the step."""
    shapes: tuple[str, ...] = ()
    """Complaints about shape, dtype or device of what the backend returned, one a layer at most."""
    modified: tuple[str, ...] = ()
    """Names of inputs that no longer hold what they held before the step."""
    damaged: tuple[str, ...] = ()
    """Blocks that were freed after capture and that the replay wrote into."""
    replay: bool = False
    padded: int = 0
    """Padded requests."""
    eager_twin: Observation | None = field(default=None, repr=False)
    """The backend's own eager run of the same step, where there was one."""
