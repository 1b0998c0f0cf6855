"""vLLM's Triton kernels, by the contract: unified attention, prefix prefill, paged decode, decode of MLA.

PYTHONPATH=tests/kernels attn-testkit run --backend vllm_kernels:Unified
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from alone import VLLM, load

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVLayer,
    KVPools,
    KVPoolSpec,
    LayerOptions,
    Needs,
    Precision,
    Promises,
    ServerConventions,
    Sparse,
)

_OPS = "vllm.v1.attention.ops"
_MODES = frozenset(ForwardMode)
_SPLITS = 4


class Unified(KernelBackend):
    """``unified_attention``: every mode over pages. Chains alone."""

    capabilities = Capabilities(
        eager=_MODES,
        graph=_MODES,
        heads=HeadShapes(families={"mha", "gqa", "mqa"}, head_dims={64, 128, 256}),
        kv_pool=KVPools(page_sizes={16, 32, 64}),
        bounds=Bounds(max_q_rows=8, max_topk=1, max_draft_branches=4),
        windows=_MODES,
        options=LayerOptions(logit_cap=True, sinks=True),
        needs=Needs(cpu_seq_lens=False),
        promises=Promises(deterministic=True),
        server=ServerConventions(
            takes_none_kv=True, padded_requests={"rows", "nothing"}, verify_lens={"prefix", "all"}
        ),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer, module = plan.layer, load(f"{_OPS}.triton_unified_attention", VLLM)
        # Without keys the kernel stores nothing, and so it does for requests without rows.
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        fp8 = kv[0].dtype == torch.float8_e4m3fn
        module.unified_attention(
            q, *kv, out, plan.cu_seqlens_q, plan.max_q_len, plan.kv_lens, plan.max_kv_len, layer.scaling, True,
            (layer.sliding_window_size, 0), plan.page_table, layer.logit_cap, None, plan.k_scale, plan.v_scale,
            sinks=layer.sinks, kv_quant_mode=module.KVQuantMode.FP8_PER_TENSOR if fp8 else module.KVQuantMode.NONE,
        )  # fmt: skip
        return out


class UnifiedFP8(Unified):
    """The same over an FP8 pool, queries in the model's dtype."""

    capabilities = Unified.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_e4m3"}})


class UnifiedPerTokenHead(Unified):
    """The same over int8 and FP8 with a scale per token and head, and vLLM's own store
    (``TritonAttentionImpl.do_kv_cache_update``). Scales lie in the row, as in vLLM 0.33, or in memory of their own."""

    capabilities = Unified.capabilities.with_changes(
        kv_pool={
            "kv_dtypes": {"int8_per_token_head", "fp8_per_token_head", "int8_per_token_head_apart"},
            "kv_layouts": {"nhd", "side-by-side-hnd"},
        },
        precision={"dtypes": {"bf16"}},
        server={"padding_slots": {0, -1}},
    )

    def planes(self, plan: KernelPlan, module: Any) -> dict[str, Any]:
        """Arguments about the cache: views of numbers and scales, and the mode."""
        k, v = self.context.group_of(plan.layer).kv_pool.get_planes(plan.layer.layer_id)
        int8 = k["numbers"].dtype == torch.int8
        modes = module.KVQuantMode
        return {
            "rows": (k["numbers"], v["numbers"]),
            "k_scale_cache": k["scales"].squeeze(-1),
            "v_scale_cache": v["scales"].squeeze(-1),
            "kv_quant_mode": modes.INT8_PER_TOKEN_HEAD if int8 else modes.FP8_PER_TOKEN_HEAD,
        }

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        module = load(f"{_OPS}.triton_reshape_and_cache_flash", VLLM)
        named = self.planes(plan, module)
        rows = named.pop("rows")
        module.triton_reshape_and_cache_flash_per_token_head_quant(
            k, v, *rows, slot_mapping=plan.out_cache_loc, **named
        )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer, module = plan.layer, load(f"{_OPS}.triton_unified_attention", VLLM)
        out, named = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim), self.planes(plan, module)
        module.unified_attention(
            q, *named.pop("rows"), out, plan.cu_seqlens_q, plan.max_q_len, plan.kv_lens, plan.max_kv_len, layer.scaling,
            True, (layer.sliding_window_size, 0), plan.page_table, layer.logit_cap, None, None, None,
            sinks=layer.sinks, **named,
        )  # fmt: skip
        return out


