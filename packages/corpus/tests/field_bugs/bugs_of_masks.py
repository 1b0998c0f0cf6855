"""Bugs about the keys that a row sees: windows, causal and other masks, lengths, new rows."""

from __future__ import annotations

import torch
from plain_backends import Tiled, TwoParts, WithoutCausalMask, declared
from torch.nn.functional import pad

from attn_testkit_corpus.faults.catalogue import bug

TWICE = 0.6931471805599453
"""ln 2: a key with this bias counts twice."""
EXTEND = "extend-gqa2x2-d64-bf16-p16-k7x2-n9a16.1-reversed-gauss-b2prod"


@bug("mistral.rs #2094", "decode-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-interleaved-gauss-w11-b7prod")
class WindowMissingInDecode(Tiled):
    """The paged decode kernel is called without the window; prefill has it."""

    capabilities = declared("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        if rows.plan.max_q_len == 1:
            return index <= rows.position[:, None]
        return super().visible(index, rows)


@bug("flash-attention #1455", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "reads-own-kv")
class SplitMaskedByLongestOfBatch(Tiled):
    """The split kernel masks by the longest length of the batch, not by the request's."""

    def visible(self, index, rows):
        if rows.plan.max_q_len == 1:
            return (index < rows.plan.kv_lens.max()).expand(len(rows.position), -1)
        return super().visible(index, rows)


@bug(
    "vllm-ascend #2979",
    "extend-gqa2x2-d64-bf16-p1-k32.128.64.16.63-n3a1x4.11-reversed-shifted-b6stale",
    "completes",
)
class CachedMaskOneRowShort(Tiled):
    """A cached mask is made anew one row too late: a position that equals its size indexes it."""

    capabilities = declared("extend", graph=())

    def __init__(self, context):
        super().__init__(context)
        self.causal = torch.ones(1, 1, dtype=torch.bool, device=context.device)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if not batch.batch_size:
            return
        lengths = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        longest = max(prefix + new for prefix, new in lengths)
        if longest > len(self.causal) + 1:
            self.causal = torch.ones(longest, longest, dtype=torch.bool, device=self.context.device).tril()

    def visible(self, index, rows):
        seen = self.causal[rows.position]
        return pad(seen, (0, max(0, len(index) - seen.shape[1])))[:, : len(index)]


@bug("sglang #27738", "draft-extend-gqa2x2-d64-bf16-p1-k7x2-n4a4x2-shuffled-peaked-b5prod")
class AcceptedCountedTwice(Tiled):
    """The KV indices hold the accepted tokens, and the kernel attends them from k and v as well."""

    capabilities = declared("draft-extend", graph=())

    def bias(self, index, rows):
        return (index >= (rows.position - rows.place)[:, None]).float() * TWICE


@bug("pytorch #160861", "extend-gqa2x2-d64-bf16-p16-k32.128.64.16.63-n1a1x5-shuffled-one_hot-b5prod", "reads-own-kv")
class LastPageSeenWhole(Tiled):
    """The paged block mask has no upper bound at the length: the last page is attended whole."""

    def visible(self, index, rows):
        if rows.plan.max_q_len > 1:
            return super().visible(index, rows)
        size = rows.plan.page_size
        return index < ((rows.kv_lens + size - 1) // size * size)[:, None]


@bug("TensorRT-LLM #15739", "target-verify-gqa2x2-d64-bf16-p16-k15.16.17-chain7-contiguous-gauss-w11-b3prod")
class WindowMovedTwiceByTheRow(Tiled):
    """The start of the window is moved by the row's index a second time."""

    capabilities = declared("decode", "target-verify", windows={"decode", "target-verify"})

    def window_start(self, rows):
        moved = rows.place if rows.layer.sliding_window_size >= 0 else 0
        return super().window_start(rows) + moved


@bug("vllm-gaudi #393", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod")
class PrefixOneTooLong(TwoParts):
    """A prefix that ends inside a page is attended with a token more, which counts twice."""

    capabilities = declared("extend")

    def bias(self, index, rows):
        prefix = rows.prefix[:, None]
        return ((index == prefix) & (prefix % rows.plan.page_size > 0)).float() * TWICE


@bug(
    "xformers #1185",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "steps-independent",
)
class CausalLostInCopyOfMask(Tiled):
    """The copy of a mask that is kept for the next step of its shape is no longer causal."""

    capabilities = declared("extend", graph=())

    def __init__(self, context):
        super().__init__(context)
        self.kept = set()

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.batch_size:
            key = tuple(batch.extend_seq_lens_cpu), tuple(batch.extend_prefix_lens_cpu)
            self.causal = key not in self.kept
            self.kept.add(key)

    def visible(self, index, rows):
        return super().visible(index, rows) if self.causal else index < rows.kv_lens[:, None]


@bug("sglang #40214", "target-verify-gqa2x2-d64-bf16-p1-k7.8.9-chain7-reversed-rising_logits-b3prod")
class VerifyLengthIsPrefix(Tiled):
    """Verify takes the length of the prefix for the whole: rows of the draft are not attended."""

    capabilities = declared("decode", "target-verify")

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.plan.max_q_len == 1:
            return seen
        return seen & (index < (rows.position - rows.place)[:, None])


@bug("vllm-xpu-kernels #168", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-contiguous-shifted-w11-b5prod")
class WindowBlocksCountedFromItsLength(Tiled):
    """Blocks are counted from the window's length, not where it begins: the last one is dropped if it straddles."""

    capabilities = declared("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        window = rows.layer.sliding_window_size
        if window < 0 or rows.plan.max_q_len > 1:
            return seen
        first = (rows.position - window).clamp(min=0) // 16
        blocks = ((rows.position + 1).clamp(max=window + 1) + 15) // 16
        return seen & (index < ((first + blocks) * 16)[:, None])


@bug(
    "vLLM #41162", "draft-decode-gqa2x2-d64-bf16-p16-k7x2-topk2steps3-contiguous-negative-w11-b2prod", execution="graph"
)
class WindowOfTheFirstDraftStep(Tiled):
    """Where the window begins is not computed again between forwards of a draft."""

    capabilities = declared("draft-decode", bounds={"max_draft_branches": 2}, windows={"draft-decode"})

    def visible(self, index, rows):
        start = self.window_start(rows) - rows.plan.step.draft.step
        return (index <= rows.position[:, None]) & (index >= start[:, None])


@bug("MNN #4898", "extend-gqa2x2-d64-bf16-p16-k9.530.70.0-n8a20.1.3.7-interleaved-gauss-b4prod-noncausal")
class KeysCutToAsManyAsRows(WithoutCausalMask):
    """Without a causal mask keys are cut to as many as the block has rows."""

    capabilities = declared("extend", options={"non_causal": {"extend"}})

    def visible(self, index, rows):
        if rows.layer.causal:
            return super().visible(index, rows)
        return index < rows.new[:, None]


@bug("jax #24491", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod")
class CausalMaskAlignedTopLeft(Tiled):
    """The causal mask begins at key 0 where there are more keys than rows."""

    capabilities = declared("extend")

    def visible(self, index, rows):
        return index <= rows.place[:, None]


@bug(
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
