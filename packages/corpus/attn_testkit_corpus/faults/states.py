"""The parent of faults of recurrent states: token by token, with a hook for each step that can go wrong."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import (
    BackendContext,
    Bounds,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    Needs,
    Precision,
    Promises,
    State,
    StateBackend,
    StateInput,
    StateLayer,
)

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})


class StateParent(StateBackend):
    """A right backend of GDN and Mamba2 with few capabilities.

    It shares no code with the adapters: otherwise a mistake there would be in every seeded bug.
    """

    capabilities = Capabilities(
        eager=_MODES,
        graph={ForwardMode.DECODE, ForwardMode.TARGET_VERIFY},
        bounds=Bounds(max_q_rows=6, max_topk=1),
        heads=HeadShapes(families={"gdn", "mamba"}, gqa_ratios={4}, head_dims={64}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={16}),
        state=State(k_dims={64}),
        needs=Needs(cpu_seq_lens=False),
        promises=Promises(deterministic=True),
    )

    epsilon = 1e-6
    """Number in the norm by which GDN divides queries and keys."""
    index: torch.Tensor
    """[bs] int64: slot of each request; 0 for a padded one."""
    live: torch.Tensor
    """[bs] bool: requests whose slot is written."""
    begun: torch.Tensor
    """[bs] bool: requests that have a state."""
    counts: torch.Tensor
    """[bs] int64: rows of each request."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.state is not None
        self.states = context.state

    @classmethod
    def declared_state(cls) -> State:
        """The states of ``capabilities``."""
        assert cls.capabilities.state is not None
        return cls.capabilities.state

    def slots(self, batch: ForwardBatch) -> torch.Tensor:
        """[bs] int64: slot of each request; any for a padded one."""
        assert batch.state is not None
        return torch.where(batch.state.indices < 0, 0, batch.state.indices).long()

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        """[bs] bool: requests whose slot is written."""
        assert batch.state is not None
        return batch.state.indices > 0

    def begins(self, batch: ForwardBatch) -> torch.Tensor:
        """[bs] bool: requests that have a state."""
        assert batch.state is not None
        if batch.state.has_initial_state is None:
            return torch.ones(batch.batch_size, dtype=torch.bool, device=batch.seq_lens.device)
        return batch.state.has_initial_state

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.index, self.live, self.begun = self.slots(batch), self.stores(batch), self.begins(batch)
        if batch.extend_seq_lens_cpu is not None and batch.extend_seq_lens is not None:
            self.counts, self.most = batch.extend_seq_lens.long(), max(batch.extend_seq_lens_cpu, default=0)
        else:
            self.most = batch.input_ids.shape[0] // max(batch.batch_size, 1)
            self.counts = torch.full_like(self.index, self.most)
        self.verifies = batch.forward_mode.is_target_verify()

    def pools(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows [slots, C, W - 1] and states [slots, Hv, V, K] of a layer."""
        return self.states.pool.conv(layer.layer_id), self.states.pool.temporal(layer.layer_id)

    def loaded(self, pool: torch.Tensor, index: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
        """[bs, ...]: present values of requests; zeros for fresh ones."""
        return pool[index].masked_fill(~begun.view(-1, *[1] * (pool.dim() - 1)), 0.0)

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        """Write rows [bs, ...] to the slots of live requests."""
        live = self.live.view(-1, *[1] * (rows.dim() - 1))
        pool[index] = torch.where(live, rows.to(pool.dtype), pool[index])

    @override
    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        conv, temporal = self.pools(layer)
        window, state = self.before(layer)
        state, first = state.float(), self.counts.cumsum(0) - self.counts
        # A row more than there are, for requests that have none left.
        out = mixed.new_zeros(len(mixed) + 1, layer.v_heads, layer.v_dim)
        for token in range(self.most):
            window, state = self.continued(token, window, state)
            now = (token < self.counts)[:, None, None]
            row = torch.where(now[:, 0, 0], first + token, 0)
            every = torch.cat([window, mixed[row][..., None]], -1)
            one, two = (None if gate is None else gate[row].float() for gate in (a, b))
            gates = self.gates(one, two, layer)
            after, read = self.token(self.convolved(every, layer), state, gates, layer)
            state = torch.where(now[..., None], self.kept_state(state, after, token), state)
            window = torch.where(now, every[..., 1:], window)
            out[torch.where(now[:, 0, 0], row, len(mixed))] = read.to(out.dtype)
            if self.verifies:
                self.note(layer, token, window, state)
            else:
                self.copy(layer, token, window, state)
        if not self.verifies:
            self.store(conv, window, self.index)
            self.store(temporal, state, self.index)
        return out[:-1]

    def before(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows [bs, C, W - 1] and states [bs, Hv, V, K] before the step."""
        conv, temporal = self.pools(layer)
        return self.loaded(conv, self.index, self.begun), self.loaded(temporal, self.index, self.begun)

    def continued(self, token: int, window: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows and states that token number ``token`` of each request continues: those after the token before."""
        return window, state

    def copy(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        """Copy window and state after token number ``token`` of each request to other slots; here nothing."""

    def note(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        """Write window and state after node ``token`` of each draft to the scratch."""
        windows, states = self.scratch(layer)
        windows[: len(window), token], states[: len(state), token] = window, state.to(states.dtype)

    def scratch(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows [requests, N, C, W - 1] and states [requests, N, Hv, V, K] after each node."""
        return self.states.pool.scratch(layer.layer_id)

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        for layer in self.states.layers:
            for pool, scratch in zip(self.pools(layer), self.scratch(layer), strict=True):
                self.accept(pool, scratch, self.accepted(steps), state.indices.long())

    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        """[bs] int64: number of the node whose state stays, or -1."""
        return steps.long()

    def accept(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> None:
        """Copy what is after node ``steps`` of each request to its slot ``index`` [bs] int64."""
        stays, index = (steps >= 0) & (index > 0), index.clamp(min=0)
        rows = scratch[torch.arange(len(steps), device=steps.device), steps.clamp(min=0)]
        pool[index] = torch.where(stays.view(-1, *[1] * (rows.dim() - 1)), rows, pool[index])

    def convolved(self, every: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        """[bs, C] in float32 of the last W inputs [bs, C, W]."""
        assert layer.conv_weight is not None
        found = torch.einsum("bcw,cw->bc", every.float(), layer.conv_weight.float())
        found = found if layer.conv_bias is None else found + layer.conv_bias.float()
        found = found * torch.sigmoid(found) if layer.activation == "silu" else found
        return found.to(every.dtype).float()

    def token(
        self, rows: torch.Tensor, state: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [bs, Hv, V, K] after one token of each request, and what it reads [bs, Hv, V]."""
        keys, values = (layer.k_heads, layer.k_dim), (layer.v_heads, layer.v_dim)
        wide = values[0] * values[1]
        x, rest = (rows[:, :wide], rows[:, wide:]) if layer.kind == "mamba" else (rows[:, -wide:], rows[:, :-wide])
        one, two = (self.for_value_heads(part.reshape(-1, *keys), layer) for part in rest.chunk(2, -1))
        v, (decay, beta) = x.reshape(-1, *values), gates
        before, state = state, state * decay[..., None]
        if layer.kind == "mamba":
            k, q, stored = one, two, beta * v
        else:
            q, k = (each / (each.square().sum(-1, keepdim=True) + self.epsilon).sqrt() for each in (one, two))
            q, stored = q * layer.scaling, beta * (v - torch.einsum("bhvk,bhk->bhv", state, k))
        after = state + stored[..., None] * k[:, :, None]
        read = self.read(before, after, q)
        return after, read if layer.D is None else read + layer.D[:, None] * v

    def read(self, before: torch.Tensor, after: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """[bs, Hv, V] that q [bs, Hv, K] reads of a state."""
        return torch.einsum("bhvk,bhk->bhv", after, q)

    def kept_state(self, before: torch.Tensor, after: torch.Tensor, token: int) -> torch.Tensor:
        """State after token number ``token`` of each request."""
        return after

    def for_value_heads(self, rows: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        """[bs, Hv, K] of keys or queries [bs, Hk, K]."""
        return rows.repeat_interleave(layer.v_heads // layer.k_heads, 1)

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decay and factor of the stored update, [bs, Hv, 1] each, of ``a`` and ``b`` in float32."""
        assert a is not None
        assert layer.A_log is not None
        assert layer.dt_bias is not None
        step = torch.nn.functional.softplus(a + layer.dt_bias)
        decay = torch.exp(-torch.exp(layer.A_log) * step)
        beta = step if b is None else torch.sigmoid(b)
        return decay[..., None], beta[..., None]
