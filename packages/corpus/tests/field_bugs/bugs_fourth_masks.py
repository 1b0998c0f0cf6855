"""Which keys a row sees: windows, causality, lengths; bugs of the fourth set."""

from __future__ import annotations

import torch
from fourth_parents import Known, wide, windowed

from attn_testkit_corpus.faults.catalogue import bug


@bug("sparkinfer #4", "extend-gqa2x2-d64-bf16-p64-k7x2-n34a1.67-interleaved-rising_logits-b3prod")
class TopLeftCausal(Known):
    """Prefill has kv_end = min(kv_len, row + 1), rows counted in the chunk."""

    capabilities = wide("decode", "extend")

    def visible(self, index, rows):
        if not self.extends():
            return super().visible(index, rows)
        return index < torch.minimum(rows.kv_lens, rows.place + 1)[:, None]


@bug("lalamo #200", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod", execution="graph")
class SuffixLocalWindow(Known):
    """The window goes by rows of the suffix, causality by absolute ones."""

    capabilities = windowed("decode", "extend")

    def window_start(self, rows):
        if rows.layer.sliding_window_size < 0:
            return super().window_start(rows)
        return rows.place - rows.layer.sliding_window_size


@bug("transformers #41184", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod", execution="graph")
class NegatedWindowDiagonal(Known):
    """Tril(mask, k - q + window): nothing old is masked, far future is visible."""

    capabilities = windowed("decode", "extend")

    def visible(self, index, rows):
        w = rows.layer.sliding_window_size
        if w < 1:
            return super().visible(index, rows)
        p = rows.position[:, None]
        return ((index <= p) | (index > p + w + 1)) & (index < rows.kv_lens[:, None])


@bug(
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


@bug("vllm-ascend #15503", "decode-gqa2x2-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "reads-own-kv")
class MaskEndsAt512(Known):
    """The attention mask is ignored past KV position 512."""

    capabilities = wide("decode")

    def visible(self, index, rows):
        return super().visible(index, rows) | ((index >= 512) & (rows.kv_lens > 512)[:, None])


@bug(
    "onnx #7867",
    "extend-gqa2x2-d64-bf16-p16-k3-n4a4-contiguous-gauss-cap1.5-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n6a35.1.2.1x4-contiguous-negative-w4000-cap1.5-b8stale",
)
class SoftcapAfterMask(Known):
    """The soft cap comes after the mask, and masked keys get the logit -cap."""

    capabilities = windowed("decode", "extend", options={"logit_cap": True})

    def parts(self, scores, seen, v, rows):
        cap = rows.layer.logit_cap
        if cap:
            index = torch.arange(seen.shape[1], device=seen.device)
            scores = torch.where(seen[:, None], scores, -cap)
            seen = index < rows.kv_lens[:, None]
        return super().parts(scores, seen, v, rows)


@bug("cactus #338", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod", execution="graph")
class DecodeWithoutWindow(Known):
    """The decode kernel is not given the window."""

    capabilities = windowed("decode", "extend")

    def window_start(self, rows):
        return torch.zeros_like(rows.position) if self.decodes() else super().window_start(rows)


@bug("keras-hub #1738", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod")
class WindowNoWiderThanRows(Known):
    """The window is min(query_len, window)."""

    capabilities = windowed("decode", "extend")

    def window_start(self, rows):
        w = rows.layer.sliding_window_size
        return super().window_start(rows) if w < 0 else rows.position - rows.new.clamp(max=w)


@bug(
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


@bug(
    "openvino #30714",
    "extend-gqa2x2-d64-bf16-p16-k9-n2a2-shuffled-gauss-w4same-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n6a35.1.2.1x4-reversed-peaked-w11-b8nan",
)
class WindowOneRowOff(Known):
    """With several tokens the window is off by one row."""

    capabilities = windowed("decode", "extend")

    def window_start(self, rows):
        start = super().window_start(rows)
        return start if rows.layer.sliding_window_size < 0 else start - (rows.new > 1).long()


@bug("onnxruntime #27992", "decode-gqa2x2-d64-bf16-p16-k0.1025.1040-shuffled-mean-w46-layers3from0varied-b3prod")
class UniformPast(Known):
    """The past of the batch's longest request, for all of them."""

    capabilities = windowed("decode", "extend")

    def visible(self, index, rows):
        w = rows.layer.sliding_window_size
        if w < 0:
            return super().visible(index, rows)
        p = (rows.plan.kv_lens.max().long() - rows.new + rows.place)[:, None]
        return (index <= p) & (index >= p - w) & (index < rows.kv_lens[:, None])


@bug("pytorch #169222", "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod", "reads-own-kv")
class UnboundedPartialBlock(Known):
    """The last block of 32 keys has no bounds check (vector kernels: few rows)."""

    capabilities = wide("decode")

    def visible(self, index, rows):
        return index < ((rows.kv_lens + 31) // 32 * 32)[:, None]
