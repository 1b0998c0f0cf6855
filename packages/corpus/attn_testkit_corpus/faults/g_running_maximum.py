"""Class G: tiles of keys, their running maximum, and the dtype of the sums."""

from __future__ import annotations

import torch

from .builds import TiledBackend
from .catalogue import fault


@fault("FlyDSL #1033", "finite matches-oracle", "nan|weights")
class RescaleTakesTileMaximum(TiledBackend):
    """One row past the threshold makes its whole group rescale, with each row's tile maximum, although the old maximum
    may be larger.
    """

    def raise_maximum(self, top: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        largest = tile.amax(-1)
        grown = (largest > top + self.slack).flatten(2).any(2)[:, :, None, None, None]
        return torch.where(grown & (largest > -torch.inf), largest, top)
