"""Where something is read or written: pages, rows, strides, scratch; bugs of the second set."""

from __future__ import annotations

import torch
from plain_backends import Planned, Tiled, declared

from attn_testkit_corpus.faults.catalogue import bug, helper


@bug("pegainfer #291", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shared-negative-b4nan", "reads-own-kv")
class PageTooManyAtABoundary(Tiled):
    """The page list has a page too many when the keys fill the last one, and the length is counted from pages."""

    capabilities = declared("decode", "extend", kv_pool={"page_sizes": {16}})

    def visible(self, index, rows):
        if rows.plan.max_q_len > 1:
            return super().visible(index, rows)
        size = rows.plan.page_size
        return index < (rows.kv_lens + size * (rows.kv_lens % size == 0))[:, None]


@bug(
    "tt-metal #56324",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "writes-own-kv",
)
class PadTailStored(Tiled):
    """A prompt is padded to 32 rows, 1024 there, and rows of padding are stored by what stands behind in the table."""

    capabilities = declared("extend")
    PAD = 32

    def write_kv(self, k, v, plan):
        super().write_kv(k, v, plan)
        new, table = plan.cu_seqlens_q.diff().long(), plan.slot_table.long()
        at = plan.kv_lens.long()[:, None] + torch.arange(self.PAD, device=k.device)
        end = plan.prefix_lens.long() + (new + self.PAD - 1) // self.PAD * self.PAD
        there = (at < end[:, None]) & (at < table.shape[1]) & (new > 0)[:, None]
        slots = torch.where(there, table.gather(1, at.clamp(max=table.shape[1] - 1)), 0).flatten()
        rows = k.new_zeros(len(slots), *k.shape[1:])
        self.context.group_of(plan.layer).kv_pool.set_kv_buffer(plan.layer, slots, rows, rows)


@bug(
    "ssd #23, accel #10",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "reads-own-kv",
)
class PrefixReadAsContiguous(Tiled):
    """With a cached prefix in the batch the block table is not passed: keys are read one behind the other."""

    capabilities = declared("extend")

    def slots(self, plan):
        right = super().slots(plan)
        begin = plan.kv_lens.long().cumsum(0) - plan.kv_lens.long()
        packed = begin[:, None] + torch.arange(right.shape[1], device=right.device)
        packed = packed.clamp(max=self.context.kv_pool.num_slots - 1)
        return torch.where(plan.prefix_lens.sum() > 0, packed, right)


@bug("aiter #1840", "decode-gqa2x2-d64-bf16-p64-k7x2-contiguous-gauss-b2prod", execution="graph")
class OffsetOfTileInPageMissing(Tiled):
    """A page of 64 is four tiles of 16 (1024 and 256 there), and the tile's offset in its page is not added."""

    capabilities = declared("decode", kv_pool={"page_sizes": {16, 64}})

    def slots(self, plan):
        size = plan.page_size
        offset = torch.arange(size, device=plan.page_table.device)
        offset = offset % 16 if size == 64 else offset
        return (plan.page_table.long()[:, :, None] * size + offset).flatten(1)


@bug(
    "flash-attention-v100 #41",
    "extend-gqa2x2-d64-bf16-p64-k32.128.64.16.63-n26a17.64.33.15.1-reversed-rising_logits-b5prod",
)
class TileStraddlesPages(Tiled):
    """A tile of 40 keys (160 there) takes what lies behind its first key's page, of 64 (256 there)."""

    capabilities = declared("extend", kv_pool={"page_sizes": {64}})

    def slots(self, plan):
        right = super().slots(plan)
        index = torch.arange(right.shape[1], device=right.device)
        first = index // 40 * 40
        return (right[:, first] + index - first).clamp(max=self.context.kv_pool.num_slots - 1)


@bug(
    "pytorch #186434",
    "extend-gqa2x2-d64-bf16-p1-k7x2-n6a1.11-shared-gauss-b2prod",
    "output-written",
    execution="graph",
)
class GroupsSwappedWithOldStrides(Tiled):
    """With one query row, rows and heads are swapped for groups and KV heads, and strides stay the old ones."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}})

    def run(self, q, kv, plan):
        group, heads = plan.layer.q_per_kv, plan.layer.tp_k_head_num
        if plan.max_q_len > 1 or group == 1:
            return super().run(q, kv, plan)
        t = len(q)
        row = torch.arange(t, device=q.device)
        swapped = torch.stack([q[(row + g).clamp(max=t - 1), :heads] for g in range(group)], 2)
        out = super().run(swapped.flatten(1, 2), kv, plan).view(t, heads, group, -1)
        done = torch.empty_like(out.flatten(1, 2))
        for g in range(min(group, t)):
            done[g:, :heads] = out[: t - g, :, g]
        return done


@bug("flashinfer #2750", "decode-mla16-d512r64-bf16-p16-k7x2-shuffled-one_hot-b3prod")
class StrideOf128Heads(Tiled):
    """The kernel has 128 heads built in: queries of request b are read 128 heads behind those of the one before."""

    capabilities = declared("decode", heads={"families": {"mla"}, "gqa_ratios": {16, 128}, "head_dims": {512}})

    def query(self, q, plan):
        t, heads, dim = q.shape
        at = torch.arange(t, device=q.device)[:, None] * 128 + torch.arange(heads, device=q.device)
        return q.reshape(t * heads, dim)[at.clamp(max=t * heads - 1)]


@bug(
    "tokenspeed #958",
    "draft-decode-gqa2x2-d64-bf16-p32-k30.126.62.14.63-topk1steps4-interleaved-negative-b5prod",
    "reads-own-kv",
)
class DraftTableOfLogicalPages(Tiled):
    """The draft's table has ids of pages of 32, and the kernel takes them for pages of 16."""

    capabilities = declared("draft-decode", "decode", kv_pool={"page_sizes": {32}})

    def slots(self, plan):
        if plan.step.draft is None:
            return super().slots(plan)
        half, table = plan.page_size // 2, plan.page_table.long()
        index = torch.arange(table.shape[1] * plan.page_size, device=table.device)
        column = (index // half).clamp(max=table.shape[1] - 1)
        return table[:, column] * half + index % half


@bug("vLLM #16209", "decode-gqa2x2-d64-bf16-p16-k21-interleaved-rising_logits-w4000-b4nan", "completes")
class WindowPagesRunOffTheTable(Tiled):
    """Pages of a window are gathered from its first one on, as many as it may have; nothing clips them."""

    capabilities = declared("decode", kv_pool={"page_sizes": {16}}, windows={"decode"})

    def slots(self, plan):
        right, window = super().slots(plan), plan.layer.sliding_window_size
        if window >= 0:
            size = plan.page_size
            most = (window + size - 1) // size + 1
            first = (plan.kv_lens.long() - 1 - window).clamp(min=0) // size
            plan.page_table.gather(1, first[:, None] + torch.arange(most, device=first.device))
        return right


@bug(
    "TensorRT-LLM #17643",
    "decode-gqa2x2-d64-bf16-p16-k3.37.9.17-contiguous-one_hot-layers2from5-b4prod-empty_batches-overlap_scheduling",
    "completes",
)
class LayerZeroNamesThePool(Tiled):
    """The number of pages is asked of layer 0."""

    capabilities = declared("decode")

    def __init__(self, context):
        super().__init__(context)
        self.pages = len(context.kv_pool.get_layer_buffer(0)[0])


@bug(
    "FastDeploy #5384",
    "extend-gqa2x2-d64-bf16-p16-k0.1.16-n2a2.3.1-chunks3-contiguous-one_hot-b6stale",
    "writes-own-kv",
)
class PromptRowsFromTheStart(Tiled):
    """In a mixed batch the writer of prompts reads from row 0 on, not behind the rows that decode."""

    capabilities = declared("extend")

    def write_kv(self, k, v, plan):
        rows = self.rows_of(k, plan)
        one = (plan.cu_seqlens_q.diff() == 1).long()
        decoding = one.cumprod(0).sum()
        row = torch.arange(len(k), device=k.device)
        at = torch.where(rows.new > 1, (row - decoding).clamp(min=0), row)
        super().write_kv(k[at], v[at], plan)


@bug(
    "lmdeploy #1935",
    "extend-gqa2x2-d64-bf16-p1-k3.70-n2a1.3-contiguous-gauss-layers1from0-b2prod",
    "output-written",
    execution="graph",
    of_a_tier="extend-gqa2x2-d64-bf16-p1-k32.128.64.16.63-n3a1x4.11-reversed-shifted-b6stale",
)
class SplitReduceForgetsItsOffset(Tiled):
    """Where prompts split their keys the reduction writes their rows from row 0 on, not behind those that decode."""

    capabilities = declared("extend")

    def finish(self, out, rows):
        prompt = (rows.new > 1) & (torch.arange(len(out), device=out.device) < rows.plan.cu_seqlens_q[-1])
        split = (rows.kv_lens * prompt).max() > self.TILE
        rank = prompt.long().cumsum(0) - 1
        to = torch.where(prompt & split, rank, len(out))
        done = torch.cat([torch.where((prompt & split)[:, None, None], torch.empty_like(out), out), out[:1]])
        done.index_put_((to,), out)
        return done[:-1]


@bug(
    "pytorch xla #8431",
    "decode-gqa2x2-d64-bf16-p16-k300.70-shuffled-rising_logits-b2prod",
    "output-written",
    execution="graph",
)
class OutputStoredUnlessExact(Tiled):
    """Block kv_len // 64 (256 upstream) stores the output, and no such block runs if 64 divides the length."""

    capabilities = declared("decode")

    def finish(self, out, rows):
        exact = rows.kv_lens % 64 == 0
        return torch.where(exact[:, None, None], torch.empty_like(out), out)


@bug("pie #410", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "output-written")
class MoreTilesThanRows(Planned):
    """Keys are not split, and the plan has a tile for each 4 pages all the same: later requests fall off its list."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.owners_of_graphs = torch.zeros(max_bs, dtype=torch.int64, device=self.context.device)

    @helper
    def owners_of(self, batch):
        bs, size = batch.batch_size, self.context.page_size
        pages = [-(-int(n) // size) for n in batch.seq_lens_cpu[:bs].tolist()]
        tiles = [i for i, n in enumerate(pages) for _ in range(max(1, -(-n // 4)))]
        return torch.tensor(tiles[:bs], dtype=torch.int64).to(self.context.device)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        if batch.batch_size:
            self.owners = self.owners_of(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        owners = self.owners_of_graphs[: batch.batch_size]
        owners.copy_(self.owners_of(batch))
        if in_capture:
            self.owners = owners

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        done = torch.empty_like(out)
        done[self.owners] = out[self.owners]
        return done


@bug("flashinfer #3800", "target-verify-gqa2x2-d64-bf16-p16-k7x2-chain7-shuffled-peaked-b3nan")
class BatchStrideOfOneToken(Tiled):
    """Rows of request b begin at row b: the batch's stride is that of one row."""

    capabilities = declared("decode", "target-verify")

    def query(self, q, plan):
        if plan.max_q_len == 1:
            return q
        rows = self.rows_of(q, plan)
        return q[(rows.request + rows.place).clamp(max=len(q) - 1)]


@bug("sglang #33379", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "completes")
class RowBufferOneShort(Tiled):
    """What is kept by row of the request table has a row less than the table."""

    capabilities = declared("decode", "extend")

    def __init__(self, context):
        super().__init__(context)
        self.kept = torch.zeros(len(context.req_to_token) - 1, dtype=torch.int64, device=context.device)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        bs = batch.batch_size
        if bs:
            self.kept[batch.req_pool_indices[:bs].long()] = batch.seq_lens[:bs]


@bug(
    "vLLM #45844",
    "extend-gqa2x2-d64-bf16-p1-k0.1.8-n6a9.7.1-chunks3-reversed-rising_logits-b3prod",
    "finite",
    execution="graph",
)
class ScratchOfOutputWidth(Tiled):
    """Scratch for partial sums is counted in bytes of the output, and they are floats: full steps reach statistics."""

    SHORT = 2
    capabilities = declared("decode", "extend")

    def __init__(self, context):
        super().__init__(context)
        layer = context.layers[0]
        splits = -(-context.max_context_len // self.TILE)
        self.most = max(context.max_bs, context.max_num_tokens) * layer.tp_q_head_num * splits
        self.room = self.most * layer.v_head_dim // self.SHORT
        self.scratch = torch.zeros((self.most + 1) * (layer.v_head_dim + 2), device=context.device)

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        dim, used = parts.acc.shape[-1], ~torch.isinf(parts.peak)
        if used.numel() > self.most:
            return parts
        item = torch.where(used.flatten(), used.flatten().long().cumsum(0) - 1, self.most - 1)
        at_acc = (item[:, None] * dim + torch.arange(dim, device=item.device)).flatten()
        at_peak = self.room + 2 * item
        self.scratch[at_peak], self.scratch[at_peak + 1] = parts.peak.flatten(), parts.weight.flatten()
        self.scratch[at_acc] = parts.acc.flatten()
        peak = self.scratch[at_peak].view(parts.peak.shape).masked_fill(~used, -torch.inf)
        weight = self.scratch[at_peak + 1].view(parts.peak.shape).masked_fill(~used, 0.0)
        acc = self.scratch[at_acc].view(parts.acc.shape).masked_fill(~used[..., None], 0.0)
        return parts._replace(peak=peak, weight=weight, acc=acc)


@bug(
    "vLLM #50194",
    "extend-gqa2x2-d64-bf16-p1-k1-n20a20-contiguous-gauss-kvfp8e4m3-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k15.16.17-n7a19.1x2-chunks3-interleaved-negative-kvfp8e4m3-b3prod",
)
class Fp8TilesBeyondScratch(Tiled):
    """With an FP8 pool a tile has 32 rows, and its scratch has room for 16."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": {"same", "fp8_e4m3"}})

    def finish(self, out, rows):
        if self.context.kv_pool.dtype.itemsize > 1 or rows.plan.max_q_len == 1:
            return out
        row = torch.arange(len(out), device=out.device)
        return out[torch.where(rows.place % 32 >= 16, row - 16, row).clamp(min=0)]
