"""Which keys count: lengths, prefixes, and what lies behind the last key."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_launchers import SPEC_V1_V2, Known, wide, windowed
from parents_native import Native, changed
from parents_varlen import VARLEN_EXTENDS, Varlen
from parents_work_list import WorkList
from plain_backends import DRAFT_EXTENDS, SPEC, Planned, Tiled, TwoParts, WithoutCausalMask, declared, wide_capabilities
from plain_splits import RowsAsGiven
from torch.nn.functional import pad

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import ForwardMode
from attn_testkit_corpus.faults.catalogue import bug, helper

TWICE = 0.6931471805599453
"""ln 2: a key with this bias counts twice."""

TILE = 16


@bug(1, "flash-attention #1455", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "reads-own-kv")
class SplitMaskedByLongestOfBatch(Tiled):
    """The split kernel masks by the longest length of the batch, not by the request's."""

    def visible(self, index, rows):
        if rows.plan.max_q_len == 1:
            return (index < rows.plan.kv_lens.max()).expand(len(rows.position), -1)
        return super().visible(index, rows)


@bug(1, "sglang #27738", "draft-extend-gqa2x2-d64-bf16-p1-k7x2-n4a4x2-shuffled-peaked-b5prod")
class AcceptedCountedTwice(Tiled):
    """The KV indices hold the accepted tokens, and the kernel attends them from k and v as well."""

    capabilities = declared("draft-extend", graph=())

    def bias(self, index, rows):
        return (index >= (rows.position - rows.place)[:, None]).float() * TWICE


