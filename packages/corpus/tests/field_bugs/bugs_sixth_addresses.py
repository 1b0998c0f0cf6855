"""Where something is read or written: pages, heads, strides, slots; bugs of the sixth set."""

from __future__ import annotations

from dataclasses import replace

import torch
from fifth_parents_split import SplitKV
from fifth_parents_varlen import Varlen
from plain_backends import Tiled, declared
from third_parents import Latent, mla_capabilities, wide_capabilities

from attn_testkit_corpus.faults.catalogue import bug


@bug(
    "sglang-jax #1557",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "reads-own-kv",
)
class DenseCumsumMask(Tiled):
    """Pages of all requests lie one behind the other, and a request's are sought at the sum of the lengths before."""

    capabilities = declared("decode", "extend")

    def slots(self, plan):
        size, lens = plan.page_size, plan.kv_lens.long()
        counts = (lens + size - 1) // size
        ends, (bs, columns) = counts.cumsum(0), plan.page_table.shape
        place = torch.arange(bs * columns, device=lens.device)
        owner = torch.searchsorted(ends, place, right=True).clamp(max=bs - 1)
        pages = plan.page_table[owner, (place - (ends - counts)[owner]).clamp(0, columns - 1)].long()
        at = (lens.cumsum(0) - lens)[:, None] + torch.arange(columns * size, device=lens.device)
        return pages[(at // size).clamp(max=len(pages) - 1)] * size + at % size


@bug(
    "sglang #23757",
    "extend-gqa2x2-d64-bf16-p16-k21-n15a15-chunks3-shuffled-shifted-w0-b4nan",
    "reads-own-kv",
)
class RawTokenTable(Tiled):
    """Layers with a window take the request table, which has a slot for each token, for a table of pages."""

    capabilities = declared("decode", "extend", windows={"decode", "extend"})

    def slots(self, plan):
        if plan.layer.sliding_window_size < 0:
            return super().slots(plan)
        size = plan.page_size
        index = torch.arange(plan.page_table.shape[1] * size, device=plan.page_table.device)
        slots = plan.slot_table[:, index // size].long() * size + index % size
        return slots % self.context.kv_pool.num_slots


@bug("FlagGems #5896", "decode-gqa2x2-d64-bf16-p16-k21.3-shuffled-gauss-kvinblock-b2prod", "reads-own-kv")
class VContiguous(Tiled):
    """V is read as if it were contiguous, whatever its strides are."""

    capabilities = declared("decode", "extend", kv_pool={"kv_layouts": {"nhd", "hnd", "kv-in-block", "side-by-side"}})

    def keys(self, kv, slots, plan):
        k, v = kv
        strides = torch.empty(v.shape, device="meta").stride()
        return super().keys((k, v.as_strided(v.shape, strides, v.storage_offset())), slots, plan)


@bug("ONNXim #34", "decode-mha2-d128-bf16-p1-k7.8.9-shared-rising_logits-b4stale")
class HeadByKvHeads(Tiled):
    """A query head's KV head is head // number of KV heads, in place of head // group."""

    capabilities = wide_capabilities("decode", "extend")

    def kv_head(self, layer, device):
        head = torch.arange(layer.tp_q_head_num, device=device) // layer.tp_k_head_num
        return head.clamp(max=layer.tp_k_head_num - 1)


@bug("TensorRT-LLM #13190", "extend-gqa2x2-d64-bf16-p16-k33.24.3-n4a4.3.4-shuffled-gauss-kvhnd-b4prod", "reads-own-kv")
class PrefillReadsNHD(Tiled):
    """Prefill is planned without the layout, and reads an HND pool as NHD."""

    capabilities = declared("decode", "extend", kv_pool={"kv_layouts": {"nhd", "hnd"}})

    def keys(self, kv, slots, plan):
        pool = self.context.kv_pool
        if plan.max_q_len > 1 and pool.layout == "hnd":
            kv = tuple(side.reshape(kv[0].shape) for side in pool.get_layer_buffer(plan.layer.layer_id))
        return super().keys(kv, slots, plan)


@bug("vllm #27547", "decode-gqa2x2-d64-bf16-p64-k7x2-reversed-gauss-b3prod", "reads-own-kv")
class ManagerPages(Tiled):
    """Ids of the manager's pages of 64 go to a kernel with pages of 16 as they are."""

    capabilities = declared("decode", "extend", kv_pool={"page_sizes": {64}})

    def slots(self, plan):
        index = torch.arange(plan.page_table.shape[1] * 64, device=plan.page_table.device)
        page = (index // 16).clamp(max=plan.page_table.shape[1] - 1)
        return plan.page_table[:, page].long() * 16 + index % 16


@bug(
    "flash-attention #2388",
    "target-verify-gqa2x4-d128-bf16-p4-k15.22.6-chain2-reversed-gauss-layers3from5by4x2d64.8x4d128-b4prod",
)
class LseAccumStride(SplitKV):
    """Log-sum-exps of splits are written densely, and read with the strides of the layer that has most heads."""

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        t, h, splits = parts.peak.shape
        if t > self.most:
            return parts
        widest = len(self.lses) // (self.most * splits)
        read = self.lses[: t * splits * widest].view(t, splits, widest)[:, :, :h]
        return parts._replace(peak=read.transpose(1, 2))


@bug(
    "vllm #41656",
    "target-verify-gqa2x4-d128-bf16-p4-k15.22.6-chain2-reversed-gauss-layers3from5by4x2d64.8x4d128-b4prod",
    "completes",
)
class MidBufferOfModel(SplitKV):
    """Partial results have room for the first layer's heads and head dim, where layers differ."""

    def row_size(self):
        layer = self.context.layers[0]
        return layer.tp_q_head_num * layer.v_head_dim


@bug("vllm #42650", "decode-gqa2x4-d64-bf16-p16-k39.70.6-reversed-gauss-layers3from5by4x2d64.8x4d64-b4prod")
class HeadsOfModel(Tiled):
    """Groups of query heads are planned by the first layer's number of heads, where layers differ."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}, "heads_by_layer": True})

    def kv_head(self, layer, device):
        group = max(self.context.layers[0].tp_q_head_num // layer.tp_k_head_num, 1)
        head = torch.arange(layer.tp_q_head_num, device=device) // group
        return head.clamp(max=layer.tp_k_head_num - 1)


@bug(
    "onnxruntime #21687",
    "decode-gqa7x18-d64-bf16-p1-k1x174.3x174.9x173-shuffled-gauss-layers1from0-b521prod",
    "output-written",
)
class RowsOver65535(Varlen):
    """A launch has 65,535 groups at most, rows times heads: those behind are not computed."""

    capabilities = replace(Varlen.capabilities, eager={"decode"}, graph=())

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        t, h, _ = out.shape
        group = torch.arange(t * h, device=out.device).view(t, h)
        return torch.where((group < 65535)[..., None], out, torch.empty_like(out))


@bug(
    "TensorRT-LLM #16801",
    "decode-gqa4x2-d128-bf16-p16-k39.70.6-contiguous-gauss-w7-layers3from5groups-b4prod",
    "reads-own-kv",
)
class OneTableForPools(Tiled):
    """Slots are looked up once, in the first pool's table, and layers of another pool take them too."""

    capabilities = wide_capabilities("decode", kv_pool={"kv_groups": True}, windows={"decode"})

    def slots(self, plan):
        return super().slots(replace(plan, step=self._kit_step))


@bug("sglang #7239", "draft-decode-gqa2x2-d64-bf16-p1-k7x2-topk1steps2-contiguous-one_hot-b3prod", "reads-own-kv")
class DraftLocTransposed(Tiled):
    """A draft's slots, by branch and step, are viewed as [steps, branches]: right for one branch of one request."""

    capabilities = declared("draft-decode", kv_pool={"page_sizes": {1}}, bounds={"max_draft_branches": 4})

    def slots(self, plan):
        slots, draft = super().slots(plan), plan.step.draft
        own = draft.out_cache_loc.view(draft.num_steps, -1).T
        prefix = plan.step.draft_prefixes.long().repeat_interleave(draft.topk)
        nth = torch.arange(slots.shape[1], device=slots.device) - prefix[:, None]
        return torch.where(
            (nth >= 0) & (nth < draft.num_steps), own.gather(1, nth.clamp(0, draft.num_steps - 1)), slots
        )


@bug(
    "vllm #39120",
    "target-verify-gqa7x2-d96-bf16-p16-k37.3.0.16.9.33.1.17.5-chain4-interleaved-rising_logits-w11-b10small",
    "output-written",
)
class CuSeqlensShort(Varlen):
    """In a verify ``cu_seqlens_q`` has an entry too few: the kernel sees all requests but the last."""

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        if not batch.batch_size or not batch.forward_mode.is_target_verify():
            return out
        row = torch.arange(len(out), device=out.device)
        return torch.where((row < self.meta.cu[-2])[:, None, None], out, torch.empty_like(out))


@bug("sglang #11985", "decode-mla16-d512r64-bf16-p32-k4096-reversed-one_hot-b1prod", "reads-own-kv")
class LoopOfTokens(Latent):
    """Page ids are filled 64 at a time, once for each 4,096 keys, which is right for pages of 64 alone."""

    capabilities = mla_capabilities("decode", kv_pool={"page_sizes": {32, 64}}, bounds={"max_context_len": 4160})

    def slots(self, plan):
        filled = (plan.kv_lens.long() + 4095) // 4096 * 64
        place = torch.arange(plan.page_table.shape[1], device=filled.device)
        table = torch.where(place < filled[:, None], plan.page_table.long(), 0)
        offset = torch.arange(plan.page_size, device=filled.device)
        return (table[:, :, None] * plan.page_size + offset).flatten(1)
