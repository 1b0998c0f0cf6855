"""RWKV-7 as a recurrence of the family: its decays, and the vectors that remove from a state."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from ...contract import StateLayer
from ..rounding import FLOAT32

SLOWEST = math.exp(-0.5)
"""Largest -g: the decay of a channel is exp(-SLOWEST sigmoid(a)), so it is between 0.545 and 1."""
RemovalSlip = Literal["", "after the decay", "any length"]
"""Mistake in what is removed: kappa reads the state after its decay, or kappa has the length of its key."""
_IN_SIGMOID, _IN_NORM = 8, 8
"""Roundings of a sigmoid, and of the length of a key."""


class Removal(NamedTuple):
    """The removal (S reads) removes^T from a state S [V, K], before a token adds its value. [T, H, K] float64."""

    reads: torch.Tensor
    """The vector kappa: k times k_k, with the length 1."""
    reads_off: torch.Tensor
    """[T, H, 1]: norm of its error."""
    removes: torch.Tensor
    """The product of eta and kappa."""
    removes_off: torch.Tensor
    key: torch.Tensor
    """The key of what is added: k (1 + (eta - 1) k_a)."""
    key_off: torch.Tensor


def log_decays(a: torch.Tensor) -> torch.Tensor:
    """The logarithms of the decays of ``a``."""
    return -SLOWEST * torch.sigmoid(a)


def removal_of(
    layer: StateLayer, k: torch.Tensor, b: torch.Tensor, decay: torch.Tensor, slip: RemovalSlip = ""
) -> Removal:
    """The removal of each row. ``k`` and ``decay`` [T, H, K] float64; ``b`` [T, H * K]."""
    assert layer.k_k is not None
    assert layer.k_a is not None
    eta = torch.sigmoid(b.double()).view_as(k)
    kappa = k * layer.k_k.double()
    if slip != "any length":
        kappa = kappa / _norm(kappa).clamp(min=1e-12)
    removes = eta * kappa
    if slip == "after the decay":
        kappa = kappa * decay
    off = FLOAT32 * (_IN_NORM + k.shape[-1] ** 0.5)
    factor = layer.k_a.double()
    size = k.abs() * (1 + factor.abs() * (1 + eta))
    return Removal(
        reads=kappa, reads_off=off * _norm(kappa), removes=removes,
        removes_off=(off + FLOAT32 * _IN_SIGMOID) * _norm(removes), key=k * (1 + (eta - 1) * factor),
        key_off=FLOAT32 * (_IN_SIGMOID + 4) * _norm(size),
    )  # fmt: skip


def growth(decay: torch.Tensor, reads: torch.Tensor, removes: torch.Tensor) -> torch.Tensor:
    """[..., 1]: a bound of the norm of diag(decay) - kappa^T (eta kappa), by which a token multiplies earlier errors.

    A row e of the error is a part c kappa and a part f at a right angle to it. The token makes c kappa (w - eta) of the
    first and f w of the second. So the square of the norm is at most the largest eigenvalue of [[n^2, x], [x, w^2]]:
    n is the norm of kappa (w - eta), w the largest decay, and x the most that both have in common, the part of
    kappa w (w - eta) at a right angle to kappa.
    """
    left = decay * reads - removes
    both = decay * left
    along = (reads * both).sum(-1, keepdim=True)
    squared, common = left.square().sum(-1, keepdim=True), both.square().sum(-1, keepdim=True) - along.square()
    most = decay.amax(-1, keepdim=True).square()
    half = (most - squared) / 2
    return ((most + squared) / 2 + (half.square() + common.clamp(min=0.0)).sqrt()).sqrt()


def _norm(rows: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return norm
