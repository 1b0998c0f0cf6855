"""SGLang's Triton attention of DeepSeek V4 over one pool of the window's keys and of compressed keys, with a sink.

A row's window, its selected keys of 4:1 and all keys of 128:1 are slots of one list. So are they here: the kit says
which slots, and stores them as it stores any key. Nothing is compressed. A key is its own value, 512 numbers; the kit
compares the first 448 of an output.
"""

from __future__ import annotations

from typing import Any

import torch
from alone import SGLANG, load

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
    Sparse,
)

__all__ = ["UnifiedDecode", "UnifiedDecodeSplits", "UnifiedPrefill"]

_UNIFIED = "sglang.kernels.ops.attention.dsv4.unified_kv_kernels"


class UnifiedDecode(KernelBackend):
    """``sparse_attn_v4_paged_decode``: lists of slots, one after the other, without -1."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(families={"mla"}, head_dims={448}, mla_rope_dims={64}, gqa_ratios={4, 16, 64}),
        precision=Precision(dtypes={"bf16", "fp16"}),
        kv_pool=KVPools(page_sizes={1, 64}),
        bounds=Bounds(max_q_rows=8, max_topk=1, max_draft_branches=4),
        options=LayerOptions(sinks=True),
        needs=Needs(cpu_seq_lens=False),
        sparse=Sparse(topk={64, 128, 2048}, index_space="slots", holes=True, empty_rows=True),
    )
    splits = 1

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        module, layer = load(f"{_UNIFIED}.paged_decode", SGLANG), plan.layer
        # AMD's package answers this question.
        module._cu_count = processors
        slots, starts = lists(plan.selected, plan.selected >= 0)
        found: torch.Tensor = module.sparse_attn_v4_paged_decode(
            q, kv[0].flatten(0, 2), slots, starts, sink_of(layer, q), layer.scaling, kv_splits=self.splits
        )
        return found[..., : layer.v_head_dim]


class UnifiedDecodeSplits(UnifiedDecode):
    """The same in four splits of a list, and the kernel that reduces them."""

    splits = 4


class UnifiedPrefill(UnifiedDecode):
    """``sparse_attn_v4_paged_prefill``: keys of the step from the step's own rows, all others from the pool."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        module, layer, pool = load(f"{_UNIFIED}.paged_prefill", SGLANG), plan.layer, kv[0].flatten(0, 2)
        slots = plan.out_cache_loc.long().clamp(min=0)
        row = torch.full((len(pool),), -1, dtype=torch.int32, device=q.device)
        row.scatter_(0, slots, torch.arange(len(slots), dtype=torch.int32, device=q.device))
        of_step = torch.where(plan.selected < 0, -1, row[plan.selected.clamp(min=0).long()])
        prefix = lists(plan.selected, (plan.selected >= 0) & (of_step < 0))
        extend = lists(of_step, of_step >= 0)
        found: torch.Tensor = module.sparse_attn_v4_paged_prefill(
            q, pool, *prefix, pool[slots], *extend, sink_of(layer, q), layer.scaling
        )
        return found[..., : layer.v_head_dim]


def processors() -> int:
    """Number of the device's processors."""
    return torch.cuda.get_device_properties().multi_processor_count


def lists(indices: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of ``indices`` [T, n] where ``keep``, row after row, and where each row starts, [T + 1]."""
    place = keep.flatten().cumsum(0) - 1
    packed = indices.new_zeros(indices.numel() + 1)
    packed[torch.where(keep.flatten(), place, indices.numel())] = indices.flatten()
    starts = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))
    return packed, starts.to(torch.int32)


def sink_of(layer: Any, q: torch.Tensor) -> torch.Tensor:
    """[H] float32: the logit of the sink; -inf if the layer has no sinks."""
    none = torch.full((q.shape[1],), -torch.inf, device=q.device)
    return none if layer.sinks is None else layer.sinks.float()
