"""One layer with a recurrent state, as a backend sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from typing_extensions import override

from .head_layout import HEAD_LAYOUTS, HeadLayout
from .layer import AttentionLayer
from .state_kind import STATE_KINDS, StateKind

__all__ = ["StateLayer"]


@dataclass(frozen=True)
class StateLayer(AttentionLayer):
    """A layer that stores one state per request, however long the request is: GDN, KDA, Mamba2, Lightning, RWKV-7, and
    short convolutions. Of log-linear attention it stores one per level, of which a request fills as many as its length
    has set bits.

    Hk key heads (Mamba2: groups) of width K, Hv value heads of width V. Value head h uses key head h // (Hv / Hk). Each
    row has ``mixed`` [T, C], to which a causal convolution of W taps is applied per channel, and gates:

    ============== ========================================= ==================== =============== =====================
    kind           ``mixed``, in this order                  ``a``                ``b``           state of a value head
    ============== ========================================= ==================== =============== =====================
    ``gdn``        q, k [Hk, K] each, v [Hv, V]              [T, Hv]              [T, Hv]         [V, K]
    ``kda``        the same                                  [T, Hv * K]          [T, Hv]         [V, K]
    ``mamba``      x [Hv, V], B, C [Hk, K] each              dt [T, Hv]           none            [V, K]
    ``lightning``  q, k [Hv, K] each, v [Hv, V]              none                 none            [V, K]
    ``rwkv``       the same                                  [T, Hv * K]          [T, Hv * K]     [V, K]
    ``conv``       x [Hv, V]                                 none                 none            none: K is 0
    ``loglinear``  x [Hv, V], B, C [Hk, K] each              dt [T, Hv]           [T, Hv * (n+1)] n of [V, K]
    ============== ========================================= ==================== =============== =====================

    After the convolution (``activation`` of bias + sum of taps times inputs, oldest first) each row updates the state
    S and reads it afterwards, with softplus(x) = x above 20:

    * ``gdn``: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b); q and k divided by sqrt(sum of squares + 1e-6),
      q times K^-0.5; S = exp(g) S; u = beta (v - S k); S = S + u k^T; out = S q.
    * ``kda``: the same with a g for each channel of K. With ``lower_bound``: g = lower_bound sigmoid(exp(A_log) (a +
      dt_bias)).
    * ``mamba``: dt = softplus(dt + dt_bias); S = exp(-exp(A_log) dt) S + dt x B^T; out = S C + D x.
    * ``lightning``: S = exp(-slope) S + v k^T; out = S q.
    * ``rwkv`` (RWKV-7): w = exp(-exp(-1/2) sigmoid(a)) and eta = sigmoid(b), one for each channel of K; kappa = k k_k
      divided by its length; S = S diag(w) - (S kappa) (eta kappa)^T + v (k (1 + (eta - 1) k_a))^T; out = S q. kappa
      reads the state before its decay.
    * ``conv``: out = x after the convolution, which has no activation. The model multiplies by its gates before and
      after the layer (``ShortConv`` of LFM2). A slot has a window, and a state without elements.
    * ``loglinear`` (log-linear Mamba2, arXiv 2506.04761): dt and the decay as in ``mamba``, for the states S_0 .. S_n-1
      of all levels; lambda = softplus(``level_weights`` * b), n + 1 per value head; out = lambda_0 (dt x B^T) C + sum
      of lambda_l+1 (S_l C) + D x. Then the token is stored. The request had t tokens before it, and z is the number of
      ones at the end of t in binary: S_z = dt x B^T + S_0 + .. + S_z-1, and S_0 .. S_z-1 = 0. So S_l is the sum of
      2^l tokens if bit l of the request's length is set, and zeros if it is not.
    """

    kind: str = "gdn"
    """Name of ``STATE_KINDS``."""
    conv_weight: torch.Tensor | None = field(default=None, compare=False)
    """[C, W] in the model's dtype, the tap of the oldest input first; None: no convolution (W is 1)."""
    conv_bias: torch.Tensor | None = field(default=None, compare=False)
    """[C] in the model's dtype, or none."""
    activation: str = "silu"
    """Activation after the convolution: ``silu`` or ``none``."""
    A_log: torch.Tensor | None = field(default=None, compare=False)
    """[Hv] float32, of GDN, KDA and Mamba2."""
    dt_bias: torch.Tensor | None = field(default=None, compare=False)
    """[Hv] float32, KDA: [Hv, K]; of GDN, KDA and Mamba2."""
    D: torch.Tensor | None = field(default=None, compare=False)
    """[Hv] float32, Mamba2 and log-linear attention only."""
    slope: torch.Tensor | None = field(default=None, compare=False)
    """[Hv] float32, Lightning only."""
    k_k: torch.Tensor | None = field(default=None, compare=False)
    """[Hv, K] float32, RWKV-7 only: factors of the key that removes."""
    k_a: torch.Tensor | None = field(default=None, compare=False)
    """[Hv, K] float32, RWKV-7 only: how much eta scales the key that is added."""
    lower_bound: float | None = None
    """Smallest g of KDA; None: no bound."""
    level_weights: torch.Tensor | None = field(default=None, compare=False)
    """[Hv, n + 1] float32, log-linear attention only: factors of ``b``. The first is that of the token itself."""
    levels: int = 0
    """n: states of a slot per value head, in log-linear attention; requests have fewer than 2^n tokens. 0 elsewhere."""

    @property
    def of_kind(self) -> StateKind:
        """Properties of the layer's kind."""
        return STATE_KINDS[self.kind]

    @property
    def k_heads(self) -> int:
        """Hk: key heads on this rank; groups of Mamba2."""
        return self.tp_k_head_num

    @property
    def v_heads(self) -> int:
        """Hv: value heads on this rank."""
        return self.tp_q_head_num

    @property
    def state_heads(self) -> int:
        """Matrices [V, K] that a slot has: Hv, or n * Hv in the order of levels, so that the first Hv are those of
        level 0 (as ``ht`` [levels, H, K, V] of ``fla.ops.log_linear_attn.LogLinearAttentionState``)."""
        return self.v_heads * max(self.levels, 1)

    @property
    def k_dim(self) -> int:
        """K: width of a key; 0 if nothing but a convolution is computed."""
        return self.head_dim

    @property
    def v_dim(self) -> int:
        """V: width of a value."""
        return self.v_head_dim

    @property
    def conv_width(self) -> int:
        """W: taps of the convolution; 1 without one."""
        return 1 if self.conv_weight is None else self.conv_weight.shape[1]

    @property
    def parts(self) -> tuple[int, int, int]:
        """Elements of ``mixed``, ``a`` and ``b`` of a row."""
        of = self.of_kind
        widths = {
            "none": 0, "head": self.v_heads, "channel": self.v_heads * self.k_dim,
            "level": self.v_heads * (self.levels + 1),
        }  # fmt: skip
        mixed = sum(heads * width for heads, width in self.channels)
        return mixed, widths[of.a], widths[of.b]

    @property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """Heads and their width, of each part of ``mixed`` in its order. Tensor parallelism splits each part."""
        keys, values = (self.k_heads, self.k_dim), (self.v_heads, self.v_dim)
        return tuple(values if part == self.of_kind.value_part else keys for part in range(len(self.of_kind.parts)))

    @property
    @override
    def head_layout(self) -> HeadLayout:
        """The layout of the layer's heads, which is named after its kind."""
        return HEAD_LAYOUTS[self.kind]

    @override
    def to(self, device: torch.device) -> StateLayer:
        """The layer with its parameters on a device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})  # type: ignore[arg-type]