class UnifiedTF32(Unified):
    """The same in float32, whose dots are tf32."""

    capabilities = Unified.capabilities.with_changes(precision={"dtypes": {"fp32"}, "fp32_products": "tf32"})


class ChunkedPrefillPagedDecode(KernelBackend):
    """``chunked_prefill_paged_decode``: prefix prefill for requests of several rows, ``kernel_paged_attention_2d`` for
    those of one. Graphs of extend have requests without rows, and are not declared: see ``WithPaddedRequests``."""

    capabilities = Capabilities(
        eager=_MODES,
        graph=_MODES - {ForwardMode.EXTEND},
        heads=HeadShapes(families={"mha", "gqa", "mqa"}, head_dims={64, 128}),
        kv_pool=KVPools(page_sizes={16, 32, 64}, kv_layouts={"custom"}),
        bounds=Bounds(max_q_rows=8, max_topk=1, max_draft_branches=4),
        options=LayerOptions(sinks=True),
        needs=Needs(cpu_seq_lens=False),
        precision=Precision(new_rows_as_given=_MODES - {ForwardMode.DECODE, ForwardMode.DRAFT_DECODE}),
        promises=Promises(deterministic=True),
        server=ServerConventions(verify_lens={"prefix", "all"}),
    )

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        """K [blocks, heads, D / x, block, x] with x = D, V [blocks, heads, D, block]: ``split_kv_cache`` has x = 8."""
        found = []
        for each in spec.layers:
            heads, width = each.tp_k_head_num, each.head_dim
            make = torch.zeros if spec.cleared else torch.empty
            k = make(spec.pages, heads, spec.page_size, width, dtype=spec.dtype, device=spec.device)
            v = make(spec.pages, heads, width, spec.page_size, dtype=spec.dtype, device=spec.device)
            found.append(KVLayer(k.transpose(1, 2), v.permute(0, 3, 1, 2)))
        return found

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer, module = plan.layer, load(f"{_OPS}.chunked_prefill_paged_decode", VLLM)
        k_cache, v_cache = kv[0].transpose(1, 2).unsqueeze(2), kv[1].permute(0, 2, 3, 1)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        new = [plan.k, plan.v]
        if plan.k is None:  # the kernel takes a width and a head count from them; it reads them where rows are several
            new = [pages.flatten(0, 1)[plan.out_cache_loc] for pages in kv]
        module.chunked_prefill_paged_decode(
            q, *new, out, "auto", k_cache, v_cache, plan.page_table, plan.cu_seqlens_q, plan.kv_lens, plan.max_kv_len,
            plan.max_q_len, plan.k_scale, plan.v_scale, sliding_window=layer.sliding_window_size + 1,
            sm_scale=layer.scaling, sinks=layer.sinks,
        )  # fmt: skip
        return out


class WithPaddedRequests(ChunkedPrefillPagedDecode):
    """The padding of vLLM's full graphs, which the class of the server (``AttentionCGSupport.ALWAYS``) is given."""

    capabilities = ChunkedPrefillPagedDecode.capabilities.with_changes(
        graph=_MODES, server={"padded_requests": {"nothing"}}
    )


class Windowed(ChunkedPrefillPagedDecode):
    """Windows as well: the decode kernel gives keys outside of them a logit of -10000."""

    capabilities = ChunkedPrefillPagedDecode.capabilities.with_changes(windows=_MODES)


