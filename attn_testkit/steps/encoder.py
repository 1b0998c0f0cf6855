"""Encoder keys of a step, which cross-attention layers see: their lengths, and those that the step stores.

In the order of a request's keys they come first. A layer stores only keys that it sees: for other keys its part of the
pool is unowned, although the slot has an owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..contract import AttentionLayer
from .schedule import Step

_Bytes = npt.NDArray[np.uint8]
A = TypeVar("A", torch.Tensor, _Bytes)


@dataclass(frozen=True, eq=False)
class EncoderKeys:
    """Host tensors. L layers, B requests, E encoder tokens that the step stores, packed request by request."""

    crosses: torch.Tensor
    """[L] bool: True for cross-attention layers."""
    lens: torch.Tensor
    """[B] int64: encoder keys of each request."""
    request: torch.Tensor
    """[E] int64: request of each stored token."""
    place: torch.Tensor
    """[E] int64: index of each encoder token among the keys of its request."""
    slots: torch.Tensor
    """[E] int64: its slot."""
    k: torch.Tensor
    """[L, E, Hk, D] in the model's dtype."""
    v: torch.Tensor
    """[L, E, Hk, Dv]."""

    def part(self, chosen: Sequence[int]) -> EncoderKeys:
        """Some requests, in the order of ``chosen``."""
        kept = torch.cat([(self.request == index).nonzero()[:, 0] for index in (*chosen, -1)])
        renumbered = [chosen.index(int(each)) for each in self.request[kept]]
        return replace(
            self,
            lens=self.lens[list(chosen)],
            request=torch.tensor(renumbered, dtype=torch.int64),
            place=self.place[kept],
            slots=self.slots[kept],
            k=self.k[:, kept],
            v=self.v[:, kept],
        )

    def seen(self, visible: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Narrow [B, Tmax, S] bool visibility to the keys that the layer stores."""
        of_encoder = torch.arange(visible.shape[-1]) < self.lens[:, None, None]
        return visible & (of_encoder if layer.is_cross_attention else ~of_encoder)

    def unowned_elsewhere(self, rows: A, of_encoder: npt.NDArray[np.bool_], unowned: A) -> A:
        """``rows`` [L, parts, n, ...], with ``unowned`` in each layer that does not store the key. ``of_encoder``
        [n]."""
        for layer, crosses in enumerate(self.crosses.tolist()):
            rows[layer, :, of_encoder != crosses] = unowned
        return rows


def encoder_keys(step: Step, layers: Sequence[AttentionLayer], k: torch.Tensor, v: torch.Tensor) -> EncoderKeys | None:
    """Encoder keys of a step, taken from ``k`` and ``v`` [L, B, S, Hk, D] of all its keys. None without cross-attention
    layers.
    """
    crosses = torch.tensor([layer.is_cross_attention for layer in layers])
    if not crosses.any():
        return None
    stored = [each.encoder_len if each.stores_encoder else 0 for each in step.requests]
    request = torch.arange(step.bs).repeat_interleave(torch.tensor(stored))
    place = torch.cat([torch.arange(count) for count in stored])
    slots = np.concatenate([each.slots[:count] for each, count in zip(step.requests, stored, strict=True)])
    lens = torch.tensor([each.encoder_len for each in step.requests])
    return EncoderKeys(
        crosses, lens, request, place, torch.from_numpy(slots), k[:, request, place], v[:, request, place]
    )
