"""Which keys a row sees: trees, chains, windows, ranks, chunks; bugs of the second set."""

from __future__ import annotations

import torch
from plain_backends import Tiled, WithoutCausalMask, declared
from plain_splits import WithKVSplits

from attn_testkit_corpus.faults.catalogue import bug


@bug("FastDeploy #3514", "target-verify-gqa2x2-d64-bf16-p16-k29.125.61.13.63-t0.0.1.1.3-shared-shifted-b5prod")
class TreeMaskAboveTheTileAlone(Tiled):
    """Tiles of 16 keys below a tile's first row are seen without a look at the mask: right for a causal one.

    Tiles of rows have 4 here, more there.
    """

    capabilities = declared("decode", "target-verify", bounds={"max_topk": 4})

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.plan.mask is None:
            return seen
        first = rows.position - rows.place % 4
        return seen | (index < (first // 16 * 16)[:, None])


@bug("surogate #110", "target-verify-gqa2x2-d64-bf16-p16-k29.125.61.13.63-t0.0.1.1.3-shared-shifted-b5prod")
class TreeMaskOffsetTwice(Tiled):
    """A request's offset into the mask is added twice."""

    capabilities = declared("decode", "target-verify", bounds={"max_topk": 4})

    def visible(self, index, rows):
        mask = rows.plan.mask
        if mask is None:
            return super().visible(index, rows)
        n = mask.shape[1]
        base = (rows.position - rows.place)[:, None]
        other = (2 * rows.request).clamp(max=len(mask) - 1)
        inner = mask[other, rows.place.clamp(max=n - 1)].gather(1, (index[None] - base).clamp(0, n - 1))
        return torch.where(index >= base, inner & (index < base + n), index < base)


@bug("xformers #103", "target-verify-gqa2x2-d64-bf16-p16-k9.70.1-chain4-shared-gauss-b4prod-no_tree_tensors")
class BareChainSeesAll(Tiled):
    """Where no mask is passed there is no causal one either."""

    capabilities = declared("decode", "target-verify", server={"takes_bare_chains": True})
    bare = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.bare = batch.forward_mode.is_target_verify() and batch.spec_info.custom_mask is None

    def visible(self, index, rows):
        return index < rows.kv_lens[:, None] if self.bare else super().visible(index, rows)


@bug("openvino #38034", "decode-gqa2x2-d64-bf16-p1-k3.21.5.17-interleaved-one_hot-w4-b5nan", execution="graph")
class PartitionsOfTheLongest(Tiled):
    """How many blocks of 16 a window has is counted for the longest request, and taken for all."""

    capabilities = declared("decode", windows={"decode"})

    def visible(self, index, rows):
        seen, window = super().visible(index, rows), rows.layer.sliding_window_size
        if window < 0:
            return seen
        longest = rows.plan.kv_lens.max().long() - 1
        blocks = longest // 16 - (longest - window).clamp(min=0) // 16 + 1
        first = (rows.position - window).clamp(min=0) // 16
        return seen & (index < ((first + blocks) * 16)[:, None])


@bug("flashinfer #3716", "extend-gqa2x2-d64-bf16-p16-k9.530.70.0-n8a20.1.3.7-interleaved-gauss-b4prod-noncausal")
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


@bug("sglang #22020", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod")
class ThisChunkAlone(Tiled):
    """An extend attends its own rows alone, and no prefix."""

    capabilities = declared("decode", "extend")

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        return seen if rows.plan.max_q_len == 1 else seen & (index >= rows.prefix[:, None])


@bug("vLLM #48003", "decode-gqa2x2-d64-bf16-p16-k1500.70-shared-gauss-lsepages2merged-b3prod", "log-sum-exp")
class GlobalLengthsOnARank(WithKVSplits):
    """The plan of a rank counts the keys of all ranks: it reads pages that are not its own."""

    def held(self, plan, place):
        if plan.part.kind != "rank":
            return super().held(plan, place)
        return place < plan.kv_lens[:, None]

    def sees(self, key, rows):
        if rows.plan.part.kind != "rank":
            return super().sees(key, rows)
        return torch.ones_like(key, dtype=torch.bool)


@bug(
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


@bug("aiter #2720", "target-verify-mla16-d512r64-bf16-p1-k0.1.8-chain7-shuffled-rising_logits-b4stale")
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


@bug("rMLX #32", "target-verify-gqa2x2-d64-bf16-p16-k7x2-chain4-shuffled-negative-w0-b3prod", "completes")
class MaskOneKeyLonger(Tiled):
    """The mask of a window has a key more than there are, once the window is shorter than the context."""

    capabilities = declared(
        "decode", "target-verify", graph=(), windows={"decode", "target-verify"}, needs={"cpu_seq_lens": True}
    )

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.longest = int(batch.seq_lens_cpu.max()) if batch.batch_size else 0

    def visible(self, index, rows):
        seen, window = super().visible(index, rows), rows.layer.sliding_window_size
        if rows.plan.max_q_len == 1 or not 0 <= window < self.longest:
            return seen
        return seen & torch.ones(1, len(index) + 1, dtype=torch.bool, device=index.device)
