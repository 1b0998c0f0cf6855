"""The tensors that a backend keeps, put back between replays: an experiment of the diagnosis."""

from __future__ import annotations

import torch

from attn_testkit.graphs.held_tensors import tensors_held_by

from .harness import ServerHarness
from .past_modes import past_modes

__all__ = ["KeptState"]


class KeptState:
    """What the device tensors of a backend held when this was made, before anything was captured."""

    def __init__(self, harness: ServerHarness) -> None:
        self._harness = harness
        self._before = {path: (tensor, tensor.clone()) for path, tensor in self._held().items()}
        self._planned: dict[str, torch.Tensor] = {}
        self._calls = 0
        self.changed: tuple[str, ...] = ()
        """Attributes that a replay changed, in the order in which they were seen."""

    def restore(self) -> None:
        """Put back every tensor that the backend still holds. Called before the plan of a replay."""
        with past_modes():
            for path, tensor in self._held().items():
                kept, value = self._before.get(path, (None, None))
                if kept is tensor and value is not None:
                    tensor.copy_(value)

    def between(self) -> None:
        """Compare what a replay changes. Called after its plan, and after its graph."""
        self._calls += 1
        torch.cuda.synchronize()
        held = self._held()
        if self._calls % 2:
            self._planned = {path: tensor.clone() for path, tensor in held.items() if path in self._before}
            return
        new = [path for path, value in self._planned.items() if path in held and not _same(held[path], value)]
        self.changed = tuple(dict.fromkeys((*self.changed, *new)))

    def _held(self) -> dict[str, torch.Tensor]:
        return tensors_held_by(self._harness.backend, (self._harness.context,))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for equal bits; NaN are equal here."""
    if one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
