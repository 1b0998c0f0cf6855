"""``torch_native_state``: layers with a recurrent state in plain torch, token by token, in float32.

The reference of the contract: it runs everywhere, under graphs too, and takes every convention of states.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import (
    BackendContext,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    State,
    StateBackend,
    StateInput,
    StateLayer,
)
from ..contract.state import FRESH, ORDERS, PADDED_STATES, STATE_DTYPES

__all__ = ["TorchNativeStateBackend"]

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})


class TorchNativeStateBackend(StateBackend):
    """GDN, KDA, Mamba2 and Lightning, one token of all requests at a time. Decode and verify run under graphs, too.

    Hooks for what may go wrong are separate methods: ``slots``, ``begins``, ``stores``, ``window_after``.
    """

    capabilities = Capabilities(
        eager=_MODES,
        graph={ForwardMode.DECODE, ForwardMode.TARGET_VERIFY},
        max_q_rows=8,
        max_topk=1,
        families={"gdn", "kda", "mamba", "lightning"},
        gqa_ratios={1, 2, 4},
        head_dims={32, 64, 128},
        dtypes={"bf16", "fp16", "fp32"},
        page_sizes={16},
        state=State(
            k_dims={32, 64, 128}, dtypes=frozenset(STATE_DTYPES), conv_widths={1, 2, 4}, orders=frozenset(ORDERS),
            padding=frozenset(PADDED_STATES), fresh=frozenset(FRESH), strided=True,
        ),
        needs_cpu_seq_lens=False,
        deterministic=True,
    )  # fmt: skip

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.state is not None
        self.states = context.state

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute slots, rows and flags of the batch's requests, on the device."""
        assert batch.state is not None
        bs, rows = batch.batch_size, batch.input_ids.shape[0]
        self.index = self.slots(batch)
        self.live = self.stores(batch)
        self.begun = self.begins(batch)
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            self.counts, self.width = batch.extend_seq_lens.long(), max(batch.extend_seq_lens_cpu or [rows])
        else:
            self.width = rows // bs if bs else 0
            self.counts = torch.full((bs,), self.width, dtype=torch.int64, device=batch.seq_lens.device)
        self.first = self.counts.cumsum(0) - self.counts

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        """[bs] int64: slot of each request, 0 for a padded one."""
        assert batch.state is not None
        return batch.state.indices.long().clamp(min=0)

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        """[bs] bool: requests whose slot is written."""
        assert batch.state is not None
        if self.states.padding == "write_zero":
            return batch.state.indices >= 0
        return batch.state.indices > 0

    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        """[bs] bool: requests that have a state."""
        assert batch.state is not None
        flags = batch.state.has_initial_state
        return flags if flags is not None else torch.ones_like(self.live)

    @override
    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """[T, Hv, V] in the model's dtype."""
        conv, temporal = (pool(layer.layer_id) for pool in (self.states.pool.conv, self.states.pool.temporal))
        window, state = conv[self.index], temporal[self.index].float()
        if self.states.pool.order == "kv":
            state = state.mT
        window = window.masked_fill(~self.begun[:, None, None], 0)
        state = state.masked_fill(~self.begun[:, None, None, None], 0.0)
        # Requests without a row left write the last one, which is cut off.
        out = torch.zeros(len(mixed) + 1, layer.v_heads, layer.v_dim, dtype=mixed.dtype, device=mixed.device)
        for token in range(self.width):
            # Requests with fewer rows stay as they are, and so does what they read last.
            now = token < self.counts
            row = (self.first + token).clamp(max=len(mixed) - 1)
            one, moved = self.convolved(mixed[row], window, layer)
            q, k, v = self.split(one, layer)
            after, read = self.step(state, q, k, v, None if a is None else a[row], None if b is None else b[row], layer)
            window = torch.where(now[:, None, None], moved, window)
            state = torch.where(now[:, None, None, None], after, state)
            out.index_copy_(0, torch.where(now, row, len(mixed)), read.to(out.dtype))
            if batch.forward_mode.is_target_verify():
                for part, now_held in zip(self.states.pool.scratch(layer.layer_id), (window, state), strict=True):
                    turned = self.states.pool.order == "kv" and now_held.dim() == 4
                    part[: len(now_held), token] = (now_held.mT if turned else now_held).to(part.dtype)
        if batch.forward_mode.is_target_verify():
            return out[:-1]
        self.store(conv, window, self.index)
        self.store(temporal, (state.mT if self.states.pool.order == "kv" else state).to(temporal.dtype), self.index)
        return out[:-1]

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        """Copy from scratch to slots."""
        index, place = state.indices.long().clamp(min=0), torch.arange(len(steps), device=steps.device)
        live = (steps >= 0) & (state.indices > 0)
        for layer in self.states.layers:
            pools = self.states.pool.conv(layer.layer_id), self.states.pool.temporal(layer.layer_id)
            for pool, scratch in zip(pools, self.states.pool.scratch(layer.layer_id), strict=True):
                rows = scratch[place, steps.long().clamp(min=0)]
                pool.index_put_((index,), torch.where(live.view(-1, *[1] * (rows.dim() - 1)), rows, pool[index]))

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        """Write rows into their slots; those that are not live get back what slot 0 holds."""
        live = self.live.view(-1, *[1] * (rows.dim() - 1))
        pool.index_put_((index,), torch.where(live, rows, pool[index]))

    def convolved(
        self, rows: torch.Tensor, window: torch.Tensor, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [bs, C] after the convolution, in the model's dtype, and windows [bs, C, W - 1] after them."""
        if layer.conv_weight is None:
            return rows, window
        every = torch.cat([window, rows[..., None]], -1)
        found = (every.float() * layer.conv_weight.float()).sum(-1)
        if layer.conv_bias is not None:
            found = found + layer.conv_bias.float()
        if layer.activation == "silu":
            found = torch.nn.functional.silu(found)
        return found.to(rows.dtype), self.window_after(every)

    def window_after(self, every: torch.Tensor) -> torch.Tensor:
        """[bs, C, W - 1] of [bs, C, W]: the last inputs."""
        return every[..., 1:]

    def split(self, rows: torch.Tensor, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [bs, Hv, K] and v [bs, Hv, V] in float32 of mixed rows [bs, C]; Mamba2: C, B and x."""
        keys, values = layer.k_heads * layer.k_dim, layer.v_heads * layer.v_dim
        if layer.kind == "mamba":
            v, k, q = torch.split(rows.float(), [values, keys, keys], -1)
        else:
            q, k, v = torch.split(rows.float(), [keys, keys, values], -1)
        q, k = (self.for_value_heads(each.reshape(-1, layer.k_heads, layer.k_dim), layer) for each in (q, k))
        return q, k, v.reshape(-1, layer.v_heads, layer.v_dim)

    def for_value_heads(self, rows: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        """[bs, Hv, K] of keys or queries [bs, Hk, K]."""
        return rows.repeat_interleave(layer.v_heads // layer.k_heads, 1)

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
        """States [bs, Hv, V, K] float32 after one token of each request, and what it reads [bs, Hv, V]."""
        decay, beta = self.gates(a, b, layer)
        state = state * decay[..., None, :]
        if layer.kind in ("gdn", "kda"):
            q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
            q = q * layer.scaling
            v = v - (state * k[..., None, :]).sum(-1)
        state = state + (beta * v)[..., None] * k[..., None, :]
        read = (state * q[..., None, :]).sum(-1)
        if layer.D is not None:
            read = read + layer.D[:, None] * v
        return state, read

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decay [bs or 1, Hv, 1 or K] and the factor of what is stored [bs or 1, Hv, 1], in float32."""
        if layer.slope is not None:
            decay = torch.exp(-layer.slope)[None, :, None]
            return decay, torch.ones_like(decay)
        assert a is not None
        assert layer.A_log is not None
        assert layer.dt_bias is not None
        rate = layer.A_log.exp()[:, None]
        gate = a.float().view(len(a), layer.v_heads, -1) + layer.dt_bias.view(layer.v_heads, -1)
        if layer.lower_bound is not None:
            decay = torch.exp(layer.lower_bound * torch.sigmoid(rate * gate))
        else:
            gate = torch.nn.functional.softplus(gate)
            decay = torch.exp(-rate * gate)
        if layer.kind == "mamba":
            return decay, gate
        assert b is not None
        return decay, torch.sigmoid(b.float())[..., None]