@bug(1, "pytorch #160861", "extend-gqa2x2-d64-bf16-p16-k32.128.64.16.63-n1a1x5-shuffled-one_hot-b5prod", "reads-own-kv")
class LastPageSeenWhole(Tiled):
    """The paged block mask has no upper bound at the length: the last page is attended whole."""

    def visible(self, index, rows):
        if rows.plan.max_q_len > 1:
            return super().visible(index, rows)
        size = rows.plan.page_size
        return index < ((rows.kv_lens + size - 1) // size * size)[:, None]


@bug(1, "vllm-gaudi #393", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod")
class PrefixOneTooLong(TwoParts):
    """A prefix that ends inside a page is attended with a token more, which counts twice."""

    capabilities = declared("extend")

    def bias(self, index, rows):
        prefix = rows.prefix[:, None]
        return ((index == prefix) & (prefix % rows.plan.page_size > 0)).float() * TWICE


@bug(1, "sglang #40214", "target-verify-gqa2x2-d64-bf16-p1-k7.8.9-chain7-reversed-rising_logits-b3prod")
class VerifyLengthIsPrefix(Tiled):
    """Verify takes the length of the prefix for the whole: rows of the draft are not attended."""

    capabilities = declared("decode", "target-verify")

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.plan.max_q_len == 1:
            return seen
        return seen & (index < (rows.position - rows.place)[:, None])


@bug(1, "tt-metal #38004", "decode-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-shared-gauss-b7prod")
class PagesPaddedToTiles(Tiled):
    """Pages of fewer than 32 slots are padded with keys of zeros, and each weighs exp(0)."""

    capabilities = declared("decode", "extend", kv_pool={"page_sizes": {16, 32}})

    def merge(self, parts, rows):
        size = rows.plan.page_size
        padded = (rows.kv_lens + size - 1) // size * max(0, 32 - size)
        shape = (*parts.peak.shape[:2], 1)
        peak = torch.where(padded > 0, 0.0, -torch.inf)[:, None, None].expand(shape)
        return super().merge(parts.and_also(peak, padded.float()[:, None, None].expand(shape)), rows)


@bug(2, "flashinfer #3716", "extend-gqa2x2-d64-bf16-p16-k9.530.70.0-n8a20.1.3.7-interleaved-gauss-b4prod-noncausal")
class TailCountedWithoutCausal(WithoutCausalMask):
    """Without a causal mask lanes behind the length are not masked: zeros up to the tile's end count."""

    capabilities = declared("extend", options={"non_causal": {"extend"}})

    def merge(self, parts, rows):
        if rows.layer.causal:
            return super().merge(parts, rows)
        tail = -rows.kv_lens % self.TILE
        shape = (*parts.peak.shape[:2], 1)
        peak = torch.where(tail > 0, 0.0, -torch.inf)[:, None, None].expand(shape)
        return super().merge(parts.and_also(peak, tail.float()[:, None, None].expand(shape)), rows)


@bug(2, "sglang #22020", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod")
class ThisChunkAlone(Tiled):
    """An extend attends its own rows alone, and no prefix."""

    capabilities = declared("decode", "extend")

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        return seen if rows.plan.max_q_len == 1 else seen & (index >= rows.prefix[:, None])


@bug(
    2,
    "vLLM #48003",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "inputs-unchanged",
)
class HostLengthsChangedInPlace(Tiled):
    """The plan of an extend takes the new rows off the server's own list of lengths."""

    capabilities = declared("extend", needs={"cpu_seq_lens": True})

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.batch_size and batch.seq_lens_cpu is not None:
            lens = batch.seq_lens_cpu
            lens[: batch.batch_size] -= torch.tensor(list(batch.extend_seq_lens_cpu)[: batch.batch_size])


@bug(
    2,
    "openvino #37377",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-kvfp8e4m3-b24prod",
)
class BoundaryTileFromTheCache(RowsAsGiven):
    """The tile of 16 keys in which the prefix ends is read from the pool as a whole."""

    def is_given(self, index, rows):
        return index // 16 * 16 >= rows.prefix[:, None]


@bug(3, "sglang #12687", "draft-extend-v2-mha2-d64-bf16-p1-k7.8.9-n6a1.3.5-contiguous-rising_logits-b6prod")
class Int64LengthsReadAsInt32(Tiled):
    """An eager draft-extend hands lengths of 64 bits to a kernel that reads 32."""

    capabilities = wide_capabilities(*SPEC)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        if batch.batch_size and batch.forward_mode.is_draft_extend_v2():
            words = batch.seq_lens.contiguous().view(torch.int32)[: batch.batch_size]
            self._kit_step = replace(self._kit_step, kv_lens=words)


@bug(
    3,
    "flashinfer #726",
    "decode-mha2-d64-bf16-p16-k14.15.16.17.18.19.20.21.22.23.24.25.26.27.28.29-shuffled-gauss-b30prod",
    "completes",
    execution="graph",
)
class ZeroLengthsCountedOnce(Planned):
    """Searching the chunk size, lengths of 0 count nothing; splitting, they count one chunk."""

    capabilities = wide_capabilities("decode", graph=("decode",), needs={"cpu_seq_lens": True})

    def get_cuda_graph_seq_len_fill_value(self):
        return 0

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        bs, size = batch.batch_size, self.context.page_size
        pages = [-(-int(n) // size) for n in batch.seq_lens_cpu[:bs].tolist()]
        most, chunk = max(8, bs), 1
        while sum(-(-n // chunk) for n in pages) > most:
            chunk += 1
        if sum(max(1, -(-n // chunk)) for n in pages) > most:
            raise RuntimeError("new batch size should not exceed padded batch size")

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        return torch.nan_to_num(super().forward(q, k, v, layer, batch, save_kv_cache))


@bug(
    4,
    "xllm #2161",
    "extend-gqa2x2-d64-bf16-p16-k7-n2a2-reversed-gauss-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p64-k7x2-n34a1.67-interleaved-rising_logits-b3prod",
)
class PrefixNotSeen(Known):
    """Prefill attends the tokens of this forward alone."""

    capabilities = wide("decode", "extend")

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        return seen & (index >= rows.prefix[:, None]) if self.extends() else seen


@bug(4, "onnxruntime #27992", "decode-gqa2x2-d64-bf16-p16-k0.1025.1040-shuffled-mean-w46-layers3from0varied-b3prod")
class UniformPast(Known):
    """The past of the batch's longest request, for all of them."""

    capabilities = windowed("decode", "extend")

    def visible(self, index, rows):
        w = rows.layer.sliding_window_size
        if w < 0:
            return super().visible(index, rows)
        p = (rows.plan.kv_lens.max().long() - rows.new + rows.place)[:, None]
        return (index <= p) & (index >= p - w) & (index < rows.kv_lens[:, None])


@bug(4, "pytorch #169222", "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod", "reads-own-kv")
class UnboundedPartialBlock(Known):
    """The last block of 32 keys has no bounds check (vector kernels: few rows)."""

    capabilities = wide("decode")

    def visible(self, index, rows):
        return index < ((rows.kv_lens + 31) // 32 * 32)[:, None]


@bug(
    5,
    "FastDeploy #8065",
    "extend-mha2-d128-bf16-p1-k32.128.64.16.63-n4a7.8.2.1x2-chunks3-reversed-gauss-kvfp8e4m3-w0-cap1.5-sink-b5prod",
    execution="graph",
)
class OneTokenPrompt(Varlen):
    """A prompt of one token is taken for a decode, which has no key yet."""

    def rows(self, count, meta):
        request, place, position = super().rows(count, meta)
        alone = (meta.cu.diff() == 1) & (meta.lens == 1)
        return request, place, position.masked_fill(alone[request], -1) if meta.extends else position


@bug(
    5,
    "flashinfer #4365",
    "decode-gqa5x2-d128-bf16-p1-k1500.70-contiguous-gauss-kvfp8e4m3-w60-cap1.5-sink-lsepages2merged-b3prod",
    "reads-own-kv",
    execution="graph",
)
class PhantomZero(WorkList):
    """A request without keys is not passed over, and a whole chunk is attended."""

    def items(self, lens):
        return super().items(lens) + [(r, 0, self.CHUNK) for r, n in enumerate(lens) if n == 0]

    def is_own(self, nth, end, key, lens):
        return nth < end


@bug(
    6,
    "vllm-ascend #3652",
    "extend-gqa2x2-d64-bf16-p16-k5-n2a2-interleaved-gauss-layers1from0-b1stale",
    of_a_tier="extend-gqa2x2-d128-bf16-p1-k3.21.5.17-n5a8.1.9.1-reversed-gauss-kvfp8e4m3-cap1.5-b5nan",
)
class KvLensAreQLens(Varlen):
    """A prompt's number of keys is that of its rows: what was cached is lost."""

    capabilities = VARLEN_EXTENDS

    def kv_lens(self, batch, cu):
        return cu.diff()


@bug(6, "sglang #36430", "target-verify-gqa2x2-d64-bf16-p1-k13-chain7-shuffled-gauss-b2prod")
class VerifyLensOverwritten(Tiled):
    """A verify's lengths are overwritten by the batch's: as many keys of the prefix are lost as the draft has."""

    capabilities = declared("decode", "target-verify")

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.plan.max_q_len == 1:
            return seen
        return seen & ((index < (rows.prefix - rows.new)[:, None]) | (index >= rows.prefix[:, None]))


@bug(
    14,
    "flashinfer #3717",
    "target-verify-gqa2x2-d64-bf16-p16-k7x2.8x29.608.8x8-chain7-reversed-"
    "negative-layers1from0-b41prod-empty_batches-noncausal-overlap_scheduling",
)
class TailIsScored(WithoutCausalMask):
    """Without a causal mask keys behind the length stay in a tile of 256: logits of 0, and values of 0."""

    capabilities = wide(
        "extend",
        "target-verify",
        bounds={"max_q_rows": 16},
        options={"non_causal": {"extend", "target-verify"}},
        server={"takes_bare_chains": True},
    )
    WHOLE = 256

    def parts(self, scores, seen, v, rows):
        if rows.layer.causal:
            return super().parts(scores, seen, v, rows)
        more = -seen.shape[1] % self.WHOLE
        scores, seen, v = pad(scores, (0, more)), pad(seen, (0, more)), pad(v, (0, 0, 0, 0, 0, more))
        index, lens = torch.arange(seen.shape[1], device=seen.device), rows.kv_lens[:, None]
        behind = (index >= lens) & (index < (lens + self.WHOLE - 1) // self.WHOLE * self.WHOLE)
        scores = scores.masked_fill(behind[:, None], 0.0)
        v = v.float().masked_fill(behind[:, :, None, None], 0.0)
        return super().parts(scores, seen | behind, v, rows)


@bug(
    14,
    "SlimServe #23",
    "target-verify-gqa2x2-d64-bf16-p16-k14.15.16.17.18.19.20.21.22.23.24.25.26.27.28.29-chain2-shuffled-gauss-b30prod",
)
class UnmappedBlocksAreZero(Known):
    """A verify scores blocks behind a request's last one, up to the longest request's, as keys and values of 0."""

    capabilities = wide(*SPEC_V1_V2, bounds={"max_q_rows": 16, "max_topk": 4})

    def parts(self, scores, seen, v, rows):
        if self.decodes():
            return super().parts(scores, seen, v, rows)
        size = rows.plan.page_size
        index = torch.arange(seen.shape[1], device=seen.device)
        blocks = (rows.kv_lens + size - 1) // size * size
        unmapped = (index >= blocks[:, None]) & (index < rows.plan.kv_lens.long().max())
        scores = scores.masked_fill(unmapped[:, None], 0.0)
        v = v.float().masked_fill(unmapped[:, :, None, None], 0.0)
        return super().parts(scores, seen | unmapped, v, rows)


class HostLengths(Native):
    """Keys of a verify are counted on the host; its drafts are chains."""

    capabilities = wide("decode", "target-verify", needs={"cpu_seq_lens": True})

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.lens_of_graphs = torch.ones(max_bs, dtype=torch.int64, device=self.context.device)

    def host_lens(self, batch):
        """[B] on the host: keys, the draft's included."""
        return batch.seq_lens_cpu[: batch.batch_size] + self.context.num_draft_tokens

    def init_forward_metadata(self, batch):
        if batch.batch_size and batch.forward_mode.is_target_verify():
            self.lens = self.host_lens(batch).to(self.context.device)
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.forward_mode.is_target_verify():
            self.lens = self.lens_of_graphs[: batch.batch_size]
            self.lens.copy_(self.host_lens(batch))

    def _kv_lens(self, batch, counts):
        if not batch.forward_mode.is_target_verify():
            return super()._kv_lens(batch, counts)
        return self.lens.clamp(max=len(self._key))

    def _visibility(self, batch, counts, offset):
        return super()._visibility(changed(batch, spec_info=None), counts, offset)


# sglang #31739: the draft is added to the host's lengths in place, and once more for the kernel.
@bug(16, "sglang #31739", "target-verify-gqa2x2-d128-bf16-p16-k0.1.16-chain7-shuffled-peaked-b3prod", "reads-own-kv")
class DraftCountedTwice(HostLengths):
    """Keys of a verify are prefix + 2 N, of which the last N are not written, and row j is the j-th from the end."""

    def host_lens(self, batch):
        lens = batch.seq_lens_cpu[: batch.batch_size]
        lens += self.context.num_draft_tokens
        return super().host_lens(batch)


class Two(Known, TwoParts):
    """The prefix and the new rows apart; it knows its mode."""

    capabilities = wide("decode", "extend", *DRAFT_EXTENDS)
    eager = True

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False


# sglang #27738: the list of the prefix is made with seq_lens, which count the accepted tokens.
@bug(16, "sglang #27738", "draft-extend-gqa4x2-d128-bf16-p1-k7.8.9-n4a1x3-interleaved-mean-b6nan")
class AcceptedInPrefix(Two):
    """An eager draft-extend sees all its rows as prefix, and those up to its own once more."""

    def run(self, q, kv, plan):
        if not self.eager or self.mode != "draft-extend":
            return super().run(q, kv, plan)
        scores, seen, v, rows = self.prepare(q, kv, plan)
        index = torch.arange(seen.shape[1], device=q.device)
        new = self.part(scores, seen & (index >= rows.prefix[:, None]), v, plan)
        old = self.part(scores, index < rows.kv_lens[:, None], v, plan)
        return self.finish(self.merge_two(old, new).to(q.dtype), rows)


# 2, vllm #40176: without the causal mask the last tile of new keys ends among the rows of the next request.
@bug(
    18,
    "vllm #40176",
    "extend-mla2-d512r32-fp32-p16-k15.16.17-n7a1x2.19-chunks3-contiguous-peaked-kvfp8e4m3-kvinblock-w11-cap1.5-sink-lseprefix-b4prod-noncausal-leftofrow",
    "log-sum-exp",
)
class TileOfNextRequest(TorchNativeBackend):
    """Rows behind the last one of a request are attended to, up to a whole tile, if a layer is not causal."""

    @helper
    def behind(self, batch):
        """[B, C] each: number of a column's row in the batch, and True if the tile has it besides the request's."""
        counts = batch.extend_seq_lens.long()
        column = self._key - batch.seq_lens[: len(counts)][:, None]
        row = (counts.cumsum(0))[:, None] + column
        there = (column >= 0) & (column < (-counts % TILE)[:, None]) & (row < len(batch.out_cache_loc))
        return row.clamp(0, len(batch.out_cache_loc) - 1), there

    @helper
    def reads_behind(self, batch):
        return batch.forward_mode is ForwardMode.EXTEND and not self.context.causal

    def _key_slots(self, batch, group, of_encoder):
        slots = super()._key_slots(batch, group, of_encoder)
        if of_encoder or not self.reads_behind(batch):
            return slots
        row, there = self.behind(batch)
        return torch.where(there, self.context.groups[group].cache_loc(batch).clamp(min=0)[row], slots)

    def _visibility(self, batch, counts, offset):
        position, key, visible = super()._visibility(batch, counts, offset)
        if self.reads_behind(batch):
            visible = visible | self.behind(batch)[1][:, None]
        return position, key, visible
