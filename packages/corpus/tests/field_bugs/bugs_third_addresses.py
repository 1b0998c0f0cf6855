"""Where something is read or written: pages, slots, heads, rows; bugs of the third set."""

from __future__ import annotations

from dataclasses import replace

import torch
from plain_backends import Tiled
from third_parents import FP8, SPEC, Latent, mla_capabilities, wide_capabilities

from attn_testkit_corpus.faults.catalogue import bug, helper


@bug("TileOPs #1787", "decode-gqa4x2-d64-bf16-p192-k7x2-contiguous-negative-b5stale", execution="graph")
class PageTailSkipped(Tiled):
    """A page of 192 keys has one whole tile of 128, and decode leaves out the other 64 keys of each page."""

    capabilities = wide_capabilities("decode", "extend", kv_pool={"page_sizes": {64, 128, 192}})

    def visible(self, index, rows):
        seen, size = super().visible(index, rows), rows.plan.page_size
        tile = min(128, size)
        return seen & (index % size < size // tile * tile) if rows.plan.max_q_len == 1 else seen


@bug("ATOM #702", "decode-mha2-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "reads-own-kv")
class PageIdCutOff(Tiled):
    """Decode with pages of 16 cuts page ids to 16 bits there, 6 here: high pages are read as low ones."""

    capabilities = wide_capabilities("decode", "extend", kv_pool={"page_sizes": {1, 16, 64}, "kv_dtypes": FP8})

    def slots(self, plan):
        if plan.max_q_len > 1 or plan.page_size != 16:
            return super().slots(plan)
        offset = torch.arange(16, device=plan.page_table.device)
        return ((plan.page_table.long() % 64)[:, :, None] * 16 + offset).flatten(1)


@bug("aiter #2996", "decode-mla16-d512r64-bf16-p64-k300.70-interleaved-rising_logits-b2nan", "reads-own-kv")
class PagesOfOneInMla(Latent):
    """The bf16 decode takes page ids as slots, whatever the page size is; the FP8 one is right."""

    capabilities = mla_capabilities("decode", kv_pool={"kv_dtypes": FP8})

    @helper
    def wrong(self, plan):
        return plan.page_size > 1 and self.context.kv_pool.dtype.itemsize > 1

    def slots(self, plan):
        return plan.page_table.long() if self.wrong(plan) else super().slots(plan)

    def visible(self, index, rows):
        if not self.wrong(rows.plan):
            return super().visible(index, rows)
        size = rows.plan.page_size
        return index < ((rows.kv_lens + size - 1) // size)[:, None]


@bug("vLLM #29887", "extend-gqa2x2-d64-bf16-p16-k32.128.64.16.63-n5a19.1x4-interleaved-shifted-kvfp8e4m3-b6nan")
class GatherWithoutHeadOffset(Tiled):
    """Gathering a cached prefix writes all heads of a token to the first head's place."""

    capabilities = wide_capabilities(
        "decode", "extend", heads={"families": {"mha", "gqa", "mqa"}}, kv_pool={"kv_dtypes": FP8}
    )

    def keys(self, kv, slots, plan):
        right = super().keys(kv, slots, plan)
        if plan.max_q_len == 1:
            return right
        rows = self.rows_of(slots, plan)
        old = (torch.arange(slots.shape[1], device=slots.device) < rows.prefix[:, None])[:, :, None, None]

        def gathered(side):
            side = side.float()
            lost = torch.zeros_like(side)
            lost[:, :, 0] = side[:, :, -1]
            return torch.where(old, lost, side)

        return tuple(map(gathered, right))


@bug(
    "vllm-xpu-kernels #429",
    "extend-gqa2x2-d64-bf16-p16-k21-n17a17-chunks3-contiguous-peaked-kvsidebyside-b1prod-overlap_scheduling",
    "writes-own-kv",
)
class RowsCopiedAsOneRun(Tiled):
    """Heads of a row are stored as one run, though in the side-by-side layout they are two widths apart."""

    capabilities = wide_capabilities(
        "decode", "extend", heads={"families": {"mha", "gqa", "mqa"}}, kv_pool={"kv_layouts": {"nhd", "side-by-side"}}
    )

    def write_kv(self, k, v, plan):
        pool = self.context.group_of(plan.layer).kv_pool
        if pool.layout == "nhd":
            super().write_kv(k, v, plan)
            return
        memory = pool.get_layer_buffer(plan.layer.layer_id)
        pages, size, heads, _, dim = memory.shape
        flat = memory.view(pages * size, heads * 2 * dim)
        slot = plan.out_cache_loc.long()
        flat[:, : heads * dim].index_put_((slot,), k.reshape(len(k), -1))
        flat[:, dim : dim + heads * dim].index_put_((slot,), v.reshape(len(v), -1))


@bug("vllm-tt-plugin #74", "extend-gqa2x2-d64-bf16-p16-k7x2-n10a19.1-shared-peaked-b3prod", "writes-own-kv")
class ChunkStoredFromItsPage(Tiled):
    """A chunk is stored from the start of the page in which it begins."""

    capabilities = wide_capabilities("decode", "extend")

    def write_kv(self, k, v, plan):
        if plan.max_q_len > 1:
            rows, size = self.rows_of(k, plan), plan.page_size
            at = rows.prefix // size * size + rows.place
            slot = plan.slot_table.long()[rows.request, at.clamp(0, plan.slot_table.shape[1] - 1)]
            live = torch.arange(len(k), device=k.device) < plan.cu_seqlens_q[-1]
            plan = replace(plan, out_cache_loc=torch.where(live, slot, plan.out_cache_loc.long()))
        super().write_kv(k, v, plan)


@bug("llm-scaler #359", "decode-gqa8x2-d128-bf16-p16-k21-reversed-negative-b2prod", "output-written")
class GroupOfFour(Tiled):
    """The decode kernel has 4 query heads for each KV head built in: further ones are not written."""

    capabilities = wide_capabilities("decode", "extend", heads={"families": {"gqa"}, "gqa_ratios": {4, 8}})

    def finish(self, out, rows):
        if rows.plan.max_q_len > 1:
            return out
        head = torch.arange(out.shape[1], device=out.device) % rows.layer.q_per_kv
        return torch.where((head < 4)[None, :, None], out, torch.empty_like(out))


@bug(
    "mlc-llm #1889",
    "extend-gqa4x2-d80-bf16-p16-k9.37-n3a3x2-shuffled-gauss-layers1from0-b2prod",
    "output-written",
    of_a_tier="extend-gqa4x2-d80-bf16-p16-k1100x2-n96a96x2-shuffled-gauss-layers1from0-b2prod",
)
class PrefillTilesOf32(Tiled):
    """Prefill walks the head dim in whole tiles of 32: of 80, the last 16 are left out."""

    capabilities = wide_capabilities("decode", "extend", heads={"head_dims": {64, 80, 128}})

    def query(self, q, plan):
        if plan.max_q_len == 1:
            return q
        return q * (torch.arange(q.shape[-1], device=q.device) < q.shape[-1] // 32 * 32)

    def finish(self, out, rows):
        if rows.plan.max_q_len == 1:
            return out
        done = torch.arange(out.shape[-1], device=out.device) < out.shape[-1] // 32 * 32
        return torch.where(done, out, torch.empty_like(out))


@bug(
    "vllm flash-attention #176",
    "target-verify-gqa2x2-d128-bf16-p16-k600.70.12-chain7-shuffled-shifted-b4small",
    "output-written",
)
class AllFoldOnRequestZero(Tiled):
    """With several rows and splits the output's batch stride is 0: all results are stored over request 0's."""

    capabilities = wide_capabilities(*SPEC)

    def finish(self, out, rows):
        n = rows.plan.max_q_len
        if n == 1:
            return out
        done = torch.empty_like(out)
        done[:n] = out[-n:]
        return torch.where(rows.plan.kv_lens.max() > self.TILE, done, out)


@bug("aiter #2517", "extend-mha2-d64-bf16-p1-k254.510.1022-n4a4x2.3-shuffled-plus_minus_one-b3prod")
class ZerosBeyondTheDescriptor(Tiled):
    """A buffer descriptor overflows for a large pool with pages of 1: prefill reads zeros from slot 512 on."""

    capabilities = wide_capabilities("decode", "extend")

    def keys(self, kv, slots, plan):
        right = super().keys(kv, slots, plan)
        if plan.max_q_len == 1 or plan.page_size > 1 or self.context.kv_pool.num_slots <= 1024:
            return right
        return tuple(side.masked_fill((slots >= 512)[:, :, None, None], 0.0) for side in right)


@bug("sglang #12687", "draft-extend-v2-mha2-d64-bf16-p1-k7.8.9-n6a1.3.5-contiguous-rising_logits-b6prod")
class Int64LengthsReadAsInt32(Tiled):
    """An eager draft-extend hands lengths of 64 bits to a kernel that reads 32."""

    capabilities = wide_capabilities(*SPEC)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        if batch.batch_size and batch.forward_mode.is_draft_extend_v2():
            words = batch.seq_lens.contiguous().view(torch.int32)[: batch.batch_size]
            self._kit_step = replace(self._kit_step, kv_lens=words)


@bug(
    "sglang #24743",
    "decode-gqa4x2-d128-bf16-p16-k39.70.6-contiguous-gauss-w7-layers3from5groups-b4prod",
    "writes-own-kv",
    execution="graph",
)
class TailOfWindowedSlots(Tiled):
    """Slots of the windowed pool are copied for live rows alone: padded rows store into those of the replay before."""

    capabilities = wide_capabilities("decode", kv_pool={"kv_groups": True}, windows={"decode"})
    eager = inside = False

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.locs = {
            group.index: torch.zeros(max_num_tokens, dtype=torch.int64, device=self.context.device)
            for group in self.context.kv_groups
            if any(la.layer_id in group.layer_ids and la.sliding_window_size >= 0 for la in self.context.layers)
        }

    def init_forward_metadata(self, batch):
        self.eager = self.inside = True
        super().init_forward_metadata(batch)
        self.inside = False

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if self.inside:
            return
        self.eager = False
        for group, kept in self.locs.items():
            live = batch.group_cache_locs[group]
            kept[: len(live)].copy_(live)

    def write_kv(self, k, v, plan):
        group = self.context.group_of(plan.layer)
        if not self.eager and group.index in self.locs:
            plan = replace(plan, out_cache_loc=self.locs[group.index][: len(k)])
        super().write_kv(k, v, plan)


@bug("sglang #24750", "draft-decode-gqa2x2-d64-bf16-p1-k7x2-topk1steps4-reversed-one_hot-b3nan", "writes-own-kv")
class DraftSlotsByRequest(Tiled):
    """Slots of all draft steps, request by request, are read as if they were step by step."""

    capabilities = wide_capabilities("draft-decode", "decode", bounds={"max_draft_branches": 2})

    def write_kv(self, k, v, plan):
        draft = plan.step.draft
        if draft is not None:
            t = len(k)
            plan = replace(plan, out_cache_loc=draft.out_cache_loc[draft.step * t : (draft.step + 1) * t])
        super().write_kv(k, v, plan)


@bug("TensorRT-LLM #18244, TensorRT-LLM #17964", "decode-mha2-d256-bf16-p32-k3.69.17x2-interleaved-peaked-b5stale")
class VPagesAdvancedTooFar(Tiled):
    """The kernel for head dim 256 and large batches reads values of one tile from the pages of the one before."""

    capabilities = wide_capabilities(
        "decode", "extend", heads={"head_dims": {128, 256}}, kv_pool={"page_sizes": {16, 32}}
    )

    def keys(self, kv, slots, plan):
        k, v = super().keys(kv, slots, plan)
        layer = plan.layer
        if plan.max_q_len > 1 or layer.head_dim != 256 or layer.tp_k_head_num * len(plan.kv_lens) < 8:
            return k, v
        index = torch.arange(slots.shape[1], device=slots.device)
        return k, super().keys(kv, slots[:, torch.where(index % 64 >= 32, index - 32, index)], plan)[1]
