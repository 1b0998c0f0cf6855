"""SGLang's kernels around an indexer: quantization and store of index keys, and the lookup of slots.

torch scores and selects here, because those kernels are CUDA (DeepGEMM's, and the top-k). Wheel: sglang 0.5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from alone import SGLANG, load

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseSlotsBackend
from attn_testkit.contract import INDEX_PAGE, ForwardMode, Indexer, KernelPlan, Sparse

__all__ = ["IndexerAmax", "IndexerPowersOfTwo"]

_GIVEN = {
    **SGLANG,
    "sglang.srt.utils": {**SGLANG["sglang.srt.utils"], "is_xpu": lambda: False},
    "sglang.srt.layers.attention.dsa.utils": {
        "INDEXER_K_CACHE_PRESHUFFLE_TILE": 16,  # read on ROCm only
        "aiter_can_use_preshuffle_paged_mqa": lambda: False,
    },
}
_MODES = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}


def _loaded(name: str) -> Any:
    return load(f"sglang.kernels.ops.{name}", _GIVEN)


class IndexerAmax(TorchNativeSparseSlotsBackend):
    """``act_quant``, ``SetKAndS.triton`` and ``transform_index_page_table_decode``; selections are slots."""

    capabilities = TorchNativeSparseSlotsBackend.capabilities.with_changes(
        eager=_MODES,
        graph=_MODES,
        heads={"families": {"mla"}},
        precision={"dtypes": {"bf16", "fp16"}},
        kv_pool={"page_sizes": {64}},
        sparse=Sparse(topk={64, 2048}, index_space="slots", any_padding=True, indexer=Indexer(heads={4, 64})),
    )
    scale_format: str | None = None

    def write_index(self, k_index: torch.Tensor, plan: KernelPlan) -> None:
        """Quantize and store with SGLang's kernels."""
        assert self.context.index_pool is not None
        quantize = _loaded("quantization.act_quant_triton").act_quant
        keys, scales = quantize(k_index.contiguous(), 128, self.scale_format)
        buffer = self.context.index_pool.get_index_buffer(plan.layer.layer_id)
        _loaded("kvcache.dsa_index_k_cache")._set_k_and_s_triton(
            buf=buffer, loc=plan.out_cache_loc.contiguous(), index_k=keys, index_k_scale=scales, page_size=INDEX_PAGE
        )

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Select positions, and have SGLang's kernel look up their slots."""
        table = plan.slot_table[self.request_of_row(q_index, plan)]
        positions = super().run_select(q_index, weights, plan)
        module = _loaded("attention.dsa.transform_index")
        found: torch.Tensor = module.transform_index_page_table_decode(table, positions)
        return found

    def indices(self, keys: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Positions: the lookup comes behind the top-k."""
        return keys


class IndexerPowersOfTwo(IndexerAmax):
    """The same with scales that are powers of two (``scale_fmt="ue8m0"``)."""

    capabilities = IndexerAmax.capabilities.with_changes(
        sparse=Sparse(
            topk={64}, index_space="slots", any_padding=True, indexer=Indexer(heads={4}, scale="power_of_two")
        )
    )
    scale_format = "ue8m0"
