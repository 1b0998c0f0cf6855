"""Which rows are whose: offsets of queries, mixed batches, requests of unequal and of no rows."""

from __future__ import annotations

import torch
from parents_latent import Latent, mla_capabilities
from parents_launchers import Known, wide, windowed
from parents_sparse import Indexed
from parents_split_kv import SplitKV
from parents_varlen import VARLEN_EXTENDS, Varlen
from parents_work_list import WorkList
from plain_backends import SPEC, Planned, Rows, Tiled, declared, wide_capabilities
from plain_splits import WithKVSplits

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug, helper
from attn_testkit_corpus.faults.sparse import SparseParent


@bug(
    1,
    "vLLM #40859, vLLM #40766",
    "extend-gqa2x2-d64-bf16-p16-k37.3.0.16.9.33.1.17.5-n3a19.1x8-chunks3-reversed-gauss-b10prod",
)
class SingleTokensExpectedFirst(Tiled):
    """In a mixed batch, rows of requests with one token are expected before all other rows."""

    capabilities = declared("extend")

    def run(self, q, kv, plan):
        several = plan.cu_seqlens_q.diff()[self.rows_of(q, plan).request] > 1
        order = torch.argsort(several.int(), stable=True)
        expected = torch.empty_like(q).index_copy(0, order, q)
        return super().run(expected, kv, plan)[order]


@bug(
    1,
    "vLLM #28670",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "output-written",
)
class ShortestExtendSkipped(Tiled):
    """Requests of no more rows than a least number are skipped, and the least of the batch is passed."""

    capabilities = declared("extend")

    def finish(self, out, rows):
        n = rows.plan.cu_seqlens_q.diff()
        least = torch.where(n > 1, n, 1 << 20).min()
        skipped = (n > 1) & (n <= least)
        return torch.where(skipped[rows.request][:, None, None], torch.empty_like(out), out)


