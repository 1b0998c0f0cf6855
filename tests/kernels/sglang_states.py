"""SGLang's Triton kernels of recurrent states, by the contract: decode and verify of GDN and KDA.

PYTHONPATH=tests/kernels attn-testkit run --backend sglang_states:DeltaRule
"""

from __future__ import annotations

import torch
from alone import SGLANG, load
from typing_extensions import override

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    ForwardBatch,
    HeadShapes,
    KVPools,
    Needs,
    Precision,
    State,
    StateBackend,
    StateInput,
    StateLayer,
)

_OPS = "sglang.kernels.ops"
_GIVEN = {
    **SGLANG,
    "sglang.srt.utils": {
        **SGLANG.get("sglang.srt.utils", {}),
        "get_device_sm": lambda: 90,
        "is_sm90_supported": lambda: True,
    },
    "sglang.kernels.jit.utils": {**SGLANG.get("sglang.kernels.jit.utils", {}), "is_arch_support_pdl": lambda: False},
}  # fmt: skip


class DeltaRule(StateBackend):
    """``causal_conv1d_update``, then ``fused_sigmoid_gating_delta_rule_update``, as ``GDNAttnBackend`` calls them."""

    capabilities = Capabilities(
        eager={"decode", "target-verify"},
        graph={"decode", "target-verify"},
        heads=HeadShapes(families={"gdn", "kda"}, gqa_ratios={1, 2, 4}, head_dims={64, 128}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={16}),
        bounds=Bounds(max_q_rows=6, max_topk=1),
        state=State(k_dims={64, 128}, dtypes={"fp32", "bf16"}, conv_products="model"),
        needs=Needs(cpu_seq_lens=False),
    )

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        rows, bs = batch.input_ids.shape[0], batch.batch_size
        device = batch.seq_lens.device
        self.starts = torch.arange(bs + 1, dtype=torch.int32, device=device) * (rows // max(bs, 1))
        self.places = torch.arange(bs, dtype=torch.int32, device=device)

    @override
    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        assert batch.state is not None
        assert a is not None
        assert b is not None
        pool, rows, bs = self.context.state.pool, len(mixed), batch.batch_size
        verifies = batch.forward_mode.is_target_verify()
        windows, states = pool.scratch(layer.layer_id)
        x = mixed.contiguous()
        if verifies:
            x = x.view(bs, rows // bs, -1).transpose(1, 2)
        more = {"intermediate_conv_window": windows, "intermediate_state_indices": self.places} if verifies else {}
        x = load(f"{_OPS}.mamba.causal_conv1d_triton", _GIVEN).causal_conv1d_update(
            x, pool.conv(layer.layer_id), layer.conv_weight, layer.conv_bias,
            "silu" if layer.activation == "silu" else None, conv_state_indices=batch.state.indices, **more,
        )  # fmt: skip
        if verifies:
            x = x.transpose(1, 2).reshape(rows, -1)
        keys, values = layer.k_heads * layer.k_dim, layer.v_heads * layer.v_dim
        q, k, v = torch.split(x, [keys, keys, values], -1)
        more = {}
        if verifies:
            more = {
                "disable_state_update": True, "intermediate_states_buffer": states,
                "intermediate_state_indices": self.places, "cache_steps": rows // bs,
            }  # fmt: skip
        module = load(f"{_OPS}.attention.linear.fused_sigmoid_gating_recurrent", _GIVEN)
        out = module.fused_sigmoid_gating_delta_rule_update(
            A_log=layer.A_log, dt_bias=layer.dt_bias, q=q.view(1, rows, layer.k_heads, layer.k_dim),
            k=k.view(1, rows, layer.k_heads, layer.k_dim), v=v.view(1, rows, layer.v_heads, layer.v_dim),
            a=a.contiguous(), b=b.contiguous(), initial_state_source=pool.temporal(layer.layer_id),
            initial_state_indices=batch.state.indices, cu_seqlens=self.starts, use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0, softplus_threshold=20.0, is_kda=layer.kind == "kda", lower_bound=layer.lower_bound,
            **more,
        )  # fmt: skip
        return out.view(rows, layer.v_heads, layer.v_dim)

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        """In torch: SGLang scatters all layers in one kernel, which needs them in one tensor."""
        pool, place = self.context.state.pool, torch.arange(len(steps), device=steps.device)
        index, live = state.indices.long().clamp(min=0), steps >= 0
        for layer in self.context.state.layers:
            held = pool.conv(layer.layer_id), pool.temporal(layer.layer_id)
            for part, scratch in zip(held, pool.scratch(layer.layer_id), strict=True):
                rows = scratch[place, steps.long().clamp(min=0)]
                part[index] = torch.where(live.view(-1, *[1] * (rows.dim() - 1)), rows, part[index])
