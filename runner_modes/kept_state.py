"""The tensors that a backend keeps, restored between replays: an experiment of the diagnosis."""

from __future__ import annotations

import torch

from attn_testkit.graphs.held_tensors import tensors_held_by
from attn_testkit.watches.past_modes import past_modes

from .harness import ServerHarness


class KeptState:
    """Contents of a backend's device tensors before anything was captured.

    Tensors that appear later, as at the first forward, are assumed to begin as zeros.
    """

    def __init__(self, harness: ServerHarness, only: str = "") -> None:
        """``only``: path of the only tensor to restore; empty for all."""
        self._harness, self._only = harness, only
        self._before = {path: (tensor, tensor.clone()) for path, tensor in self._held().items()}
        self._planned: dict[str, torch.Tensor] = {}
        self._calls = 0
        self.changed: tuple[str, ...] = ()
        """Attributes that a replay changed, in the order in which they were seen."""

    def restore(self) -> None:
        """Restore every tensor that the backend holds. Called before the plan of a replay."""
        with past_modes():
            for path, tensor in self._held().items():
                if self._only and path != self._only:
                    continue
                kept, value = self._before.get(path, (None, None))
                if value is None:
                    tensor.zero_()
                elif kept is tensor:
                    tensor.copy_(value)

    def between(self) -> None:
        """Note the tensors that a replay changes. Called after its plan, and after its graph."""
        self._calls += 1
        torch.cuda.synchronize()
        held = self._held()
        if self._calls % 2:
            self._planned = {path: tensor.clone() for path, tensor in held.items()}
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
