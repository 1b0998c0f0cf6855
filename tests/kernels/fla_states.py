"""Kernels of flash-linear-attention (``fla-core``), by the contract of states: GDN, KDA, Mamba2 and Lightning.

PYTHONPATH=tests/kernels attn-testkit run --backend fla_states:FLA

FLA knows neither slots nor a convolution with a pool: the adapter gathers states, runs a kernel, and scatters them.
The convolution and the gates are in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    Needs,
    Precision,
    ServerConventions,
    State,
    StateBackend,
    StateInput,
    StateLayer,
)


def kernels(kind: str) -> tuple[Any, Any]:
    """The recurrent kernel and the chunked one. Mamba2 and Lightning are a simple gated linear attention."""
    if kind == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

        return fused_recurrent_gated_delta_rule, chunk_gated_delta_rule
    if kind == "kda":
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        return fused_recurrent_kda, chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    return fused_recurrent_simple_gla, chunk_simple_gla


class FLA(StateBackend):
    """``fused_recurrent_*`` for a row of each request, ``chunk_*`` for prompts."""

    capabilities = Capabilities(
        eager={"decode", "extend", "target-verify"},
        graph={"decode", "target-verify"},
        heads=HeadShapes(families={"gdn", "kda", "mamba", "lightning"}, gqa_ratios={1, 2, 4}, head_dims={64, 128}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={16}),
        bounds=Bounds(max_q_rows=6, max_topk=1),
        needs=Needs(cpu_seq_lens=False),
        state=State(
            k_dims={64, 128},
            dtypes={"fp32", "bf16"},
            conv_widths={1, 4},
            padding={"skip_minus_one", "skip_zero"},
            fresh={"flag", "zeroed"},
            rollback={"commit", "slots"},
            strided=True,
            products="model",
        ),
        server=ServerConventions(eager_without_waits=False),
    )

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Slots, rows and, for each row and tap, where its input lies: behind all windows, or in them."""
        state, rows, bs = batch.state, batch.input_ids.shape[0], batch.batch_size
        assert state is not None
        device = batch.seq_lens.device
        listed = state.indices.view(bs, -1).long()
        self.live, self.lists = listed[:, 0] > 0, listed.clamp(min=0)
        self.taken = self.lists[:, 0]
        if state.num_accepted is not None:
            self.taken = self.lists.gather(1, state.num_accepted.long()[:, None] - 1)[:, 0]
        self.begun = torch.ones_like(self.live) if state.has_initial_state is None else state.has_initial_state
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            self.counts = batch.extend_seq_lens.long()
        else:
            self.counts = torch.full((bs,), rows // max(bs, 1), dtype=torch.int64, device=device)
        ends = self.counts.cumsum(0)
        self.starts = torch.cat([ends.new_zeros(1), ends])
        self.request = torch.searchsorted(ends, torch.arange(rows, device=device), right=True).clamp(max=bs - 1)
        self.accepted = state.num_accepted

    @override
    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        pool = self.context.state.pool
        conv, temporal = pool.conv(layer.layer_id), pool.temporal(layer.layer_id)
        columns = layer.conv_width - 1
        before = self.windows(conv, columns) if columns else None
        rows = mixed if before is None else self.convolved(mixed, before, layer)
        given = self.arguments(rows, a, b, layer)
        state = temporal[self.taken].float().masked_fill(~self.begun[:, None, None, None], 0.0)
        recurrent, chunked = kernels(layer.kind)
        common = {"output_final_state": True, "state_v_first": True, "scale": layer.scaling}
        if layer.kind in ("gdn", "kda"):
            common["use_qk_l2norm_in_kernel"] = True
        else:
            common["scale"] = 1.0
        bs, nodes = batch.batch_size, len(mixed) // max(batch.batch_size, 1)
        if batch.forward_mode is ForwardMode.EXTEND:
            packed = {name: each[None] for name, each in given.items()}
            out, state = chunked(**packed, **common, initial_state=state, cu_seqlens=self.starts)
            self.store(temporal, state, self.lists[:, 0])
            out = out[0]
        else:
            outs = []
            for node in range(nodes):
                one = {name: each.view(bs, nodes, *each.shape[1:])[:, node : node + 1] for name, each in given.items()}
                one = {name: each.contiguous() for name, each in one.items()}
                found, state = recurrent(**one, **common, initial_state=state)
                outs.append(found)
                if self.accepted is not None:
                    self.store(temporal, state, self.lists[:, node])
                elif batch.forward_mode.is_target_verify():
                    pool.scratch(layer.layer_id)[1][:bs, node] = state.to(temporal.dtype)
            if not batch.forward_mode.is_target_verify():
                self.store(temporal, state, self.lists[:, 0])
            out = torch.cat(outs, 1).flatten(0, 1)
        if before is not None:
            self.keep_windows(mixed, before, layer, batch, nodes)
        if layer.kind == "mamba":
            values = rows[:, : layer.v_heads * layer.v_dim].view(-1, layer.v_heads, layer.v_dim)
            out = out.float() + layer.D[:, None] * values.float()
        return out.to(mixed.dtype)

    def windows(self, conv: torch.Tensor, columns: int) -> torch.Tensor:
        """[bs, C, W - 1] before the step."""
        held = conv[self.lists[:, 0]]
        if self.accepted is not None:
            at = self.accepted.long()[:, None] - 1 + torch.arange(columns, device=conv.device)
            held = held.gather(2, at[:, None].expand(-1, held.shape[1], -1))
        return held.masked_fill(~self.begun[:, None, None], 0)

    def inputs(
        self, mixed: torch.Tensor, before: torch.Tensor, request: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """[..., C]: inputs ``at`` (from the first row of ``request`` on; negative: in its window)."""
        columns = before.shape[2]
        held = before.transpose(1, 2).reshape(-1, before.shape[1])
        every = torch.cat([held, mixed])
        index = torch.where(at < 0, request * columns + columns + at, len(held) + self.starts[request] + at)
        return every[index]

    def convolved(self, mixed: torch.Tensor, before: torch.Tensor, layer: StateLayer) -> torch.Tensor:
        """[T, C] in the model's dtype."""
        width = layer.conv_width
        place = torch.arange(len(mixed), device=mixed.device) - self.starts[self.request]
        taps = torch.arange(width, device=mixed.device) - width + 1
        found = self.inputs(mixed, before, self.request[:, None], place[:, None] + taps)
        rows = (found.float() * layer.conv_weight.float().T).sum(1)
        if layer.conv_bias is not None:
            rows = rows + layer.conv_bias.float()
        return (torch.nn.functional.silu(rows) if layer.activation == "silu" else rows).to(mixed.dtype)

    def keep_windows(
        self, mixed: torch.Tensor, before: torch.Tensor, layer: StateLayer, batch: ForwardBatch, nodes: int
    ) -> None:
        """Store the last inputs of each request, or those behind each node."""
        pool, columns, bs = self.context.state.pool, before.shape[2], len(before)
        conv = pool.conv(layer.layer_id)
        request, back = torch.arange(bs, device=mixed.device)[:, None], torch.arange(columns, device=mixed.device)
        if self.accepted is not None:
            at = torch.arange(columns + nodes - 1, device=mixed.device) - columns + 1
            self.store(conv, self.inputs(mixed, before, request, at[None]).transpose(1, 2), self.lists[:, 0])
        elif batch.forward_mode.is_target_verify():
            for node in range(nodes):
                at = node + 1 - columns + back
                found = self.inputs(mixed, before, request, at[None]).transpose(1, 2)
                pool.scratch(layer.layer_id)[0][:bs, node] = found
        else:
            at = self.counts[:, None] - columns + back
            self.store(conv, self.inputs(mixed, before, request, at).transpose(1, 2), self.lists[:, 0])

    def arguments(
        self, rows: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> dict[str, torch.Tensor]:
        """Return q, k and v [T, Hv, ...] and the gates as FLA's kernels expect them."""
        keys, values, ratio = layer.k_heads * layer.k_dim, layer.v_heads * layer.v_dim, layer.v_heads // layer.k_heads
        parts = [values, keys, keys] if layer.kind == "mamba" else [keys, keys, values]
        first, second, third = torch.split(rows, parts, -1)
        q, k, v = (third, second, first) if layer.kind == "mamba" else (first, second, third)
        q, k = (each.reshape(-1, layer.k_heads, layer.k_dim).repeat_interleave(ratio, 1) for each in (q, k))
        v = v.reshape(-1, layer.v_heads, layer.v_dim)
        if layer.slope is not None:
            return {"q": q, "k": k, "v": v, "g": (-layer.slope).expand(len(rows), -1).contiguous()}
        rate, gate = layer.A_log.exp(), a.float().view(len(rows), layer.v_heads, -1)
        gate = gate + layer.dt_bias.view(layer.v_heads, -1)
        if layer.lower_bound is not None:
            g = layer.lower_bound * torch.sigmoid(rate[:, None] * gate)
        else:
            gate = torch.nn.functional.softplus(gate)
            g = -rate[:, None] * gate
        if layer.kind == "mamba":
            # In float32: D x is still to be added, and nothing may be rounded before it.
            return {"q": q.float(), "k": k.float(), "v": v.float() * gate, "g": g[..., 0].contiguous()}
        g = g.contiguous() if layer.kind == "kda" else g[..., 0].contiguous()
        return {"q": q, "k": k, "v": v, "g": g, "beta": torch.sigmoid(b.float())}

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        """Write rows into slots; where a request is padded, slot 0 gets back what it holds."""
        index, live = torch.where(self.live, index, 0), self.live.view(-1, *[1] * (rows.dim() - 1))
        pool.index_put_((index,), torch.where(live, rows.to(pool.dtype), pool[index]))

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        pool, place = self.context.state.pool, torch.arange(len(steps), device=steps.device)
        index, live = state.indices.long().clamp(min=0), (steps >= 0) & (state.indices > 0)
        for layer in self.context.state.layers:
            held = pool.conv(layer.layer_id), pool.temporal(layer.layer_id)
            for part, scratch in zip(held, pool.scratch(layer.layer_id), strict=True):
                if part.numel():
                    rows = scratch[place, steps.long().clamp(min=0)]
                    part[index] = torch.where(live.view(-1, *[1] * (rows.dim() - 1)), rows, part[index])
