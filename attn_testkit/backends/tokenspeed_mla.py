"""TokenSpeed's MLA decode kernel (``tokenspeed_mla_decode``): FP8 keys, queries and probabilities, SM100.

Metadata, row layout and everything else are as in ``trtllm_mla``.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from attn_testkit.contract import AttentionLayer, Capabilities, Requires

from .trtllm_mla import TRTLLMMLABackend
from .vendor import device_is_real, why_not_here
from .vendor.provider import EntryPoint
from .vendor.tokenspeed_kernels import DECODE, MULTIPROCESSORS

_KEYS_PER_TILE = 128
_ROWS_PER_TILE = 128
_ROWS_PER_HEAD = 8
"""Query rows per request for which servers size the workspace."""


class TokenspeedMLABackend(TRTLLMMLABackend):
    """Latent attention, absorbed form, 512 + 64, through TokenSpeed's FP8 kernel."""

    not_here = why_not_here(DECODE)
    capabilities: ClassVar[Capabilities] = TRTLLMMLABackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": frozenset({"fp8_e4m3"})},
        requires=Requires(
            sm=((100, 100), (103, 103)),
            packages=("tokenspeed-mla>=2.0.4,<3", "nvidia-cutlass-dsl>=4.8"),
            why="MLA decode requires SM100, SM103 or SM107",
        ),
    )

    entry: ClassVar[EntryPoint] = DECODE

    def _make_workspace(self) -> None:
        """Allocate the largest workspace here: one that is allocated at the first forward would be in a graph's memory
        (#25489). It holds float32 partial results of splits, with one more column for their sums. The kernel makes no
        more splits than there are tiles of keys, and no more blocks than multiprocessors; it needs no zeros.
        """
        context, heads = self.context, self.context.layers[0].tp_q_head_num
        count = MULTIPROCESSORS
        if device_is_real(context.device):
            count = torch.cuda.get_device_properties(context.device).multi_processor_count
        width = max(1, context.num_draft_tokens, context.speculative_num_steps + 1)
        rows = max(
            requests * -(-heads * rows_each // _ROWS_PER_TILE) * _ROWS_PER_TILE
            for requests, rows_each in ((context.max_bs, width), (self._most_rows, 1))
        )
        partials = rows * -(-context.max_context_len // _KEYS_PER_TILE)
        most = max(count * max(heads * _ROWS_PER_HEAD, _ROWS_PER_TILE), rows)
        row_bytes = (context.layers[0].kv_lora_rank + 1) * 4
        self._workspace = torch.empty(min(partials, most) * row_bytes, dtype=torch.int8, device=context.device)

    def _attend(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        out: torch.Tensor = self._kernel(
            query=q,
            kv_cache=latent,
            workspace_buffer=self._workspace,
            kv_lora_rank=layer.kv_lora_rank,
            qk_rope_head_dim=layer.head_dim - layer.kv_lora_rank,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_seq_len=self.context.max_context_len,
            softmax_scale=layer.scaling * layer.k_scale,
            output_scale=layer.k_scale,
            causal_mask=True,
        )
        return out
