"""SGLang's Triton kernels, by the contract: decode, extend, and decode of MLA. The kernels are those of its wheel.

PYTHONPATH=tests/kernels attn-testkit run --backend sglang_kernels:Decode
"""

from __future__ import annotations

from typing import Any

import torch
from alone import SGLANG, SGLANG_STORE, load

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    LayerOptions,
    Needs,
    Precision,
    Promises,
    ServerConventions,
    Sparse,
)

_OPS = "sglang.kernels.ops.attention"
_SPLITS = 8
_DECODES = frozenset({ForwardMode.DECODE, ForwardMode.DRAFT_DECODE})
_EXTENDS = frozenset(ForwardMode) - _DECODES


class Decode(KernelBackend):
    """``decode_attention_fwd``: one row for each request, over lists of slots, in splits of the keys."""

    capabilities = Capabilities(
        eager=_DECODES,
        graph=_DECODES,
        heads=HeadShapes(families={"gqa", "mqa"}, head_dims={64, 128, 256}),
        kv_pool=KVPools(kv_dtypes={"same"}, page_sizes={1, 16, 64}),
        bounds=Bounds(max_draft_branches=4),
        options=LayerOptions(logit_cap=True, sinks=True),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_none_kv=True),
        promises=Promises(deterministic=True),
    )
    is_mla = False

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer, (rows, heads, _) = plan.layer, q.shape
        k, v = (pages.flatten(0, 1) for pages in kv)
        out = q.new_empty(rows, heads, layer.v_head_dim)
        partial = q.new_empty(rows, heads, _SPLITS, layer.v_head_dim, dtype=torch.float32)
        lse = q.new_empty(rows, heads, _SPLITS, dtype=torch.float32)
        splits = torch.full((rows,), _SPLITS, dtype=torch.int32, device=q.device)
        module = load(f"{_OPS}.decode_attention", SGLANG)
        module.decode_attention_fwd(
            q, k, v, out, plan.kv_indptr, plan.kv_indices, partial, lse, splits, _SPLITS, layer.scaling, layer.k_scale,
            layer.v_scale, logit_cap=layer.logit_cap, sinks=layer.sinks, has_mla=self.is_mla,
        )  # fmt: skip
        return out


class DecodeMHA(Decode):
    """The same call with as many KV heads as query heads: another kernel, which rounds each product of q and k. It is
    outside of the limits where logits are large, so that decode is enough to see it."""

    capabilities = Decode.capabilities.with_changes(
        eager={"decode"},
        graph=frozenset(),
        heads={"families": {"mha"}, "gqa_ratios": {1}},
        bounds={"max_draft_branches": 1},
    )


class DecodeMLA(Decode):
    """The same with ``has_mla``: values are the first columns of the keys."""

    capabilities = Decode.capabilities.with_changes(
        heads={"families": {"mla"}, "head_dims": {512}, "mla_rope_dims": {64}, "gqa_ratios": {4, 16, 128}},
        options={"logit_cap": False, "sinks": False},
    )
    is_mla = True


class DecodeMLARope32(DecodeMLA):
    """Latent rows of 512 + 32 as well, for which the launcher has no split of its own."""

    capabilities = DecodeMLA.capabilities.with_changes(
        eager={"decode"}, graph=frozenset(), heads={"mla_rope_dims": {32, 64}}, bounds={"max_draft_branches": 1}
    )


