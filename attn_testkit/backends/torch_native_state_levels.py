"""``torch_native_state`` with log-linear attention: a slot has a state for each level of a Fenwick tree."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import ForwardBatch, HeadShapes, State, StateLayer
from ..contract.state import CONTINUES, FRESH, ORDERS, PADDED_STATES, ROLLBACKS, STATE_DTYPES
from .torch_native_state import TorchNativeStateBackend


class TorchNativeStateLevelsBackend(TorchNativeStateBackend):
    """Log-linear Mamba2. The levels of a request follow from the number of its tokens, on the device."""

    capabilities = TorchNativeStateBackend.capabilities.with_changes(
        heads=HeadShapes(families={"loglinear"}, gqa_ratios={1, 2}, head_dims={32}),
        precision={"dtypes": {"bf16", "fp32"}},
        bounds={"max_topk": 1},
        state=State(
            k_dims={32},
            dtypes=frozenset(STATE_DTYPES),
            orders=frozenset(ORDERS),
            padding=frozenset(PADDED_STATES),
            fresh=frozenset(FRESH),
            strided=True,
            rollback=frozenset(ROLLBACKS),
            snapshots={16},
            continues=frozenset(CONTINUES),
        ),
    )

    before: torch.Tensor
    """[bs] int64: tokens of each request before the step."""

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute slots, rows, flags and numbers of tokens, on the device."""
        super().init_forward_metadata_in_graph(batch)
        lens = batch.seq_lens[: batch.batch_size].long()
        # A verify's lengths are those of the prefixes.
        self.before = lens if batch.forward_mode.is_target_verify() else lens - self.counts

    @override
    def step(
        self,
        state: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [bs, n * Hv, V, K] float32 after one token of each request, and what the token reads [bs, Hv, V]."""
        assert b is not None
        assert layer.D is not None
        assert layer.level_weights is not None
        decay, size = self.gates(a, b, layer)
        weights = torch.nn.functional.softplus(layer.level_weights * b.float().view(-1, *layer.level_weights.shape))
        shape = layer.v_heads, layer.v_dim, layer.k_dim
        numbers = torch.arange(layer.levels, device=state.device)
        filled = ((self.before + self.token)[:, None] >> numbers & 1).bool()
        states = state.view(len(state), layer.levels, *shape) * decay[:, None, ..., None]
        own = (size * v)[..., None] * k[..., None, :]
        read = weights[..., :1] * (own * q[..., None, :]).sum(-1) + layer.D[:, None] * v
        of_levels = (states * q[:, None, :, None]).sum(-1) * weights[..., 1:].mT[..., None]
        read = read + torch.where(filled[..., None, None], of_levels, 0.0).sum(1)
        # The levels below the lowest empty one merge with the token, into that one.
        into = (~filled).long().argmax(-1, keepdim=True)
        merges, target = (each[..., None, None, None] for each in (numbers < into, numbers == into))
        merged = own + torch.where(merges, states, 0.0).sum(1)
        states = torch.where(target, merged[:, None], torch.where(merges, 0.0, states))
        return states.flatten(1, 2), read
