"""LightLLM's decode kernels, by the contract. Those of the wheel 0.0.1, or of a checkout that stands in PYTHONPATH.

PYTHONPATH=tests/kernels attn-testkit run --backend lightllm_kernels:GQADecode
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from alone import LIGHTLLM, load

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    LayerOptions,
    Needs,
    Promises,
    ServerConventions,
)

_OPS = "lightllm.models.llama.triton_kernel"


class GQADecode(KernelBackend):
    """``gqa_decode_attention_fwd``: one row for each request, over a table of slots. The only scale is 1/sqrt(D)."""

    capabilities = Capabilities(
        eager={"decode", "draft-decode"},
        graph={"decode", "draft-decode"},
        heads=HeadShapes(families={"mha", "gqa", "mqa"}, head_dims={64, 128}),
        kv_pool=KVPools(page_sizes={1, 16}),
        bounds=Bounds(max_draft_branches=4),
        options=LayerOptions(any_scaling=False),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_none_kv=True),
        promises=Promises(deterministic=True),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        k, v = (pages.flatten(0, 1) for pages in kv)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        requests = torch.arange(len(q), dtype=torch.int32, device=q.device)
        module = load(f"{_OPS}.gqa_decode_flashattention_nopad", LIGHTLLM)
        module.gqa_decode_attention_fwd(q, k, v, out, plan.slot_table, requests, plan.kv_lens)
        return out


class FlashDecoding(GQADecode):
    """``token_decode_attention_flash_decoding``: q.k is multiplied and summed in the model's dtype."""

    capabilities = GQADecode.capabilities.with_changes(
        eager={"decode"},
        graph=frozenset(),
        heads={"families": {"mha"}, "gqa_ratios": {1}},
        bounds={"max_draft_branches": 1},
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        k, v = (pages.flatten(0, 1) for pages in kv)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        state = SimpleNamespace(
            batch_size=len(q), max_len_in_batch=plan.max_kv_len, b_seq_len=plan.kv_lens,
            b_req_idx=torch.arange(len(q), dtype=torch.int32, device=q.device),
            req_manager=SimpleNamespace(req_to_token_indexs=plan.slot_table),
        )  # fmt: skip
        load(f"{_OPS}.flash_decoding_stage1", LIGHTLLM), load(f"{_OPS}.flash_decoding_stage2", LIGHTLLM)
        module = load(f"{_OPS}.flash_decoding", LIGHTLLM)
        module.token_decode_attention_flash_decoding(q.contiguous(), state, q.shape[1], q.shape[2], k, v, out)
        return out
