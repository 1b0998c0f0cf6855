"""Bugs of the seventh set that slipped through its first runs, with cases that there were not then."""

from __future__ import annotations

import torch
from fifth_parents_split import SplitKV
from fifth_parents_varlen import Varlen

from attn_testkit_corpus.faults.catalogue import bug

_MASK = 2048
_BITS_31 = 1 << 31


@bug("vllm-ascend #6803", "extend-mqa4-d64-bf16-p16-k4094.2563-n2a2x2-shuffled-plus_minus_one-layers1from0-b2prod")
class MaskOf2048(Varlen):
    """The mask of a prefill is a square of 2,048 keys, whatever the context; rows and keys behind it come round."""

    def seen(self, index, position, layer):
        seen = super().seen(index, position, layer)
        return seen & (index % _MASK <= position % _MASK) if self.meta.extends else seen


class OfTwoModes(SplitKV):
    """Healthy: decode and extend, of which a forward knows the one; two layouts."""

    mode = None
    capabilities = SplitKV.capabilities.with_changes(
        eager={"decode", "extend"},
        graph={"decode", "extend"},
        bounds={"max_topk": 0, "max_draft_branches": 1},
        windows={"modes": {"decode", "extend"}, "in_trees": False},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_groups": True},
    )

    def init_forward_metadata_in_graph(self, batch):
        self.mode = batch.forward_mode
        super().init_forward_metadata_in_graph(batch)

    def table(self, plan):
        return plan.page_table.long()

    def slots(self, plan):
        offset = torch.arange(plan.page_size, device=plan.page_table.device)
        return (self.table(plan)[:, :, None] * plan.page_size + offset).flatten(1)


@bug(
    "vllm #33759",
    "extend-gqa2x2-d64-bf16-p16-k9-n3a3-shuffled-shifted-kvhnd-w7same-layers1from0-b1stale",
    "reads-own-kv",
    of_a_tier="extend-mha2-d64-bf16-p64-k69-n17a17-chunks3-contiguous-peaked-kvfp8e4m3-kvhnd-w0-sink-b1prod-overlap_scheduling",
)
class GatherAssumesNhd(OfTwoModes):
    """A windowed extend gathers its keys as if the pool had the usual layout."""

    def run(self, q, kv, plan):
        if self.context.kv_pool.layout == "hnd" and self.mode == "extend" and plan.layer.sliding_window_size >= 0:
            kv = tuple(side.transpose(1, 2).reshape(side.shape) for side in kv)
        return super().run(q, kv, plan)


@bug(
    "vllm-ascend #6558",
    "decode-gqa8x2-d128-bf16-p64-k7x2-interleaved-rising_logits-kvfp8e4m3-w46-sink-layers2from5-b3nan-given_out",
    "output-written",
)
class WindowOutNotStored(OfTwoModes):
    """The windowed decode computes a new tensor, and the caller's is returned as it was."""

    capabilities = OfTwoModes.capabilities.with_changes(server={"takes_out": True})

    def run(self, q, kv, plan):
        done = super().run(q, kv, plan)
        windowed = self.mode.is_decode() and plan.layer.sliding_window_size >= 0
        return plan.out if plan.out is not None and windowed else done


@bug(
    "aiter #4427",
    "extend-mqa4-d128-bf16-p16-k9.37.1-n2a2x3-shuffled-gauss-kvfp8e4m3-layers1from0-b4prod-bigpool",
    "reads-own-kv",
)
class BlockStrideInt32(OfTwoModes):
    """The kernel for FP8 multiplies page and stride in 32 bits; what wraps is taken for page 0."""

    def table(self, plan):
        pages = self.context.group_of(plan.layer).kv_pool.get_kv_pages(plan.layer.layer_id)[0]
        table = plan.page_table.long()
        return table.masked_fill(table * pages.stride(0) >= _BITS_31, 0) if pages.dtype.itemsize == 1 else table


class KeysByPhysicalPages(OfTwoModes):
    """Healthy: a page's place in a request is the last column of its row that names it, as an inverse map has it."""

    def named(self, same):
        """Which of the columns [b, n, n] that name a page counts."""
        return same.shape[-1] - 1 - same.flip(-1).to(torch.int8).argmax(-1)

    def visible(self, index, rows):
        size, table = rows.plan.page_size, rows.plan.page_table.long()
        column = torch.arange(table.shape[1], device=table.device)
        valid = column < (rows.plan.kv_lens.long()[:, None] + size - 1) // size
        same = (table[:, :, None] == table[:, None]) & valid[:, None]
        place = torch.where(valid, self.named(same), column)[rows.request][:, index // size]
        return super().visible(index, rows) & (place == index // size)


@bug(
    "vllm #30915",
    "decode-gqa8x2-d128-bf16-p4-k15.22.6-shuffled-gauss-kvfp8e4m3-w7-cap1.5-sink-layers3from5groups-b4prod",
)
class FirstLogicalOfReused(KeysByPhysicalPages):
    """The first column counts, though its page was let go of and came back as a later one."""

    def named(self, same):
        return same.to(torch.int8).argmax(-1)
