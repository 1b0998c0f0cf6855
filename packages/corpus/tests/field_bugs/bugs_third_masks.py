"""Which keys a row sees: windows, causality, lengths; bugs of the third set."""

from __future__ import annotations

import torch
from plain_backends import Tiled, declared
from third_parents import FP8, SPEC, Latent, mla_capabilities, wide_capabilities

from attn_testkit_corpus.faults.catalogue import bug


@bug("sglang-jax #1297", "decode-mha2-d64-bf16-p16-k1.2.5.9.14.2.30-interleaved-negative-b10prod", "reads-own-kv")
class MaskDenseOverAlignedKeys(Tiled):
    """Keys lie page by page, the ranges of the mask as sums of the lengths: padding of pages shifts later requests."""

    capabilities = wide_capabilities("decode", "extend")

    def slots(self, plan):
        right = super().slots(plan)
        if plan.max_q_len > 1:
            return right
        lens = plan.kv_lens.long()
        aligned = (lens + plan.page_size - 1) // plan.page_size * plan.page_size
        end = aligned.cumsum(0)
        index = torch.arange(right.shape[1], device=right.device)
        flat = (lens.cumsum(0) - lens)[:, None] + index
        owner = torch.searchsorted(end, flat, right=True).clamp(max=len(lens) - 1)
        inside = (flat - (end - aligned)[owner]).clamp(0, right.shape[1] - 1)
        return right[owner, inside]


