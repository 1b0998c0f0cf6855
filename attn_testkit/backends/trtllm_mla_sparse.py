"""FlashInfer's trtllm-gen MLA decode kernel over selected keys: ``sparse_mla_top_k`` of the same entry point.

The kernel reads min(keys by ``seq_lens``, top-k) columns of a row's indices. FlashInfer does not document what an index
of -1 among them does, and rows may select fewer keys than they see. So each query row is given as one request, whose
length is the number of keys that the row selects, as in vLLM 0.33.0 (``FlashInferMLASparseImpl``). Such a step needs no
plan: the indices come with each layer's forward.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from attn_testkit.contract import AttentionLayer, Capabilities, ForwardBatch, Sparse

from .trtllm_mla import TRTLLMMLABackend


class TRTLLMMLASparseBackend(TRTLLMMLABackend):
    """``selected`` holds slots of the KV pool, which the kernel reads instead of page tables."""

    capabilities: ClassVar[Capabilities] = TRTLLMMLABackend.capabilities.with_changes(
        # The kernel takes multiples of 4, and -1 only after a row's keys.
        sparse=Sparse(topk={16, 64, 2048}, index_space="slots", empty_rows=True, any_padding=True),
    )

    def _make_workspace(self) -> None:
        """Allocate counters for one request per row."""
        self._most_rows = self.context.max_num_tokens
        super()._make_workspace()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Do nothing: a step has no plan."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Do nothing: a step has no plan."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Do nothing: a step has no plan."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new latent rows and call the kernel on [T, 1, H, 576] and [T, 1, topk]."""
        assert selected is not None, "each forward of a sparse layer has its selection"
        if save_kv_cache:
            self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        # The package needs one valid index for a row without a key. Slot 0 may hold anything: the output is replaced.
        counts = (selected >= 0).sum(1, dtype=torch.int32)
        none = counts == 0
        slots = torch.where(none[:, None], 0, selected)
        rows = q.reshape(-1, 1, layer.tp_q_head_num, layer.head_dim)
        out = self._attend_pool(rows, slots[:, None], counts.clamp(min=1), layer)
        return out.masked_fill(none[:, None, None], 0.0)
