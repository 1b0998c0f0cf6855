"""Which keys a row sees: windows, causality, lengths, splits; bugs of the sixth set."""

from __future__ import annotations

import torch
from fifth_parents_split import SplitKV
from fifth_parents_varlen import Varlen
from plain_backends import Tiled, declared
from plain_splits import WithKVSplits
from third_parents import Latent, mla_capabilities

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug

_EXTENDS = Varlen.capabilities.with_changes(
    eager={"extend"}, graph=(), windows=(),
    server={"verify_lens": {"prefix"}, "takes_bare_chains": False, "padded_requests": {"rows"}},
)  # fmt: skip


@bug(
    "vllm-ascend #3277",
    "extend-mha2-d128-bf16-p64-k3.33.17-n18a1x2.18-contiguous-gauss-kvfp8e4m3-sink-b4prod",
    of_a_tier="extend-mha2-d64-bf16-p1-k0.1.8-n5a1x2.11-chunks3-shared-peaked-kvfp8e4m3-cap1.5-sink-b4nan",
)
class SeqLensOfDecodes(Varlen):
    """Where decodes stand before prompts, lengths are cut to those of the decodes, and prompts read them too."""

    capabilities = _EXTENDS

    def kv_lens(self, batch, cu):
        lens, counts = super().kv_lens(batch, cu), batch.extend_seq_lens_cpu
        decodes = next((i for i, n in enumerate(counts) if n != 1), len(counts))
        if not 0 < decodes < len(lens):
            return lens
        place = torch.arange(len(lens), device=lens.device)
        of_another = lens[:decodes][(place - decodes).clamp(0, decodes - 1)].maximum(cu.diff())
        return torch.where(place < decodes, lens, of_another)


@bug(
    "vllm-ascend #3652",
    "extend-gqa2x2-d64-bf16-p16-k5-n2a2-interleaved-gauss-layers1from0-b1stale",
    of_a_tier="extend-gqa2x2-d128-bf16-p1-k3.21.5.17-n5a8.1.9.1-reversed-gauss-kvfp8e4m3-cap1.5-b5nan",
)
class KvLensAreQLens(Varlen):
    """A prompt's number of keys is that of its rows: what was cached is lost."""

    capabilities = _EXTENDS

    def kv_lens(self, batch, cu):
        return cu.diff()


@bug("TensorRT-LLM #12161", "extend-mla16-d512r64-bf16-p16-k32.128.64.16.63-n5a19.1x4-reversed-one_hot-b5prod")
class PlanOfWholeBatch(Latent):
    """Requests of one row look up their tiles in a schedule of all requests, by their place among those of one row."""

    capabilities = mla_capabilities("extend", bounds={"max_context_len": 4096})

    def visible(self, index, rows):
        tiles = (rows.plan.kv_lens.long() + 63) // 64
        single = rows.plan.cu_seqlens_q.diff() == 1
        place = (single.long().cumsum(0) - 1).clamp(min=0)
        limit = torch.where(single, tiles[place], tiles)[rows.request] * 64
        return super().visible(index, rows) & (index < limit[:, None])


@bug("sglang #34273", "extend-gqa2x2-d64-bf16-p16-k0.1.16-n179a15.520.2-shared-gauss-w4-layers1from0-b3prod")
class WindowOneMore(Tiled):
    """The window of an extend has a key of the prefix too many."""

    capabilities = declared("extend", windows={"extend"})

    def visible(self, index, rows):
        seen, window = super().visible(index, rows), rows.layer.sliding_window_size
        if window < 0:
            return seen
        return seen | ((index == (rows.position - window - 1)[:, None]) & (index < rows.prefix[:, None]))


@bug(
    "tokenspeed #364",
    "extend-gqa2x2-d64-bf16-p16-k0.35.0.16.1.70.33.9.17-n2a2.1.2.1.2.1.2.1.2-reversed-gauss-lsetokens3-b10prod",
    "log-sum-exp",
)
class LocalCausal(WithKVSplits):
    """A rank's keys are masked causally by their number on the rank."""

    capabilities = declared(
        "decode",
        "extend",
        "draft-extend-v2",
        kv_pool={"page_sizes": {16}},
        bounds={"max_context_len": 2048},
        lse=LogSumExp(base="e", whole={"decode"}, tokens={"decode", "extend", "draft-extend-v2"}, merges=True),
    )

    def sees(self, key, rows):
        if rows.plan.part.kind != "rank":
            return super().sees(key, rows)
        nth = torch.arange(key.shape[1], device=key.device)
        last = rows.plan.part_lens[rows.request].long() - rows.new + rows.place
        return nth <= last[:, None]


@bug("candle #3624", "extend-gqa2x2-d64-bf16-p16-k0.1.16-n2a2.3.1-chunks3-contiguous-one_hot-b6stale")
class BatchlessMask(Tiled):
    """The causal mask has no batch dimension: behind it are zeros, and later requests see their later rows."""

    capabilities = declared("decode", "extend")

    def visible(self, index, rows):
        later = (index >= rows.prefix[:, None]) & (index < rows.kv_lens[:, None]) & (rows.request > 0)[:, None]
        return super().visible(index, rows) | later


@bug("tilelang #575", "decode-mqa4-d64-bf16-p1-k9.70.1.33.9.70.1.33-shuffled-gauss-b8prod")
class BlockOverSplit(SplitKV):
    """Splits have their share of the keys, and read whole tiles of 32: the first keys of the next split count twice."""

    def length(self, rows):
        return ((rows.kv_lens + self.SPLITS - 1) // self.SPLITS).clamp(min=1)

    def is_of(self, number, index, rows):
        length = self.length(rows)[:, None]
        tiles = (length + self.TILE - 1) // self.TILE
        return (index >= number * length) & (index < number * length + tiles * self.TILE)


@bug("sglang #36430", "target-verify-gqa2x2-d64-bf16-p1-k13-chain7-shuffled-gauss-b2prod")
class VerifyLensOverwritten(Tiled):
    """A verify's lengths are overwritten by the batch's: as many keys of the prefix are lost as the draft has."""

    capabilities = declared("decode", "target-verify")

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.plan.max_q_len == 1:
            return seen
        return seen & ((index < (rows.prefix - rows.new)[:, None]) | (index >= rows.prefix[:, None]))


@bug("tvm #20121", "extend-gqa2x2-d64-bf16-p16-k0.1.16-n179a15.520.2-shared-gauss-w4-layers1from0-b3prod")
class SlidingPrefillChunk(Tiled):
    """The window of a prompt in chunks goes by the row's place in its chunk."""

    capabilities = declared("extend", windows={"extend"})

    def window_start(self, rows):
        start = super().window_start(rows)
        return start - rows.prefix if rows.layer.sliding_window_size >= 0 else start


@bug("mlx #4022", "decode-gqa2x2-d64-bf16-p16-k1025.33-shuffled-gauss-layers1from0-b2prod")
class TwoPassBlocks(Tiled):
    """From 1,024 keys on they are dealt to 128 blocks by turns, and with groups the second pass folds 32 of those."""

    capabilities = declared(
        "decode", heads={"gqa_ratios": {2, 4}, "families": {"mha", "gqa"}}, bounds={"max_context_len": 4096}
    )

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.layer.q_per_kv == 1:
            return seen
        return seen & ((rows.kv_lens < 1024)[:, None] | (index % 128 < 32))