@bug("tvm #18630", "extend-gqa4x2-d64-bf16-p1-k7x2-n10a19.1-chunks3-interleaved-rising_logits-w0-b3small")
class WindowForOldKeysAlone(Tiled):
    """The window counts for cached keys and not among the new rows of a prefill."""

    capabilities = wide_capabilities("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        new = (index >= rows.prefix[:, None]) & (index <= rows.position[:, None])
        return super().visible(index, rows) | new


@bug("vLLM #2231", "decode-gqa2x2-d128-bf16-p16-k1.2.5.9.14.2.30-contiguous-negative-w11-b7prod")
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


@bug("tt-metal #32145", "decode-gqa2x2-d64-bf16-p16-k3.37.9.17-reversed-one_hot-w4-b4prod", execution="graph")
class FaceFilledAtFifteen(Tiled):
    """A face of 16 keys is masked whole where 15 of them are: one key too many at some starts of a window."""

    capabilities = wide_capabilities("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.plan.max_q_len > 1 or rows.layer.sliding_window_size < 0:
            return seen
        start = self.window_start(rows)[:, None]
        return seen & ~((index == start) & (start > 0) & (start % 32 == 15))


@bug("tokenspeed #469", "draft-extend-v2-mla16-d512r64-bf16-p16-k7x2-n4a1x2-contiguous-gauss-b2prod")
class PlainBoundInBf16(Latent):
    """The bf16 kernel masks several rows by the length alone; the FP8 kernel does so row by row."""

    capabilities = mla_capabilities(*SPEC, kv_pool={"kv_dtypes": FP8})

    def visible(self, index, rows):
        if rows.plan.max_q_len > 1 and self.context.kv_pool.dtype.itemsize > 1:
            return index < rows.kv_lens[:, None]
        return super().visible(index, rows)


@bug("TensorRT-LLM #14133", "draft-extend-v2-mha2-d64-bf16-p1-k7.8.9-n6a1.3.5-contiguous-rising_logits-b6prod")
class LengthsRepeatedPerAtom(Tiled):
    """Rows are run two at a time, each pair with the full length: earlier pairs see later keys."""

    capabilities = wide_capabilities(*SPEC)

    def visible(self, index, rows):
        n = rows.plan.max_q_len
        if n <= 2 or n % 2:
            return super().visible(index, rows)
        return index <= (rows.kv_lens - 2 + rows.place % 2)[:, None]


@bug(
    "triton-msl #7",
    "extend-gqa2x2-d64-bf16-p1-k0-n32a32-shuffled-gauss-layers1from0-b1prod",
    execution="graph",
    of_a_tier="extend-gqa4x2-d128-bf16-p1-k0x3-n38a17.64.33-chunks3-reversed-one_hot-b4small",
)
class CausalDroppedOnExactTiles(Tiled):
    """Where rows and keys fill their tiles no bound is checked, and the causal mask is lost with it."""

    capabilities = wide_capabilities("decode", "extend")

    def visible(self, index, rows):
        exact = (rows.new % 32 == 0) & (rows.kv_lens % 32 == 0) & (rows.new > 1)
        return torch.where(exact[:, None], index < rows.kv_lens[:, None], super().visible(index, rows))


@bug("ik_llama.cpp #2087", "target-verify-mha2-d64-bf16-p1-k0.1.8-chain7-shared-one_hot-w0-b3prod")
class MaskRowsOfTheSlice(Tiled):
    """Keys are cut to the window, and rows of the mask are walked by that shorter length."""

    modes = ("decode", "extend", "target-verify")
    capabilities = wide_capabilities(*modes, windows=set(modes))

    def visible(self, index, rows):
        seen, w = super().visible(index, rows), rows.layer.sliding_window_size
        if w < 0:
            return seen
        kv = rows.kv_lens.clamp(min=1)
        part = torch.minimum(kv, rows.new + w)
        flat = (rows.place * part)[:, None] + index
        first = torch.arange(len(seen), device=seen.device) - rows.place
        row = (first[:, None] + flat // kv[:, None]).clamp(0, len(seen) - 1)
        at = (flat % kv[:, None]).clamp(max=seen.shape[1] - 1)
        return torch.where((part < kv)[:, None], seen[row, at] & (index < kv[:, None]), seen)


@bug("onnxruntime #23850", "extend-gqa2x2-d64-bf16-p16-k7x2-n10a19.1-shared-peaked-b3prod")
class ValuesWipedByTheLanesOwnRow(Tiled):
    """A lane drops values that its own row does not see, though other rows of the tile need them."""

    capabilities = wide_capabilities("decode", "extend")

    def parts(self, scores, seen, v, rows):
        index = torch.arange(v.shape[1], device=v.device)
        first = (rows.prefix + rows.place // 16 * 16)[:, None]
        kept = index // 16 * 16 <= first
        return super().parts(scores, seen, v.masked_fill(~kept[:, :, None, None], 0.0), rows)


@bug(
    "xformers #968",
    "decode-mha2-d64-bf16-p16-k300-shuffled-one_hot-layers1from0-b1prod",
    "replay-follows-batch",
    execution="graph",
    of_a_tier="decode-mha2-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod",
)
class KeysOfTheCaptureInBlocks(Tiled):
    """A graph keeps the longest length of its capture, in blocks of 256 keys: replays lose keys beyond."""

    capabilities = wide_capabilities("decode", needs={"cpu_seq_lens": True})
    most = 0

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.batch_size:
            self.most = -(-int(batch.seq_lens_cpu[: batch.batch_size].max()) // 256) * 256

    def visible(self, index, rows):
        return super().visible(index, rows) & (index < max(self.most, 256))


@bug(
    "nntrainer #4317",
    "decode-gqa2x2-d64-bf16-p1-k13-reversed-rising_logits-w4-b1prod",
    "replay-follows-batch",
    execution="graph",
)
class WindowRegimeOfTheCapture(Tiled):
    """Whether the window is in force is decided at capture."""

    capabilities = wide_capabilities("decode", needs={"cpu_seq_lens": True}, windows={"decode"})
    longest = 0

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.batch_size:
            self.longest = int(batch.seq_lens_cpu[: batch.batch_size].max())

    def window_start(self, rows):
        if self.longest <= rows.layer.sliding_window_size + 1:
            return torch.zeros_like(rows.position)
        return super().window_start(rows)


@bug("vLLM #51065", "draft-extend-v2-mla16-d512r64-bf16-p64-k63.64.65-n6a6x3-contiguous-one_hot-b6prod")
class TableIndexedByRow(Latent):
    """Lengths are by row and page tables by request; both are indexed by row."""

    capabilities = mla_capabilities(*SPEC)

    def table_row(self, rows):
        if rows.plan.max_q_len == 1:
            return rows.request
        return torch.arange(len(rows.request), device=rows.request.device).clamp(max=len(rows.plan.kv_lens) - 1)


@bug(
    "xformers #719",
    "decode-gqa2x2-d64-bf16-p16-k33000-shuffled-one_hot-layers1from0-b1prod",
    of_a_tier="decode-gqa2x2-d64-bf16-p1-k66000-shuffled-one_hot-b1prod",
)
class Int16Positions(Tiled):
    """A key's position has 16 bits: from 32768 on it is negative, and not seen."""

    capabilities = declared("decode", "extend")

    def visible(self, index, rows):
        return super().visible(index, rows) & ((index + 32768) % 65536 - 32768 >= 0)