class Extend(KernelBackend):
    """``extend_attention_fwd``: the step's own rows as given, the prefix from the pool. Chains and trees."""

    capabilities = Capabilities(
        eager=_EXTENDS,
        graph=_EXTENDS,
        heads=HeadShapes(families={"mha", "gqa", "mqa"}, head_dims={64, 128, 256}),
        kv_pool=KVPools(page_sizes={1, 16, 64}),
        bounds=Bounds(max_q_rows=8, max_topk=4),
        options=LayerOptions(logit_cap=True, sinks=True),
        needs=Needs(cpu_seq_lens=False),
        promises=Promises(deterministic=True),
        precision=Precision(new_rows_as_given=_EXTENDS),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer = plan.layer
        k, v = (pages.flatten(0, 1) for pages in kv)
        new_k, new_v = plan.k, plan.v
        if new_k is None or new_v is None:
            new_k, new_v = k[plan.out_cache_loc], v[plan.out_cache_loc]
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        mask, starts = self._mask_of(plan)
        module = load(f"{_OPS}.extend_attention", SGLANG)
        module.extend_attention_fwd(
            q, new_k, new_v, out, k, v, plan.cu_seqlens_q, plan.prefix_indptr, plan.prefix_indices, mask, True, starts,
            plan.max_q_len, layer.k_scale, layer.v_scale, sm_scale=layer.scaling, logit_cap=layer.logit_cap,
            sinks=layer.sinks,
        )  # fmt: skip
        return out

    def _mask_of(self, plan: KernelPlan) -> tuple[Any, Any]:
        """The mask that SGLang's workers give: [n, prefix + n] of each request, one behind the other. All of a tree is
        as long as the longest table, so that shapes follow no length."""
        if plan.mask is None:
            return None, None
        bs, n, _ = plan.mask.shape
        widest = plan.max_kv_len + n
        columns = plan.prefix_lens.long() + n
        starts = torch.arange(bs, device=columns.device) * (n * widest)
        column = torch.arange(widest, device=columns.device)
        node = column - plan.prefix_lens.long()[:, None]
        block = plan.mask.gather(2, node.clamp(0, n - 1)[:, None].expand(bs, n, widest))
        seen = torch.where(node[:, None] < 0, True, block)
        mask = torch.zeros(bs * n * widest + 1, dtype=torch.bool, device=columns.device)
        row = torch.arange(n, device=columns.device)[None, :, None]
        at = starts[:, None, None] + row * columns[:, None, None] + column
        inside = (column < columns[:, None])[:, None].expand(bs, n, widest)
        mask[torch.where(inside, at, bs * n * widest)] = seen & inside
        return mask.view(torch.int8), starts


_SPARSE = Capabilities(
    eager=frozenset(ForwardMode),
    graph=frozenset(ForwardMode),
    heads=HeadShapes(families={"mla"}, head_dims={512}, mla_rope_dims={64}, gqa_ratios={4, 16, 64}),
    precision=Precision(dtypes={"bf16"}),
    kv_pool=KVPools(page_sizes={1, 64}),
    bounds=Bounds(max_q_rows=8, max_topk=1, max_draft_branches=4),
    sparse=Sparse(topk={64, 128, 2048}, index_space="slots", holes=True, empty_rows=True),
    needs=Needs(cpu_seq_lens=False),
)


class SparseMLAPrefill(KernelBackend):
    """``sparse_mla_prefill`` of DSA: one program for a row gathers its slots."""

    capabilities = _SPARSE
    union = 0
    """Adjacent rows that gather the union of their slots together."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        module, latent = load(f"{_OPS}.dsa.triton_sparse_mla_prefill", SGLANG), kv[0].flatten(0, 2)
        found: torch.Tensor = module.sparse_mla_prefill(
            q, latent, plan.selected, plan.layer.scaling, plan.layer.v_head_dim, union=self.union
        )
        return found


class SparseMLAPrefillUnion2(SparseMLAPrefill):
    """The same with ``union=2``. A padded row of a draft may have keys that a later forward stores."""

    capabilities = _SPARSE.with_changes(eager=_SPARSE.eager - _DECODES, graph=_SPARSE.graph - _DECODES)
    union = 2


class SparseMLAPrefillUnion4(SparseMLAPrefillUnion2):
    """The same with ``union=4``."""

    union = 4


class SparseMLAForward(KernelBackend):
    """``triton_sparse_mla_fwd`` of DSA: one pass, or splits of the selected keys where there are few rows."""

    capabilities = _SPARSE

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        module, width = load(f"{_OPS}.dsa.triton_sparse_mla", SGLANG), plan.layer.v_head_dim
        assert plan.selected is not None
        found: torch.Tensor = module.triton_sparse_mla_fwd(
            q[..., :width], q[..., width:], kv[0].flatten(0, 1), plan.selected[:, None], plan.layer.scaling, width
        )
        return found[0]


class SparseMLAPacked(KernelBackend):
    """Packed rows of 656 bytes: stored by ``quantize_k_cache_separate`` and ``set_mla_kv_buffer_triton``, and read by
    ``dequantize_k_cache_paged_dsa`` into bf16 rows, which ``sparse_mla_prefill`` attends, as prefills do."""

    capabilities = _SPARSE.with_changes(kv_pool={"kv_dtypes": {"fp8_ds_mla"}})

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        layer, quantize = plan.layer, load("sglang.kernels.ops.quantization.dsa_quant_k_cache", SGLANG)
        store = load("sglang.kernels.ops.kvcache.mla_buffer", SGLANG_STORE)
        latent, rope = quantize.quantize_k_cache_separate(k[..., : layer.kv_lora_rank], k[..., layer.kv_lora_rank :])
        buffer = self.context.kv_pool.get_key_buffer(layer.layer_id)
        store.set_mla_kv_buffer_triton(buffer, plan.out_cache_loc, latent, rope)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        dequantize = load(f"{_OPS}.dsa.dequant_k_cache", SGLANG)
        prefill = load(f"{_OPS}.dsa.triton_sparse_mla_prefill", SGLANG)
        assert plan.selected is not None
        rows, selected = kv[0].flatten(0, 1).view(torch.float8_e4m3fn), plan.selected
        slots = selected.clamp(min=0).flatten()
        place = torch.arange(max(len(slots), len(rows)), dtype=torch.int32, device=q.device)
        if len(rows) < len(slots):
            # Each row once, as a server does for the keys of a request: the kernel has a program per 128 numbers.
            slots = place[: len(rows)].to(slots.dtype)
        else:
            selected = torch.where(selected < 0, -1, place[: len(slots)].view_as(selected))
        latent = dequantize.dequantize_k_cache_paged_dsa(rows, slots)
        found: torch.Tensor = prefill.sparse_mla_prefill(
            q, latent[:, 0], selected, plan.layer.scaling, plan.layer.v_head_dim
        )
        return found
