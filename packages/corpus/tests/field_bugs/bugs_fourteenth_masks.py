"""What a row sees: masks, windows, sinks; bugs of the fourteenth set."""

from __future__ import annotations

import torch
from fourth_parents import SPEC, Known, wide
from plain_backends import Tiled, WithoutCausalMask
from plain_splits import WithKVSplits
from torch.nn.functional import pad

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug


@bug(
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
    "vllm-ascend #11849",
    "target-verify-gqa2x2-d64-bf16-p16-k300.7-chain2-reversed-negative-lsepages2merged-b3prod",
    "log-sum-exp",
)
class OwnKeyNotCounted(WithKVSplits):
    """The bound of a row among a rank's keys counts those before the row; of none, the mask is left out."""

    capabilities = WithKVSplits.capabilities.with_changes(
        eager={"decode", "target-verify"}, graph={"decode", "target-verify"},
        lse=LogSumExp(
            base="e", whole={"decode", "target-verify"}, pages={"decode", "target-verify"}, prefix=(), merges=True
        ),
    )  # fmt: skip

    def sees(self, key, rows):
        right = super().sees(key, rows)
        if rows.plan.part.kind != "rank" or rows.plan.max_q_len == 1:
            return right
        before = key < rows.position[:, None]
        return torch.where(before.any(-1, keepdim=True), right & before, torch.ones_like(right))


@bug("executorch #21857", "extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n6a35.1.2.1x4-reversed-peaked-w11-b8nan")
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


@bug(
    "SlimServe #23",
    "target-verify-gqa2x2-d64-bf16-p16-k14.15.16.17.18.19.20.21.22.23.24.25.26.27.28.29-chain2-shuffled-gauss-b30prod",
)
class UnmappedBlocksAreZero(Known):
    """A verify scores blocks behind a request's last one, up to the longest request's, as keys and values of 0."""

    capabilities = wide(*SPEC, bounds={"max_q_rows": 16, "max_topk": 4})

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


@bug("vllm #47332", "decode-gqa2x2-d128-bf16-p64-k32.128.64.16.63-contiguous-mean-b6prod-multi_mode")
class MaskInPlaceOfWindow(Tiled):
    """With a mask of its own a step has no window, and causality compares keys with the row's number in its step."""

    capabilities = wide(
        "decode",
        "target-verify",
        bounds={"max_q_rows": 16, "max_topk": 4},
        windows={"modes": {"decode", "target-verify"}, "in_trees": True},
    )

    def visible(self, index, rows):
        mask = rows.plan.mask
        if mask is None:
            return super().visible(index, rows)
        n, base = mask.shape[1], (rows.position - rows.place)[:, None]
        inner = mask[rows.request, rows.place.clamp(max=n - 1)].gather(1, (index[None] - base).clamp(0, n - 1))
        of_mask = inner & (index >= base) & (index < base + n)
        return ((index <= rows.place[:, None]) | of_mask) & (index < rows.kv_lens[:, None])
