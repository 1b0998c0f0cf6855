"""``torch_native_state``: layers with a recurrent state in plain torch, token by token, in float32.

The reference of the contract: it runs everywhere, under graphs too, and supports every convention of states.
"""

from __future__ import annotations

import math

import torch
from typing_extensions import override

from ..contract import (
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
    ServerConventions,
    State,
    StateBackend,
    StateInput,
    StateLayer,
    VerifyInput,
)
from ..contract.state import CONTINUES, FRESH, ORDERS, PADDED_STATES, ROLLBACKS, ROUNDINGS, STATE_DTYPES
from ..contract.state_kind import STATE_KINDS
from .stochastic_rounding import StochasticRounding

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
_KINDS = frozenset(name for name, kind in STATE_KINDS.items() if not kind.leveled)
"""Kinds with one state per slot; ``torch_native_state_levels`` has the others."""


class TorchNativeStateBackend(StateBackend):
    """GDN, KDA, Mamba2, Lightning, RWKV-7 and short convolutions, one token of all requests at a time. Decode and
    verify run under graphs, too. Rejected nodes are taken back by a commit, or by a slot for each node.
    """

    capabilities = Capabilities(
        eager=_MODES,
        graph={ForwardMode.DECODE, ForwardMode.TARGET_VERIFY},
        bounds=Bounds(max_q_rows=8, max_topk=3),
        heads=HeadShapes(families=_KINDS, gqa_ratios={1, 2, 4}, head_dims={32, 64, 128}),
        precision=Precision(dtypes={"bf16", "fp16", "fp32"}),
        kv_pool=KVPools(page_sizes={16}),
        state=State(
            k_dims={32, 64, 128},
            dtypes=frozenset(STATE_DTYPES),
            conv_widths={1, 2, 4},
            orders=frozenset(ORDERS),
            padding=frozenset(PADDED_STATES),
            fresh=frozenset(FRESH),
            strided=True,
            rollback=frozenset(ROLLBACKS),
            snapshots={16, 64},
            trees={"gdn", "kda"},
            continues=frozenset(CONTINUES),
            rounding=frozenset(ROUNDINGS),
        ),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_requests_without_rows=True, takes_column_views=True),
        promises=Promises(deterministic=True),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.state is not None
        self.states = context.state
        self.stochastic = StochasticRounding(context.device)
        self.parents: torch.Tensor | None = None
        """[bs, N] int64: parent of each node of drafts that branch; None for chains."""
        self.token = 0
        """Number of the row of each request that is computed."""

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the parents of the nodes that graphs read."""
        nodes = self.context.num_draft_tokens
        self.in_graphs = torch.zeros(max_bs, nodes, dtype=torch.int64, device=self.context.device)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager step."""
        self.parents = self.parents_of(batch)
        self.init_forward_metadata_in_graph(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Copy the parents of the nodes to the memory that the graph reads."""
        found = self.parents_of(batch)
        self.parents = None if found is None else self.in_graphs[: batch.batch_size, : found.shape[1]]
        if self.parents is not None and found is not None:
            # A padded request has no links.
            self.parents[: len(found)].copy_(found)

    def parents_of(self, batch: ForwardBatch) -> torch.Tensor | None:
        """[requests, N] int64: parent of each node of each draft, 0 for the root; None if drafts are chains."""
        spec = batch.spec_info
        if not isinstance(spec, VerifyInput) or spec.topk < 2 or spec.retrieve_next_token is None:
            return None
        assert spec.retrieve_next_sibling is not None
        child, sibling = spec.retrieve_next_token, spec.retrieve_next_sibling
        parents = torch.zeros_like(child)
        for node in range(child.shape[1]):
            # Children have larger numbers than their parents, and siblings ascend.
            for link, parent in ((child, torch.full_like(child[:, 0], node)), (sibling, parents[:, node].clone())):
                at = link[:, node, None]
                there = parents.gather(1, at.clamp(min=0))
                parents.scatter_(1, at.clamp(min=0), torch.where(at > 0, parent[:, None], there))
        return parents

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute slots, rows and flags of the batch's requests, on the device."""
        assert batch.state is not None
        bs, rows = batch.batch_size, batch.input_ids.shape[0]
        # A slot for each node, or one: [bs, N or 1].
        listed = batch.state.indices.view(bs, -1) if bs else batch.state.indices.view(0, 1)
        self.by_slots = batch.state.num_accepted is not None
        self.lists, self.live = listed.long().clamp(min=0), self.stores(listed[:, 0])
        self.index = self.lists[:, 0]
        self.taken = self.taken_slots(batch.state)
        self.begun = self.begins(batch)
        self.snapshot = batch.state.snapshot
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            self.counts, self.width = batch.extend_seq_lens.long(), max(batch.extend_seq_lens_cpu or [rows])
        else:
            self.width = rows // bs if bs else 0
            self.counts = torch.full((bs,), self.width, dtype=torch.int64, device=batch.seq_lens.device)
        self.first = self.counts.cumsum(0) - self.counts

    def taken_slots(self, state: StateInput) -> torch.Tensor:
        """[bs] int64: slot whose state each request continues."""
        if state.sources is not None:
            return state.sources.long().clamp(min=0)
        if state.num_accepted is None:
            return self.index
        return self.lists.gather(1, state.num_accepted.long()[:, None] - 1)[:, 0]

    def stores(self, indices: torch.Tensor) -> torch.Tensor:
        """[bs] bool: requests whose slot is written."""
        return indices >= 0 if self.states.padding == "write_zero" else indices > 0

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
        assert batch.state is not None
        verifies = batch.forward_mode.is_target_verify()
        conv, temporal = self.pools(layer)
        # With a slot for each node the window of all is in the first.
        window = self.windows(conv[self.index if self.by_slots else self.taken], batch.state, layer.conv_width - 1)
        window = window.masked_fill(~self.begun[:, None, None], 0)
        state = temporal[self.taken].float().masked_fill(~self.begun[:, None, None, None], 0.0)
        # Requests without a row left write the last one, which is cut off.
        out = torch.zeros(len(mixed) + 1, layer.v_heads, layer.v_dim, dtype=mixed.dtype, device=mixed.device)
        nodes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for token in range(self.width):
            if self.parents is not None and nodes:
                window, state = self.of_parents(nodes, token)
            # Requests with fewer rows stay as they are, and so does what they read last.
            self.token, now = token, token < self.counts
            row = (self.first + token).clamp(max=len(mixed) - 1)
            one, moved = self.convolved(mixed[row], window, layer)
            if layer.of_kind.recurs:
                one_a, one_b = (None if gate is None else gate[row] for gate in (a, b))
                after, read = self.step(state, *self.split(one, layer), one_a, one_b, layer)
            else:
                after, read = state, one.view(-1, layer.v_heads, layer.v_dim)
            window = torch.where(now[:, None, None], moved, window)
            state = torch.where(now[:, None, None, None], after, state)
            out.index_copy_(0, torch.where(now, row, len(mixed)), read.to(out.dtype))
            if self.parents is not None:
                nodes.append((window, state))
            if self.by_slots:
                self.store_node(layer, token, mixed[row], window, state)
            elif verifies:
                for part, behind in zip(self.scratch(layer), (window, state), strict=True):
                    part[: len(behind), token] = behind.to(part.dtype)
            elif self.snapshot is not None:
                copied = self.snapshot.rows == token + 1
                self.store(conv[..., : window.shape[-1]], window, self.snapshot.slots, copied)
                self.store(temporal, self.rounded(state, temporal.dtype), self.snapshot.slots, copied)
        if not verifies:
            self.store(conv[..., : window.shape[-1]], window, self.index, self.live)
            self.store(temporal, self.rounded(state, temporal.dtype), self.index, self.live)
        return out[:-1]

    def rounded(self, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A state in the dtype of the pool, rounded as the instance says."""
        return self.stochastic(state, dtype) if self.states.rounding == "stochastic" else state.to(dtype)

    def of_parents(self, behind: list[tuple[torch.Tensor, torch.Tensor]], node: int) -> tuple[torch.Tensor, ...]:
        """Windows [bs, C, W - 1] and states [bs, Hv, V, K] after the parent of a node, selected from those after each
        earlier node."""
        assert self.parents is not None
        place = torch.arange(len(self.parents), device=self.parents.device)
        return tuple(torch.stack(every)[self.parents[:, node], place] for every in zip(*behind, strict=True))

    def pools(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows [slots, C, columns] and states [slots, Hv, V, K] of a layer, whatever their order in memory."""
        conv, temporal = self.states.pool.conv(layer.layer_id), self.states.pool.temporal(layer.layer_id)
        return conv, temporal.mT if self.states.pool.order == "kv" else temporal

    def scratch(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows [requests, N, C, W - 1] and states [requests, N, Hv, V, K] after each node."""
        windows, states = self.states.pool.scratch(layer.layer_id)
        return windows, states.mT if self.states.pool.order == "kv" else states

    def windows(self, held: torch.Tensor, state: StateInput, columns: int) -> torch.Tensor:
        """[bs, C, W - 1] before the step, taken from the columns in the first slot of each request [bs, C, columns]."""
        if state.num_accepted is None or not columns:
            # With a slot for each node, a window that no draft has moved begins at column 0.
            return held[..., :columns]
        first = state.num_accepted.long()[:, None] - 1
        at = first + torch.arange(columns, device=held.device)
        return held.gather(2, at[:, None].expand(-1, held.shape[1], -1))

    def store_node(
        self, layer: StateLayer, token: int, inputs: torch.Tensor, window: torch.Tensor, state: torch.Tensor
    ) -> None:
        """Store the state after node ``token`` in its slot, and the inputs [bs, C] after the window in the first
        slot."""
        conv, temporal = self.pools(layer)
        self.store(temporal, state.to(temporal.dtype), self.lists[:, token], self.live)
        self.store_window(conv, token, inputs, window)

    def store_window(self, conv: torch.Tensor, token: int, inputs: torch.Tensor, window: torch.Tensor) -> None:
        """Store the window after the root, or a later node's inputs [bs, C], in the first slot of each request."""
        if window.shape[-1]:
            # Behind the root the window begins at column 0; each later node adds a column.
            width = window.shape[-1] if token == 0 else 1
            part = conv[..., :width] if token == 0 else conv[..., window.shape[-1] + token - 1 :][..., :1]
            self.store(part, window if token == 0 else inputs[..., None], self.index, self.live)

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        """Copy from scratch, or from the slots of nodes, to the slots of requests."""
        if state.num_accepted is not None:
            self.move_to_first_slots(steps.long(), state.indices.long())
            return
        self.copy_nodes(steps.long(), state.indices.long(), state.indices > 0)
        if state.snapshot is not None:
            self.copy_nodes(state.snapshot.rows.long() - 1, state.snapshot.slots, state.snapshot.slots > 0)

    def copy_nodes(self, steps: torch.Tensor, index: torch.Tensor, live: torch.Tensor) -> None:
        """Copy window and state after node ``steps`` of each draft to slot ``index``, both [bs] int64, for requests
        that are ``live``."""
        place = torch.arange(len(steps), device=steps.device)
        for layer in self.states.layers:
            for pool, scratch in zip(self.pools(layer), self.scratch(layer), strict=True):
                self.store(pool, scratch[place, steps.clamp(min=0)], index.clamp(min=0), live & (steps >= 0))

    def move_to_first_slots(self, steps: torch.Tensor, lists: torch.Tensor) -> None:
        """Move the state of node ``steps`` [bs] int64 to the first slot of ``lists`` [bs, N], and the window to column
        0 of that slot. Columns are gathered before any is written, because the two ranges overlap."""
        live, lists, steps = self.stores(lists[:, 0]) & (steps >= 0), lists.clamp(min=0), steps.clamp(min=0)
        first, source = lists[:, 0], lists.gather(1, steps[:, None])[:, 0]
        for layer in self.states.layers:
            conv, temporal = self.pools(layer)
            self.store(temporal, temporal[source], first, live)
            columns = layer.conv_width - 1
            at = steps[:, None] + torch.arange(columns, device=conv.device)
            held = conv[first]
            window = held.gather(2, at[:, None].expand(-1, held.shape[1], -1))
            self.store(conv[..., :columns], window, first, live)

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, live: torch.Tensor) -> None:
        """Write rows into slots; for a request that is not ``live``, slot 0 is written with its present contents."""
        index, live = torch.where(live, index, 0), live.view(-1, *[1] * (rows.dim() - 1))
        pool.index_put_((index,), torch.where(live, rows, pool[index]))

    def convolved(
        self, rows: torch.Tensor, window: torch.Tensor, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [bs, C] after the convolution, in the model's dtype, and windows [bs, C, columns] after them."""
        if layer.conv_weight is None:
            return rows, window
        every = torch.cat([window, rows[..., None]], -1)
        found = (every[..., -layer.conv_width :].float() * layer.conv_weight.float()).sum(-1)
        if layer.conv_bias is not None:
            found = found + layer.conv_bias.float()
        if layer.activation == "silu":
            found = torch.nn.functional.silu(found)
        return found.to(rows.dtype), self.window_after(every)

    def window_after(self, every: torch.Tensor) -> torch.Tensor:
        """[bs, C, columns] of one column more: the last inputs."""
        return every[..., 1:]

    def split(self, rows: torch.Tensor, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [bs, Hv, K] and v [bs, Hv, V] in float32 of mixed rows [bs, C]; Mamba2: C, B and x."""
        keys, values = layer.k_heads * layer.k_dim, layer.v_heads * layer.v_dim
        if not layer.of_kind.value_part:
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
        """States [bs, Hv, V, K] float32 after one token of each request, and what the token reads from them [bs, Hv,
        V]."""
        if layer.k_k is not None:
            return self.step_of_rwkv(state, q, k, v, a, b, layer)
        decay, beta = self.gates(a, b, layer)
        state = state * decay[..., None, :]
        if layer.of_kind.normalizes:
            q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
            q = q * layer.scaling
            v = v - (state * k[..., None, :]).sum(-1)
        state = state + (beta * v)[..., None] * k[..., None, :]
        read = (state * q[..., None, :]).sum(-1)
        if layer.D is not None:
            read = read + layer.D[:, None] * v
        return state, read

    def step_of_rwkv(
        self,
        state: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``step`` of RWKV-7: what kappa reads of the state before its decay is removed."""
        assert a is not None
        assert b is not None
        assert layer.k_k is not None
        assert layer.k_a is not None
        decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(a.float())).view_as(k)
        eta = torch.sigmoid(b.float()).view_as(k)
        kappa = torch.nn.functional.normalize(k * layer.k_k, dim=-1)
        k = k * (1 + (eta - 1) * layer.k_a)
        removed = (state * kappa[..., None, :]).sum(-1)
        state = state * decay[..., None, :] - removed[..., None] * (eta * kappa)[..., None, :]
        state = state + v[..., None] * k[..., None, :]
        return state, (state * q[..., None, :]).sum(-1)

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decay [bs or 1, Hv, 1 or K] and the factor of the stored update [bs or 1, Hv, 1], in float32."""
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
        if layer.of_kind.steps:
            return decay, gate
        assert b is not None
        return decay, torch.sigmoid(b.float())[..., None]
