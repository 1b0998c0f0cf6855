"""The adapter of a backend that torch compiles: FlexAttention over keys gathered from the pages of the KV pool."""

from __future__ import annotations

import torch
import torch._dynamo
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..contract import (
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    Needs,
    Precision,
    Windows,
)

_BLOCK = 128
# Modes, buckets and layers that share an instance are more shapes than torch's own 8; vLLM's backend raises it as well.
torch._dynamo.config.recompile_limit = 64
_attend = torch.compile(flex_attention, dynamic=True)


class FlexBackend(KernelBackend):
    """Every mode, only chains. Shapes depend on batch size and rows, not on lengths, so new lengths recompile
    nothing."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(families={"mha", "gqa"}),
        precision=Precision(dtypes={"bf16", "fp16"}),
        kv_pool=KVPools(page_sizes={1, 16, 64}),
        bounds=Bounds(max_q_rows=8, max_topk=1),
        windows=Windows(frozenset(ForwardMode)),
        needs=Needs(cpu_seq_lens=False),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """One call for all requests, each padded to ``max_q_len`` rows. Shapes as in ``KernelBackend.run``."""
        starts = plan.cu_seqlens_q[:-1, None]
        rows = torch.arange(plan.max_q_len, device=q.device)
        padded = q[(starts + rows).clamp(max=len(q) - 1)].transpose(1, 2)
        k, v = (self.gathered(cache, plan) for cache in kv)
        # One kernel for all batches. That for few rows has no tile where a KV head has more of them than a block.
        out = _attend(
            padded, k, v, block_mask=self.block_mask(plan, k.shape[2]), scale=plan.layer.scaling, enable_gqa=True,
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )  # fmt: skip
        row = torch.arange(len(q), device=q.device)
        request = (torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1).clamp(max=len(plan.kv_lens) - 1)
        within = (row - plan.cu_seqlens_q[request]).clamp(max=plan.max_q_len - 1)
        return out.transpose(1, 2)[request, within]

    def gathered(self, cache: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Keys or values of each request [bs, Hk, slots, D]. Slots after them may hold NaN, and 0 * NaN is NaN, so they
        are zeroed."""
        rows = cache[plan.page_table.long()].flatten(1, 2)
        there = torch.arange(rows.shape[1], device=cache.device) < plan.kv_lens[:, None]
        return rows.masked_fill(~there[:, :, None, None], 0.0).transpose(1, 2)

    def block_mask(self, plan: KernelPlan, slots: int) -> BlockMask:
        """Mask of the keys that each row sees, with the number of key blocks of each request."""
        window = plan.layer.sliding_window_size
        reach = torch.full_like(plan.kv_lens, window if window >= 0 else plan.max_kv_len)
        prefix, kv_lens = plan.kv_lens - plan.cu_seqlens_q.diff(), plan.kv_lens

        def visible(request: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            position = prefix[request] + row
            return (key <= position) & (key >= position - reach[request]) & (key < kv_lens[request])

        blocks, requests = -(-slots // _BLOCK), len(kv_lens)
        tiles = -(-plan.max_q_len // _BLOCK)
        counts = ((kv_lens + _BLOCK - 1) // _BLOCK).to(torch.int32)
        order = torch.arange(blocks, dtype=torch.int32, device=kv_lens.device)
        return BlockMask.from_kv_blocks(
            counts[:, None, None].expand(requests, 1, tiles).contiguous(),
            order.expand(requests, 1, tiles, blocks).contiguous(),
            BLOCK_SIZE=_BLOCK,
            mask_mod=visible,
            seq_lengths=(plan.max_q_len, slots),
            compute_q_blocks=False,
        )
