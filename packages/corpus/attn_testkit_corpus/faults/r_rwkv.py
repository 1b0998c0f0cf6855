"""Class R, RWKV-7: what a token removes from a state before it adds its value, in which order, and by which vectors."""

from __future__ import annotations

import math

import torch

from attn_testkit.contract import StateLayer

from .catalogue import fault
from .states import StateParent

_CHUNK = 16


class RWKVParent(StateParent):
    """A right backend of RWKV-7, as flash-linear-attention computes it: S (diag(w) - kappa^T (eta kappa)) + v k^T."""

    capabilities = StateParent.capabilities.with_changes(
        heads={"families": {"rwkv"}, "gqa_ratios": {1}}, state={"conv_widths": {1}}
    )

    def convolved(self, every: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        return every[..., -1].float()

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert a is not None
        assert b is not None
        shape = -1, layer.v_heads, layer.k_dim
        return self.decay(a).view(shape), torch.sigmoid(b).view(shape)

    def decay(self, a: torch.Tensor) -> torch.Tensor:
        """[bs, H * K]: decay of each channel."""
        return torch.exp(-math.exp(-0.5) * torch.sigmoid(a))

    def token(
        self, rows: torch.Tensor, state: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rows[:, : -layer.v_heads * layer.v_dim].view(-1, 2, layer.k_heads, layer.k_dim).unbind(1)
        v = rows[:, -layer.v_heads * layer.v_dim :].view(-1, layer.v_heads, layer.v_dim)
        kappa, eta = self.kappa(k, layer), gates[1]
        after = self.after(state, gates[0], kappa, self.removing(eta, kappa))
        after = after + torch.einsum("bhv,bhk->bhvk", v, self.added(k, eta, layer))
        return after, self.read(state, after, q)

    def kappa(self, k: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        """[bs, H, K]: vector of length 1 that reads what is removed."""
        assert layer.k_k is not None
        long = k * layer.k_k
        return long / long.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-12)

    def removing(self, eta: torch.Tensor, kappa: torch.Tensor) -> torch.Tensor:
        """[bs, H, K]: vector by which it is removed."""
        return eta * kappa

    def added(self, k: torch.Tensor, eta: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        """[bs, H, K]: key of the value that is added."""
        assert layer.k_a is not None
        return k * (1 + (eta - 1) * layer.k_a)

    def after(
        self, state: torch.Tensor, decay: torch.Tensor, kappa: torch.Tensor, removing: torch.Tensor
    ) -> torch.Tensor:
        """[bs, H, V, K]: the state after decay and removal."""
        removed = torch.einsum("bhvk,bhk->bhv", state, kappa)
        return state * decay[:, :, None] - removed[..., None] * removing[:, :, None]


class RWKVChunksParent(RWKVParent):
    """A right backend that keeps the transition of a chunk as one matrix per head, as chunked kernels of DPLR do: a row
    reads S_0 M_1 .. M_t and what the rows of its chunk added."""

    whole: torch.Tensor
    """[bs, H, K, K]: product of the transitions of the rows of the chunk so far."""
    begun_from: torch.Tensor
    """[bs, H, V, K]: state before the chunk."""
    inside: torch.Tensor
    """[bs, H, V, K]: what the rows of the chunk added."""

    def continued(self, token: int, window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if token % _CHUNK == 0:
            self.begun_from, self.inside = state, torch.zeros_like(state)
            unit = torch.eye(state.shape[-1], device=state.device)
            self.whole = unit.expand(*state.shape[:2], *unit.shape)
        return window, state

    def token(
        self, rows: torch.Tensor, state: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rows[:, : -layer.v_heads * layer.v_dim].view(-1, 2, layer.k_heads, layer.k_dim).unbind(1)
        v = rows[:, -layer.v_heads * layer.v_dim :].view(-1, layer.v_heads, layer.v_dim)
        kappa, eta = self.kappa(k, layer), gates[1]
        one = torch.diag_embed(gates[0]) - kappa[..., None] * self.removing(eta, kappa)[:, :, None]
        self.inside = self.inside @ one + v[..., None] * self.added(k, eta, layer)[:, :, None]
        self.whole = self.handed_on(self.whole, one)
        after = self.begun_from @ self.whole + self.inside
        return after, self.read(state, after, q)

    def handed_on(self, whole: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        """[bs, H, K, K]: transition of the chunk with that of one more row."""
        return whole @ one


_CHECKS = "matches-oracle state-matches-oracle"


@fault("general", _CHECKS, "kappa is not divided by its length")
class KappaOfAnyLength(RWKVParent):
    """The key that removes is not divided by its length, as in a kernel that leaves this to its caller."""

    def kappa(self, k: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        assert layer.k_k is not None
        return k * layer.k_k


@fault("general (a port of the delta rule of GDN and KDA)", _CHECKS, "kappa reads the state after its decay")
class RemovalBehindTheDecay(RWKVParent):
    """The vector kappa reads the state after its decay, as the key in GDN and KDA."""

    def after(
        self, state: torch.Tensor, decay: torch.Tensor, kappa: torch.Tensor, removing: torch.Tensor
    ) -> torch.Tensor:
        return super().after(state, decay, kappa * decay, removing)


@fault("general", _CHECKS, modes="decode extend")
class EtaOfTheVectorThatReads(RWKVParent):
    """The rate eta scales the vector that reads and not the one that removes: the factors of DPLR are exchanged."""

    def after(
        self, state: torch.Tensor, decay: torch.Tensor, kappa: torch.Tensor, removing: torch.Tensor
    ) -> torch.Tensor:
        return super().after(state, decay, removing, kappa)


@fault("general", _CHECKS, "a and b are exchanged", modes="decode extend")
class GatesExchanged(RWKVParent):
    """The decay is computed from b, and eta from a: both have a number for each channel."""

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().gates(b, a, layer)


@fault("general (the decay of earlier versions of RWKV)", _CHECKS, modes="decode extend")
class DecayOfRWKV6(RWKVParent):
    """The decay is exp(-exp(a)), as in RWKV-5 and RWKV-6."""

    def decay(self, a: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.exp(a))


@fault("general", _CHECKS, "k_a is not applied", modes="decode extend")
class AddedKeyNotScaled(RWKVParent):
    """The key of the value that is added is not scaled by eta."""

    def added(self, k: torch.Tensor, eta: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        return k


@fault(
    "general (a product of matrices in the wrong order)",
    "matches-oracle state-matches-oracle state-counts-tokens",
    modes="extend",
)
class TransitionsOfAChunkInReverseOrder(RWKVChunksParent):
    """The transition of a chunk is the product of those of its rows in reverse order."""

    def handed_on(self, whole: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return one @ whole