@bug(
    2,
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
    2,
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


@bug(2, "pie #410", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "output-written")
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


@bug(2, "flashinfer #3800", "target-verify-gqa2x2-d64-bf16-p16-k7x2-chain7-shuffled-peaked-b3nan")
class BatchStrideOfOneToken(Tiled):
    """Rows of request b begin at row b: the batch's stride is that of one row."""

    capabilities = declared("decode", "target-verify")

    def query(self, q, plan):
        if plan.max_q_len == 1:
            return q
        rows = self.rows_of(q, plan)
        return q[(rows.request + rows.place).clamp(max=len(q) - 1)]


@bug(2, "aiter #2720", "target-verify-mla16-d512r64-bf16-p1-k0.1.8-chain7-shuffled-rising_logits-b4stale")
class SameRowForOddWidths(Tiled):
    """Rows of a request have one output where their number is no power of two."""

    capabilities = declared(
        "decode", "target-verify", heads={"families": {"mla"}, "gqa_ratios": {16}, "head_dims": {512}}
    )

    def finish(self, out, rows):
        n = rows.plan.max_q_len
        if n & (n - 1) == 0:
            return out
        return out[torch.arange(len(out), device=out.device) - rows.place]


@bug(
    3,
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


@bug(3, "vLLM #51065", "draft-extend-v2-mla16-d512r64-bf16-p64-k63.64.65-n6a6x3-contiguous-one_hot-b6prod")
class TableIndexedByRow(Latent):
    """Lengths are by row and page tables by request; both are indexed by row."""

    capabilities = mla_capabilities(*SPEC)

    def table_row(self, rows):
        if rows.plan.max_q_len == 1:
            return rows.request
        return torch.arange(len(rows.request), device=rows.request.device).clamp(max=len(rows.plan.kv_lens) - 1)


@bug(
    4,
    "candle-vllm #140",
    "extend-gqa2x2-d64-bf16-p16-k0.9-n3a2.4-contiguous-gauss-layers1from0-b2prod",
    of_a_tier="extend-gqa4x2-d64-bf16-p64-k63.64.65-n38a17.64.33-chunks3-shared-mean-b4prod",
)
class FirstOffsetForAll(Known):
    """Masks of several rows are made with the first sequence's offset."""

    capabilities = windowed("decode", "extend")

    def visible(self, index, rows):
        if not self.extends() or rows.plan.max_q_len <= 1:
            return super().visible(index, rows)
        p = (rows.plan.prefix_lens[0].long() + rows.place)[:, None]
        w = rows.layer.sliding_window_size
        seen = (index <= p) & (index < rows.kv_lens[:, None])
        return seen & (index >= p - w) if w >= 0 else seen


@bug(
    4,
    "vllm-ascend #15707",
    "extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n4a1x6.19-reversed-mean-b8prod",
    execution="graph",
)
class UniformByTotal(Known):
    """In eager a batch counts as uniform where its total of rows is a uniform one's."""

    capabilities = wide("decode", "extend")
    width = 4
    eager = True

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False

    def rows_of(self, q, plan):
        rows = super().rows_of(q, plan)
        if not self.eager or not self.extends() or len(q) != self.width * len(plan.kv_lens):
            return rows
        row = torch.arange(len(q), device=q.device)
        request, place = row // self.width, row % self.width
        return Rows(plan, request, place, plan.kv_lens[request].long() - self.width + place)


@bug(
    4,
    "onnxruntime #28200",
    "extend-gqa2x2-d64-bf16-p16-k3-n4a8-shuffled-gauss-layers1from0-b2prod",
    "replay-follows-batch",
    execution="graph",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n4a1x6.19-reversed-mean-b8prod",
)
class GridFromTotals(Known):
    """Longest request = rows - requests + 1; what is behind it is not launched."""

    capabilities = wide("decode", "extend")

    def finish(self, out, rows):
        longest = len(out) - len(rows.plan.kv_lens) + 1
        return torch.where((rows.place < longest)[:, None, None], out, 0.0) if self.extends() else out


@bug(
    5,
    "flash-attention #1217",
    "draft-extend-mqa4-d64-bf16-p1-k9.70.1.33.9.70.1-n2a2x7-shuffled-gauss-b7prod",
    execution="graph",
)
class CombineFixedQ(SplitKV):
    """The kernel that merges splits computes the row as request * longest + position."""

    def finish(self, out, rows):
        longest = rows.plan.cu_seqlens_q.diff().max()
        return out[(rows.request * longest + rows.place).clamp(max=len(out) - 1)]


@bug(
    5,
    "amd-shark-ai #2235",
    "extend-mha2-d128-bf16-p64-k7x2-n3a2.3-chunks3-interleaved-one_hot-kvfp8e4m3-w4-cap1.5-b2prod",
)
class StartOfFirst(Varlen):
    """In prefill rows of all requests count from the first one's prefix."""

    def rows(self, count, meta):
        request, place, position = super().rows(count, meta)
        if meta.extends:
            prefix = (meta.lens[0] - meta.cu[1]).clamp(min=0)
            position = torch.minimum(prefix + place, meta.lens[request].long() - 1)
        return request, place, position


@bug(
    5,
    "ATOM #2057",
    "decode-mqa5-d64-bf16-p16-k35.0.16.1.70-contiguous-gauss-lsepages2-b6prod",
    "log-sum-exp",
    execution="graph",
)
class ZeroRowsShift(WorkList):
    """A request without keys in a part spoils the work items of later short ones."""

    def items(self, lens):
        found, shifted = [], False
        for request, count in enumerate(lens):
            shifted = shifted or count == 0
            if shifted and count <= self.CHUNK:
                found.append((request - (count > 0), 0, count))
            else:
                found += [(request, a, min(a + self.CHUNK, count)) for a in range(0, count, self.CHUNK)]
        return found


@bug(
    5,
    "vllm #19321",
    "extend-gqa7x2-d64-bf16-p16-k3.37.9.17-n1a1x4-shuffled-one_hot-w4-b4prod",
    "padding-inert",
    execution="graph",
)
class StartLocPad(Varlen):
    """Where rows of requests begin is -1 for those without rows, and no longer rises."""

    def fill(self, cu, lens, table):
        super().fill(cu, lens, table)
        self.kept.cu[1 : len(cu)] = cu[1:].masked_fill(cu.diff() == 0, -1)


@bug(
    6,
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


@bug(
    6,
    "vllm-ascend #3277",
    "extend-mha2-d128-bf16-p64-k3.33.17-n18a1x2.18-contiguous-gauss-kvfp8e4m3-sink-b4prod",
    of_a_tier="extend-mha2-d64-bf16-p1-k0.1.8-n5a1x2.11-chunks3-shared-peaked-kvfp8e4m3-cap1.5-sink-b4nan",
)
class SeqLensOfDecodes(Varlen):
    """Where decodes stand before prompts, lengths are cut to those of the decodes, and prompts read them too."""

    capabilities = VARLEN_EXTENDS

    def kv_lens(self, batch, cu):
        lens, counts = super().kv_lens(batch, cu), batch.extend_seq_lens_cpu
        decodes = next((i for i, n in enumerate(counts) if n != 1), len(counts))
        if not 0 < decodes < len(lens):
            return lens
        place = torch.arange(len(lens), device=lens.device)
        of_another = lens[:decodes][(place - decodes).clamp(0, decodes - 1)].maximum(cu.diff())
        return torch.where(place < decodes, lens, of_another)


@bug(6, "TensorRT-LLM #12161", "extend-mla16-d512r64-bf16-p16-k32.128.64.16.63-n5a19.1x4-reversed-one_hot-b5prod")
class PlanOfWholeBatch(Latent):
    """Requests of one row look up their tiles in a schedule of all requests, by their place among those of one row."""

    capabilities = mla_capabilities("extend", bounds={"max_context_len": 4096})

    def visible(self, index, rows):
        tiles = (rows.plan.kv_lens.long() + 63) // 64
        single = rows.plan.cu_seqlens_q.diff() == 1
        place = (single.long().cumsum(0) - 1).clamp(min=0)
        limit = torch.where(single, tiles[place], tiles)[rows.request] * 64
        return super().visible(index, rows) & (index < limit[:, None])


class Rebased(Tiled):
    """Healthy: on the host, for each KV group, rows of prompts are counted from behind those that decode in front."""

    capabilities = declared(
        "extend",
        graph=(),
        kv_pool={"page_sizes": {16}, "kv_groups": True},
        windows={"extend"},
        needs={"cpu_seq_lens": True},
        bounds={"max_context_len": 2048},
    )

    def init_forward_metadata(self, batch):
        bs = batch.batch_size
        if not bs:
            return
        self.init_forward_metadata_in_graph(batch)
        rows = [int(n) for n in batch.extend_seq_lens_cpu[:bs]]
        self.decodes = next((i for i, n in enumerate(rows) if n != 1), bs)
        shared = torch.tensor([0, *rows]).cumsum(0)
        self.starts = [self.rebased(shared).to(self.context.device) for _ in self.context.groups]

    def rebased(self, shared):
        mine = shared.clone()
        mine[self.decodes :] -= self.decodes
        return mine

    def rows_of(self, q, plan):
        starts, first = self.starts[self.context.group_of(plan.layer).index], self.decodes
        row, prompts = torch.arange(len(q), device=q.device), starts[first:]
        of_prompt = torch.searchsorted(prompts, row - first, right=True) - 1
        of_prompt = of_prompt.clamp(0, max(len(prompts) - 2, 0))
        request = torch.where(row < first, row, of_prompt + first).clamp(max=len(plan.kv_lens) - 1)
        place = torch.where(row < first, 0, row - first - prompts[of_prompt])
        new = plan.cu_seqlens_q.diff()[request].long()
        return Rows(plan, request, place, plan.kv_lens[request].long() - new + place)


@bug(
    9,
    "vllm #27650",
    "extend-gqa2x2-d64-bf16-p16-k39.70.6-n3a1x2.5-reversed-gauss-w7-layers3from5groups-b4prod",
    "reads-own-kv",
)
class StartsShared(Rebased):
    """All KV groups share the offsets on the host, which are rebased in place: for the second group twice."""

    def rebased(self, shared):
        shared[self.decodes :] -= self.decodes
        return shared


@bug(
    10,
    "onnxruntime #28409",
    "extend-gqa2x2-d64-bf16-p16-k3-n22a66-shuffled-gauss-layers1from0-b3prod",
    "replay-follows-batch",
    execution="graph",
    of_a_tier="extend-gqa2x32-d64-bf16-p16-k3-n13a130-shuffled-gauss-b10prod",
)
class OrtMaxQueryLen(Tiled):
    """Blocks of 64 rows for as many as the longest request has where each request has a row."""

    capabilities = declared("extend", kv_pool={"page_sizes": {16}})

    def finish(self, out, rows):
        longest = len(out) - len(rows.plan.kv_lens) + 1
        done = rows.place < -(-longest // 64) * 64
        return torch.where(done[:, None, None], out, torch.empty_like(out))


@bug(10, "mlx #4431", "decode-gqa8x2-d64-bf16-p16-k1151x3-shuffled-gauss-layers1from0-b4prod")
class MlxBatchOffset(Tiled):
    """Eight heads a KV head, 1,024 keys and more, no mask because all are as long: all read the first one's keys."""

    capabilities = declared("decode", heads={"gqa_ratios": {4, 8}}, kv_pool={"page_sizes": {16}})

    def keys(self, kv, slots, plan):
        lens = plan.kv_lens
        if plan.layer.q_per_kv >= 8:
            two_passes = (lens == lens[0]).all() & (lens[0] >= 1024)
            slots = torch.where(two_passes, slots[:1], slots)
        return super().keys(kv, slots, plan)


@bug(
    11,
    "aotriton #235",
    "extend-gqa2x2-d64-bf16-p16-k0.35.0.16.1.70.33.9.17-n2a2.1.2.1.2.1.2.1.2-reversed-gauss-lseprefix-b10prod",
    "log-sum-exp",
)
class PersistentSkips(WithKVSplits):
    """Four workgroups take tiles of 16 rows by turns. One that meets a tile without keys ends, and its later tiles are
    not written.
    """

    TILE_ROWS, WORKGROUPS = 16, 4
    capabilities = declared(
        "extend", kv_pool={"page_sizes": {16}}, lse=LogSumExp(base="e", whole={"extend"}, prefix={"extend"})
    )

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        tiles = -(-plan.cu_seqlens_q.diff() // self.TILE_ROWS)
        ends = tiles.cumsum(0)
        request = torch.searchsorted(ends, torch.arange(len(q), device=q.device), right=True).clamp(max=len(tiles) - 1)
        empty = plan.part_lens[request] == 0
        lost = torch.zeros_like(empty)
        for group in range(self.WORKGROUPS):
            lost[group :: self.WORKGROUPS] = empty[group :: self.WORKGROUPS].cumsum(0) > 0
        rows = self.rows_of(q, plan)
        tile = (ends - tiles)[rows.request] + rows.place // self.TILE_ROWS
        gone = lost[tile]
        return out.masked_fill(gone[:, None, None], 0.0), lse.masked_fill(gone[:, None], -torch.inf)


@bug(14, "ATOM #1058", "draft-extend-mqa4-d64-bf16-p16-k0.1.16-n6a6x3-shuffled-gauss-sel1-b3prod", "reads-own-kv")
class AsManyRowsEach(SparseParent):
    """Each request has as many rows as the plan's largest, of a builder for decode and drafts."""

    capabilities = SparseParent.capabilities.with_changes(
        eager={"decode", "target-verify", "draft-extend"}, graph={"decode", "target-verify", "draft-extend"}
    )

    def request_of_row(self, selected, plan):
        row = torch.arange(len(selected), device=selected.device)
        return (row // plan.max_q_len).clamp(max=len(plan.kv_lens) - 1)


# vllm #52500: short extends are decodes. They count as even if those with rows are, and rows are then shared evenly.
class EvenRows(Indexed):
    """With a request without rows, each request is taken to have rows / requests."""

    MODES = ("extend",)
    capabilities = Indexed.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})
    width = 0

    def scored(self, q_index, weights, plan):
        some = {each for each in self.new_lens if each} if self.extends() else set()
        if len(some) == 1 and max(some) <= 8:
            rows, requests = sum(self.new_lens), len(self.new_lens)
            if rows % requests:
                raise RuntimeError(f"shape '[{requests}, -1]' is invalid for {rows} rows")
            self.width = rows // requests
        try:
            return super().scored(q_index, weights, plan)
        finally:
            self.width = 0

    def request_of_row(self, rows, plan):
        if not self.width:
            return super().request_of_row(rows, plan)
        return (torch.arange(len(rows), device=rows.device) // self.width).clamp(max=len(plan.kv_lens) - 1)