class PrefixPrefill(ChunkedPrefillPagedDecode):
    """``context_attention_fwd`` alone, for every mode whose requests have rows of their own."""

    capabilities = ChunkedPrefillPagedDecode.capabilities.with_changes(
        eager=_MODES - {ForwardMode.DRAFT_DECODE},
        graph=_MODES - {ForwardMode.DRAFT_DECODE},
        bounds={"max_draft_branches": 1},
        precision={"new_rows_as_given": _MODES},
        windows=_MODES,
        server={"padded_requests": {"rows", "nothing"}},
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer, module = plan.layer, load(f"{_OPS}.prefix_prefill", VLLM)
        k_cache, v_cache = kv[0].transpose(1, 2).unsqueeze(2), kv[1].permute(0, 2, 3, 1)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        module.context_attention_fwd(
            q, plan.k, plan.v, out, "auto", k_cache, v_cache, plan.page_table, plan.cu_seqlens_q, plan.kv_lens,
            plan.max_kv_len, plan.max_q_len, plan.k_scale, plan.v_scale,
            sliding_window=layer.sliding_window_size + 1, sm_scale=layer.scaling, sinks=layer.sinks,
        )  # fmt: skip
        return out


class DecodeMLA(KernelBackend):
    """``decode_attention_fwd`` with ``is_mla``."""

    capabilities = Capabilities(
        eager={"decode", "draft-decode"},
        graph={"decode", "draft-decode"},
        heads=HeadShapes(families={"mla"}, head_dims={512}, mla_rope_dims={32, 64}, gqa_ratios={4, 16, 128}),
        kv_pool=KVPools(page_sizes={16, 64}),
        bounds=Bounds(max_draft_branches=4),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_none_kv=True),
        promises=Promises(deterministic=True),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer, (rows, heads, _) = plan.layer, q.shape
        out = q.new_empty(rows, heads, layer.v_head_dim)
        lse: Any = q.new_empty(rows, heads, dtype=torch.float32)
        partial = q.new_empty(rows, heads, _SPLITS, layer.v_head_dim + 1, dtype=torch.float32)
        module = load(f"{_OPS}.triton_decode_attention", VLLM)
        module.decode_attention_fwd(
            q, *kv, out, lse, plan.page_table, plan.kv_lens, partial, _SPLITS, layer.scaling, plan.page_size,
            k_scale=plan.k_scale, v_scale=plan.v_scale, is_mla=layer.is_mla,
        )  # fmt: skip
        return out


class DecodeMLAOneHead(DecodeMLA):
    """One query head: the kernel of MHA, which rounds products of q and k and their sums to the model's dtype."""

    capabilities = DecodeMLA.capabilities.with_changes(
        eager={"decode"}, graph=frozenset(), heads={"gqa_ratios": {1}}, bounds={"max_draft_branches": 1}
    )


class GroupedDecode(DecodeMLA):
    """The same call for GQA: ``_fwd_grouped_kernel_stage1`` with pages."""

    capabilities = DecodeMLA.capabilities.with_changes(
        heads={"families": {"gqa", "mqa"}, "head_dims": {64, 128}, "gqa_ratios": {2, 4, 8}}
    )


class SparseMLA(KernelBackend):
    """``triton_bf16_mla_sparse_interface``: one program for a row and 16 query heads gathers the row's slots."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(families={"mla"}, head_dims={512}, mla_rope_dims={64}, gqa_ratios={16, 64}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={1, 64}),
        bounds=Bounds(max_q_rows=8, max_topk=1, max_draft_branches=4),
        sparse=Sparse(topk={64, 128, 2048}, index_space="slots", holes=True, empty_rows=True),
        needs=Needs(cpu_seq_lens=False),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        module = load("vllm.v1.attention.ops.xpu_mla_sparse", VLLM)
        found: torch.Tensor = module.triton_bf16_mla_sparse_interface(
            q, kv[0].flatten(0, 1), plan.selected[:, None], plan.layer.scaling
        )[0]
        return found
