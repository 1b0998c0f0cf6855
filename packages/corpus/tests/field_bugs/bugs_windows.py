"""Sliding windows."""

from __future__ import annotations

import torch
from parents_launchers import Known, wide, windowed
from parents_native import Native
from plain_backends import FP8, Tiled, declared, wide_capabilities

from attn_testkit_corpus.faults.catalogue import bug


@bug(1, "mistral.rs #2094", "decode-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-interleaved-gauss-w11-b7prod")
class WindowMissingInDecode(Tiled):
    """The paged decode kernel is called without the window; prefill has it."""

    capabilities = declared("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        if rows.plan.max_q_len == 1:
            return index <= rows.position[:, None]
        return super().visible(index, rows)


@bug(1, "TensorRT-LLM #15739", "target-verify-gqa2x2-d64-bf16-p16-k15.16.17-chain7-contiguous-gauss-w11-b3prod")
class WindowMovedTwiceByTheRow(Tiled):
    """The start of the window is moved by the row's index a second time."""

    capabilities = declared("decode", "target-verify", windows={"decode", "target-verify"})

    def window_start(self, rows):
        moved = rows.place if rows.layer.sliding_window_size >= 0 else 0
        return super().window_start(rows) + moved


@bug(1, "vllm-xpu-kernels #168", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-contiguous-shifted-w11-b5prod")
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
    1,
    "vLLM #41162",
    "draft-decode-gqa2x2-d64-bf16-p16-k7x2-topk2steps3-contiguous-negative-w11-b2prod",
    execution="graph",
)
class WindowOfTheFirstDraftStep(Tiled):
    """Where the window begins is not computed again between forwards of a draft."""

    capabilities = declared("draft-decode", bounds={"max_draft_branches": 2}, windows={"draft-decode"})

    def visible(self, index, rows):
        start = self.window_start(rows) - rows.plan.step.draft.step
        return (index <= rows.position[:, None]) & (index >= start[:, None])


@bug(2, "openvino #38034", "decode-gqa2x2-d64-bf16-p1-k3.21.5.17-interleaved-one_hot-w4-b5nan", execution="graph")
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


@bug(2, "rMLX #32", "target-verify-gqa2x2-d64-bf16-p16-k7x2-chain4-shuffled-negative-w0-b3prod", "completes")
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


@bug(3, "tvm #18630", "extend-gqa4x2-d64-bf16-p1-k7x2-n10a19.1-chunks3-interleaved-rising_logits-w0-b3small")
class WindowForOldKeysAlone(Tiled):
    """The window counts for cached keys and not among the new rows of a prefill."""

    capabilities = wide_capabilities("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        new = (index >= rows.prefix[:, None]) & (index <= rows.position[:, None])
        return super().visible(index, rows) | new


@bug(3, "vLLM #2231", "decode-gqa2x2-d128-bf16-p16-k1.2.5.9.14.2.30-contiguous-negative-w11-b7prod")
class WindowCountedInWholePages(Tiled):
    """The table is cut to the window's last pages, and the window's length is counted from its start."""

    capabilities = wide_capabilities("decode", "extend", kv_pool={"page_sizes": {16}}, windows={"decode", "extend"})

    def visible(self, index, rows):
        w, size = rows.layer.sliding_window_size + 1, rows.plan.page_size
        if rows.plan.max_q_len > 1 or not w:
            return super().visible(index, rows)
        pages, most = (rows.kv_lens + size - 1) // size, -(-w // size)
        start = ((pages - most).clamp(min=0) * size)[:, None]
        return (index >= start) & (index < start + rows.kv_lens.clamp(max=w)[:, None])


@bug(3, "tt-metal #32145", "decode-gqa2x2-d64-bf16-p16-k3.37.9.17-reversed-one_hot-w4-b4prod", execution="graph")
class FaceFilledAtFifteen(Tiled):
    """A face of 16 keys is masked whole where 15 of them are: one key too many at some starts of a window."""

    capabilities = wide_capabilities("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.plan.max_q_len > 1 or rows.layer.sliding_window_size < 0:
            return seen
        start = self.window_start(rows)[:, None]
        return seen & ~((index == start) & (start > 0) & (start % 32 == 15))


@bug(4, "lalamo #200", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod", execution="graph")
class SuffixLocalWindow(Known):
    """The window goes by rows of the suffix, causality by absolute ones."""

    capabilities = windowed("decode", "extend")

    def window_start(self, rows):
        if rows.layer.sliding_window_size < 0:
            return super().window_start(rows)
        return rows.place - rows.layer.sliding_window_size


@bug(4, "transformers #41184", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod", execution="graph")
class NegatedWindowDiagonal(Known):
    """Tril(mask, k - q + window): nothing old is masked, far future is visible."""

    capabilities = windowed("decode", "extend")

    def visible(self, index, rows):
        w = rows.layer.sliding_window_size
        if w < 1:
            return super().visible(index, rows)
        p = rows.position[:, None]
        return ((index <= p) | (index > p + w + 1)) & (index < rows.kv_lens[:, None])


@bug(4, "cactus #338", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod", execution="graph")
class DecodeWithoutWindow(Known):
    """The decode kernel is not given the window."""

    capabilities = windowed("decode", "extend")

    def window_start(self, rows):
        return torch.zeros_like(rows.position) if self.decodes() else super().window_start(rows)


@bug(4, "keras-hub #1738", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod")
class WindowNoWiderThanRows(Known):
    """The window is min(query_len, window)."""

    capabilities = windowed("decode", "extend")

    def window_start(self, rows):
        w = rows.layer.sliding_window_size
        return super().window_start(rows) if w < 0 else rows.position - rows.new.clamp(max=w)


@bug(
    4,
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


@bug(5, "ik_llama.cpp #2186", "decode-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-interleaved-gauss-w11-b7prod")
class SwaTailByLongest(Tiled):
    """Layers with a window leave out old keys of the whole batch, up to where the window of the longest request
    begins.
    """

    capabilities = declared("decode", windows={"decode"})

    def visible(self, index, rows):
        seen, window = super().visible(index, rows), rows.layer.sliding_window_size
        return seen & (index >= rows.plan.kv_lens.max() - 1 - window) if window >= 0 else seen


@bug(5, "onnxruntime #25927", "extend-gqa2x2-d64-bf16-p16-k0.1.16-n179a15.520.2-shared-gauss-w4-layers1from0-b3prod")
class WindowExcludesSelf(Tiled):
    """The window is short by one key."""

    capabilities = declared("decode", "extend", windows={"modes": {"decode", "extend"}, "smallest": 1})

    def window_start(self, rows):
        return super().window_start(rows) + (rows.layer.sliding_window_size >= 0)


@bug(6, "sglang #34273", "extend-gqa2x2-d64-bf16-p16-k0.1.16-n179a15.520.2-shared-gauss-w4-layers1from0-b3prod")
class WindowOneMore(Tiled):
    """The window of an extend has a key of the prefix too many."""

    capabilities = declared("extend", windows={"extend"})

    def visible(self, index, rows):
        seen, window = super().visible(index, rows), rows.layer.sliding_window_size
        if window < 0:
            return seen
        return seen | ((index == (rows.position - window - 1)[:, None]) & (index < rows.prefix[:, None]))


@bug(6, "tvm #20121", "extend-gqa2x2-d64-bf16-p16-k0.1.16-n179a15.520.2-shared-gauss-w4-layers1from0-b3prod")
class SlidingPrefillChunk(Tiled):
    """The window of a prompt in chunks goes by the row's place in its chunk."""

    capabilities = declared("extend", windows={"extend"})

    def window_start(self, rows):
        start = super().window_start(rows)
        return start - rows.prefix if rows.layer.sliding_window_size >= 0 else start


@bug(14, "executorch #21857", "extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n6a35.1.2.1x4-reversed-peaked-w11-b8nan")
class WindowOfFirstRow(Known):
    """Cached keys are masked for all rows of a chunk by the window of its first one."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        right = super().visible(index, rows)
        if rows.layer.sliding_window_size < 0:
            return right
        first = (rows.position - rows.place - rows.layer.sliding_window_size)[:, None]
        prefix = rows.prefix[:, None]
        return torch.where(index < prefix, index >= first, right)


@bug(15, "mlx-lm #1673", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod")
class TrimmedByCapacity(Known):
    """A decode keeps the window's last places of its allocation, which grows by 16 keys (256 in the thread)."""

    STEP = 16
    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def window_start(self, rows):
        right = super().window_start(rows)
        if rows.layer.sliding_window_size < 0 or not self.decodes():
            return right
        unused = -rows.kv_lens % self.STEP
        return torch.minimum(right + unused, rows.position)


@bug(
    15,
    "efficient-transformers #1235",
    "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod",
    execution="graph",
)
class PlacesOfRing(Known):
    """A place in the ring of a window counts if it is not behind the row's own, also after the ring has wrapped."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        right = super().visible(index, rows)
        size = rows.layer.sliding_window_size + 1
        if size <= 0 or not self.decodes():
            return right
        return right & (index % size <= (rows.position % size)[:, None])


@bug(15, "mlxcel #679", "extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n6a35.1.2.1x4-reversed-peaked-w11-b8nan", "finite")
class KeepsLastWindow(Known):
    """A chunk behind a prefix sees the last keys of prefix and chunk, as many as the window has; no key: NaN."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        right = super().visible(index, rows)
        size = rows.layer.sliding_window_size + 1
        if size <= 0 or not self.extends():
            return right
        kept = index >= (rows.kv_lens - size)[:, None]
        return right & (kept | (rows.prefix == 0)[:, None])

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        none = (parts.weight.sum(-1) == 0)[..., None]
        return out.masked_fill(none, torch.nan) if self.extends() else out, lse


# sglang #35208: the plan of a verify has no window, only a first key for each request.
@bug(
    16,
    "sglang #35208",
    "target-verify-gqa2x2-d64-bf16-p16-k15.16.17.16x13.17x12.18x3.618.18x8-"
    "chain7-shuffled-rising_logits-w11-layers1from0-b41nan",
)
class WindowAnchoredAtFirstRow(Native):
    """All rows of a draft block begin at the window of the block's first row."""

    capabilities = wide(
        "decode", "target-verify", windows={"decode", "target-verify"}, server={"takes_bare_chains": True}
    )

    def _in_window(self, layer):
        if not self.mode.is_target_verify() or layer.sliding_window_size < 0:
            return super()._in_window(layer)
        first = self._position[:, :1, None]
        return self._visible & (first - self._key_position <= layer.sliding_window_size)


# flashinfer #3864: one head of one row, at some lengths. The mechanism is a guess.
class OneHeadWithoutWindow(Native):
    """In a verify of 8 rows over FP8 one head of the last row has no window, if one in four lengths is met."""

    MODES = ("target-verify",)
    capabilities = wide("decode", "target-verify", kv_pool={"kv_dtypes": FP8}, windows={"decode", "target-verify"})

    def _attend(self, q, layer, seen):
        out, logits = super()._attend(q, layer, seen)
        rows, size = self._row.shape[1], layer.sliding_window_size
        if not self.mode.is_target_verify() or not self.is_fp8() or size < 0 or rows < 8:
            return out, logits
        whole, _ = super()._attend(q, layer, self._seen_by(self._visible, layer))
        lens = self._last_key[:, 0] + 1
        request = self._place // rows
        last = self._place % rows == rows - 1
        hit = last & ((lens > size + 1) & (lens % 4 == 3))[request]
        head = (lens // 4 % layer.tp_q_head_num)[request]
        heads = torch.arange(layer.tp_q_head_num, device=q.device)
        return torch.where((hit[:, None] & (heads == head[:, None]))[..., None], whole, out), logits


# tokenspeed #578: a decode clamps its keys to WINDOW_LEFT, which does not count the row's own.
@bug(16, "tokenspeed #578", "decode-gqa2x2-d64-bf16-p16-k70.33.1-shuffled-gauss-w40-sink-b3prod")
class OneKeyTooFew(Known):
    """A decode sees W keys of its window, which has W + 1."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"}, options={"sinks": True})

    def window_start(self, rows):
        right = super().window_start(rows)
        return right + 1 if rows.layer.sliding_window_size >= 0 and self.decodes() else right
