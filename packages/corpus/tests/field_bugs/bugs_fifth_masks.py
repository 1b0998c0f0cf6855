"""Which keys a row sees: trees, windows, causality, lengths; bugs of the fifth set."""

from __future__ import annotations

from dataclasses import replace

import torch
from fifth_parents_split import SplitKV
from fifth_parents_varlen import Varlen
from fifth_parents_work import WorkList
from plain_backends import Rows, Tiled, declared

from attn_testkit_corpus.faults.catalogue import bug

TREES = {"bounds": {"max_topk": 4, "max_q_rows": 16}}


@bug("TensorRT-LLM #13006", "target-verify-gqa2x2-d64-bf16-p16-k7x2-t0.0.0-shuffled-peaked-b5nan")
class PackedMaskStride(Tiled):
    """A request's mask begins where the padded size of trees puts it."""

    capabilities = declared("target-verify", **TREES)

    def run(self, q, kv, plan):
        if plan.mask is not None:
            bs, n, _ = plan.mask.shape
            padded = -(-n // 8) * 8
            row = torch.arange(bs, device=q.device)[:, None] * padded + torch.arange(n, device=q.device)
            mask = plan.mask.reshape(bs * n, n)[row.clamp(max=bs * n - 1)]
            plan = replace(plan, step=replace(plan.step, mask=mask))
        return super().run(q, kv, plan)


@bug("pytorch #171271", "target-verify-gqa4x2-d64-bf16-p1-k7x2-t0.1.0.3.0.5.1-contiguous-one_hot-b3stale")
class MaskRowPerHead(Tiled):
    """The mask's row is divided by the heads of a group, though rows are not packed."""

    capabilities = declared("target-verify", **TREES, heads={"gqa_ratios": {2, 4}, "families": {"gqa", "mqa"}})

    def visible(self, index, rows):
        if rows.plan.mask is not None and rows.layer.tp_k_head_num > 1:
            place = rows.place // rows.layer.q_per_kv
            rows = Rows(rows.plan, rows.request, place, rows.position - rows.place + place)
        return super().visible(index, rows)


@bug("ik_llama.cpp #2186", "decode-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-interleaved-gauss-w11-b7prod")
class SwaTailByLongest(Tiled):
    """Layers with a window leave out old keys of the whole batch, up to where the window of the longest request
    begins.
    """

    capabilities = declared("decode", windows={"decode"})

    def visible(self, index, rows):
        seen, window = super().visible(index, rows), rows.layer.sliding_window_size
        return seen & (index >= rows.plan.kv_lens.max() - 1 - window) if window >= 0 else seen


@bug("vllm #49010", "target-verify-gqa2x2-d64-bf16-p1-k7.8.9-chain7-reversed-rising_logits-b3prod")
class NoMaskInVerify(Tiled):
    """Verify is a decode kernel with several rows, and without a mask."""

    capabilities = declared("decode", "target-verify")

    def visible(self, index, rows):
        return index < rows.kv_lens[:, None]


@bug("onnxruntime #25927", "extend-gqa2x2-d64-bf16-p16-k0.1.16-n179a15.520.2-shared-gauss-w4-layers1from0-b3prod")
class WindowExcludesSelf(Tiled):
    """The window is short by one key."""

    capabilities = declared("decode", "extend", windows={"modes": {"decode", "extend"}, "smallest": 1})

    def window_start(self, rows):
        return super().window_start(rows) + (rows.layer.sliding_window_size >= 0)


@bug(
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


@bug("ppl.llm.kernel.cuda #57", "target-verify-gqa8x2-d128-bf16-p64-k0.1.64-t0.0.0-interleaved-gauss-b3prod")
class SplitMaskOffset(SplitKV):
    """A split reads the mask from its beginning, whichever its first key is."""

    def visible(self, index, rows):
        mask = rows.plan.mask
        if mask is None:
            return super().visible(index, rows)
        n = mask.shape[1]
        first = self.split_of(index, rows) * self.length(rows)[:, None]
        node = index - first - rows.prefix[:, None]
        inner = mask[rows.request, rows.place.clamp(max=n - 1)].gather(1, node.clamp(0, n - 1))
        return ((node < 0) | (inner & (node < n))) & (index < rows.kv_lens[:, None])


@bug(
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
