"""FlashInfer's kernels of Gated DeltaNet: ``gated_delta_rule_decode_pretranspose``, ``gated_delta_rule_mtp`` and
``chunk_gated_delta_rule``, over the pool of states.

They compute only the recurrence: convolution and windows come from ``torch_native_state``. Keys and values have a width
of
128. On SM90 CuTe DSL compiles them at the first call.
"""

from __future__ import annotations

from typing import ClassVar

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
    Requires,
    State,
    StateLayer,
)

from .torch_native_state import TorchNativeStateBackend
from .vendor import provide, why_not_here
from .vendor.gdn_kernels import DECODE, PREFILL, VERIFY


class FlashInferGDNBackend(TorchNativeStateBackend):
    """States in fp32. A verification keeps the state after each node in a buffer, or in a slot of the pool."""

    not_here = why_not_here(DECODE)
    capabilities: ClassVar[Capabilities] = Capabilities(
        eager={ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY},
        graph={ForwardMode.DECODE, ForwardMode.TARGET_VERIFY},
        bounds=Bounds(max_q_rows=6, max_topk=1),
        heads=HeadShapes(families={"gdn"}, gqa_ratios={1, 2, 4}, head_dims={128}),
        # Outputs are bf16, whatever q is.
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={16}),
        # A request whose index is -1 is skipped. Prefill has no flag: the server zeroes slots, as SGLang's does.
        state=State(
            k_dims={128},
            dtypes={"fp32"},
            conv_widths={4},
            padding={"skip_minus_one", "skip_zero"},
            fresh={"zeroed"},
            rollback={"commit", "slots"},
            products="model",
        ),
        needs=Needs(cpu_seq_lens=False),
        requires=Requires(
            sm=((90, 90), (100, 103), (120, 121)),
            packages=("flashinfer-python>=0.7.2,<0.8",),
            compilers=("nvidia-cutlass-dsl>=4.6.2",),
        ),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        decode = provide(DECODE, context.device)
        self.decode, self.verify = decode.call, provide(VERIFY, context.device).call
        self.kernels = decode.kernels
        if ForwardMode.EXTEND in context.modes:
            self.prefill = provide(PREFILL, context.device).call

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute slots and rows of the requests, and the indices that the kernels need."""
        super().init_forward_metadata_in_graph(batch)
        self.indices = torch.where(self.live, self.taken, -1).int()
        self.node_slots = torch.where(self.live[:, None], self.lists, -1).int()
        self.starts = torch.cat([self.first, self.counts.sum()[None]])

    @override
    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """[T, Hv, V] in the model's dtype: the convolution in torch, then one call for all requests."""
        assert a is not None
        assert b is not None
        if not batch.batch_size:
            return mixed.new_zeros(len(mixed), layer.v_heads, layer.v_dim)
        rows, keys = self.convolve(mixed, layer, batch), layer.k_heads * layer.k_dim
        q, k, v = torch.split(rows, [keys, keys, layer.v_heads * layer.v_dim], -1)
        parts = [each.reshape(len(rows), -1, layer.k_dim) for each in (q, k, v)]
        pool = self.pools(layer)[1]
        if batch.forward_mode is ForwardMode.EXTEND:
            return self.extend(parts, a, b, layer, pool)
        bs = batch.batch_size
        q, k, v = (each.reshape(bs, -1, *each.shape[1:]) for each in parts)
        gates = {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
        gates |= {name: each.reshape(bs, -1, layer.v_heads) for name, each in (("a", a), ("b", b))}
        if batch.forward_mode.is_target_verify() and q.shape[1] == 1:
            out = self.verified_root(q, k, v, gates, layer, pool)
        elif batch.forward_mode.is_target_verify():
            out = self.verified(q, k, v, gates, pool, None if self.by_slots else self.scratch(layer)[1][:bs])
        else:
            out, _ = self.decode(
                q,
                k,
                v,
                state=None,
                scale=layer.scaling,
                initial_state=pool,
                initial_state_indices=self.indices,
                **gates,
            )
        return out.reshape(len(rows), layer.v_heads, layer.v_dim)

    def verified(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: dict[str, torch.Tensor | None],
        pool: torch.Tensor, nodes: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """[bs, N, Hv, V] of drafts; the state after a node goes to ``nodes`` [bs, N, Hv, V, K], or to its slot."""
        scale = q.shape[-1] ** -0.5
        if nodes is None:
            kept = {"ssm_state_indices": self.node_slots, "disable_state_update": False}
        else:
            kept = {"intermediate_states_buffer": nodes, "disable_state_update": True}
        out: torch.Tensor = self.verify(q, k, v, pool, self.indices, scale=scale, **gates, **kept)[0]
        return out

    def verified_root(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: dict[str, torch.Tensor | None],
        layer: StateLayer, pool: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """[bs, 1, Hv, V] of drafts of one node, computed as a decode of copied states: the kernels for drafts need two
        nodes."""
        behind = pool[self.taken]
        places = torch.arange(len(behind), dtype=torch.int32, device=pool.device)
        pooled = {"initial_state": behind, "initial_state_indices": places}
        out: torch.Tensor = self.decode(q, k, v, state=None, scale=layer.scaling, **pooled, **gates)[0]
        if self.by_slots:
            self.store(pool, behind, self.index, self.live)
        else:
            self.scratch(layer)[1][: len(behind), 0] = behind
        return out

    def extend(
        self, parts: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor, layer: StateLayer, pool: torch.Tensor
    ) -> torch.Tensor:
        """[T, Hv, V] of prompts; states are read from the pool and stored in it."""
        assert layer.A_log is not None
        assert layer.dt_bias is not None
        gate = torch.nn.functional.softplus(a.float() + layer.dt_bias)
        q, k, v = (each.contiguous() for each in parts)
        out: torch.Tensor = self.prefill(
            q, k, v, g=torch.exp(-layer.A_log.exp() * gate), beta=torch.sigmoid(b.float()), scale=layer.scaling,
            initial_state=pool, output_final_state=True, cu_seqlens=self.starts, use_qk_l2norm_in_kernel=True,
            output_state=pool, state_indices=self.index,
        )[0]  # fmt: skip
        return out

    def convolve(self, mixed: torch.Tensor, layer: StateLayer, batch: ForwardBatch) -> torch.Tensor:
        """[T, C] after the convolution; windows are stored as the mode requires."""
        assert batch.state is not None
        verifies = batch.forward_mode.is_target_verify()
        conv = self.pools(layer)[0]
        window = self.windows(conv[self.index], batch.state, layer.conv_width - 1)
        window = window.masked_fill(~self.begun[:, None, None], 0)
        out = torch.zeros(len(mixed) + 1, mixed.shape[1], dtype=mixed.dtype, device=mixed.device)
        for token in range(self.width):
            now = token < self.counts
            row = (self.first + token).clamp(max=len(mixed) - 1)
            one, moved = self.convolved(mixed[row], window, layer)
            window = torch.where(now[:, None, None], moved, window)
            out.index_copy_(0, torch.where(now, row, len(mixed)), one)
            if self.by_slots:
                self.store_window(conv, token, mixed[row], window)
            elif verifies:
                self.scratch(layer)[0][: len(window), token] = window
        if not verifies:
            # If drafts have slots, the pool's windows have columns for their tokens, too.
            self.store(conv[..., : window.shape[-1]], window, self.index, self.live)
        return out[:-1]


class FlashInferGDNBF16Backend(FlashInferGDNBackend):
    """States in bf16, with a different kernel. It treats -1 as slot 0, so padded requests write that slot."""

    capabilities: ClassVar[Capabilities] = FlashInferGDNBackend.capabilities.with_changes(
        state={"dtypes": {"bf16"}, "padding": {"write_zero"}, "rollback": {"commit"}}
    )

    @override
    def verified(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: dict[str, torch.Tensor | None],
        pool: torch.Tensor, nodes: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """The entry point of decode serves drafts as well."""
        kept = {"intermediate_states_buffer": nodes, "disable_state_update": True}
        pooled = {"initial_state": pool, "initial_state_indices": self.indices}
        out: torch.Tensor = self.decode(q, k, v, state=None, scale=q.shape[-1] ** -0.5, **pooled, **gates, **kept)[0]
        return out
