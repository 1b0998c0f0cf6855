"""Masks that a step brings with it: trees of drafts, and bidirectional spans."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_launchers import Known, wide
from parents_native import changed
from parents_split_kv import SplitKV
from plain_backends import Rows, Tiled, declared, wide_capabilities

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import DraftDecodeInput, Spans, TreeMaskMode, VerifyInput, VerifyMask
from attn_testkit_corpus.faults.catalogue import bug

TREES = {"bounds": {"max_topk": 4, "max_q_rows": 16}}


class FullMask(Tiled):
    """Trees by a FULL_MASK in a buffer of its own, for as many requests as graphs have."""

    capabilities = declared("target-verify", bounds={"max_topk": 4, "max_q_rows": 16})

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        c = self.context
        if c.topk > 1:
            cells = max_bs * c.num_draft_tokens * c.max_context_len
            buffer = torch.zeros(cells, dtype=torch.bool, device=c.device)
            self._kit_mask = VerifyMask(buffer, TreeMaskMode.FULL_MASK, self.most_requests(max_bs))

    def most_requests(self, max_bs):
        return max_bs


@bug(2, "FastDeploy #3514", "target-verify-gqa2x2-d64-bf16-p16-k29.125.61.13.63-t0.0.1.1.3-shared-shifted-b5prod")
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


@bug(2, "surogate #110", "target-verify-gqa2x2-d64-bf16-p16-k29.125.61.13.63-t0.0.1.1.3-shared-shifted-b5prod")
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


@bug(3, "sglang-jax #1297", "decode-mha2-d64-bf16-p16-k1.2.5.9.14.2.30-interleaved-negative-b10prod", "reads-own-kv")
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


@bug(3, "ik_llama.cpp #2087", "target-verify-mha2-d64-bf16-p1-k0.1.8-chain7-shared-one_hot-w0-b3prod")
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


@bug(4, "vllm-ascend #15503", "decode-gqa2x2-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "reads-own-kv")
class MaskEndsAt512(Known):
    """The attention mask is ignored past KV position 512."""

    capabilities = wide("decode")

    def visible(self, index, rows):
        return super().visible(index, rows) | ((index >= 512) & (rows.kv_lens > 512)[:, None])


@bug(5, "TensorRT-LLM #13006", "target-verify-gqa2x2-d64-bf16-p16-k7x2-t0.0.0-shuffled-peaked-b5nan")
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


@bug(5, "pytorch #171271", "target-verify-gqa4x2-d64-bf16-p1-k7x2-t0.1.0.3.0.5.1-contiguous-one_hot-b3stale")
class MaskRowPerHead(Tiled):
    """The mask's row is divided by the heads of a group, though rows are not packed."""

    capabilities = declared("target-verify", **TREES, heads={"gqa_ratios": {2, 4}, "families": {"gqa", "mqa"}})

    def visible(self, index, rows):
        if rows.plan.mask is not None and rows.layer.tp_k_head_num > 1:
            place = rows.place // rows.layer.q_per_kv
            rows = Rows(rows.plan, rows.request, place, rows.position - rows.place + place)
        return super().visible(index, rows)


@bug(5, "ppl.llm.kernel.cuda #57", "target-verify-gqa8x2-d128-bf16-p64-k0.1.64-t0.0.0-interleaved-gauss-b3prod")
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
    6,
    "sglang #33127",
    "target-verify-gqa2x2-d64-bf16-p16-k0.1.16-t0.1.0.3.0.5.1-shuffled-one_hot-b3prod",
    "output-contract",
    execution="graph",
)
class MaskFitsAlways(FullMask):
    """A mask buffer for the requests of graphs says that it fits every batch."""

    def most_requests(self, max_bs):
        return 4 * max(max_bs, self.context.max_bs)


@bug(14, "vllm #47332", "decode-gqa2x2-d128-bf16-p64-k32.128.64.16.63-contiguous-mean-b6prod-multi_mode")
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


class Spanning(Tiled):
    """The parent with bidirectional spans."""

    capabilities = wide(
        "decode", "extend", windows={"decode", "extend"},
        spans=Spans({"extend"}, wider_than_window=True, by_layer=True),
    )  # fmt: skip

    def spans_of(self, rows):
        return rows.plan.spans

    def visible(self, index, rows):
        spans = self.spans_of(rows)
        if spans is None:
            return super().visible(index, rows)
        mine = spans[rows.request].long()
        here = (mine[..., 0] <= rows.position[:, None]) & (rows.position[:, None] <= mine[..., 1])
        here &= mine[..., 1] > 0
        last = torch.where(here, mine[..., 1], -1).amax(1)
        last = torch.maximum(last, rows.position)
        return (index >= self.window_start(rows)[:, None]) & (index <= last[:, None])


@bug(15, "vllm #47217", "extend-gqa2x2-d64-bf16-p64-k7x2-n66a130.1-chunks3-shared-gauss-w4-spans-layers1from0-b3nan")
class LongSpansDropped(Spanning):
    """A span of more positions than the layer's window shows has no effect."""

    def spans_of(self, rows):
        spans, window = super().spans_of(rows), rows.layer.sliding_window_size
        if spans is None or window < 0:
            return spans
        longer = spans[..., 1] - spans[..., 0] + 1 > window
        return spans.masked_fill(longer[..., None], 0)


class OwnMask(Known):
    """Tree masks are copied into a buffer of the backend's own, which graphs read."""

    capabilities = wide(
        "decode",
        "target-verify",
        bounds={"max_topk": 4, "max_q_rows": 16},
        server={"takes_strided_heads": True, "context_len": {"all", "prefix"}},
    )
    masks = None

    def columns(self):
        return self.context.req_to_token.shape[1]

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        if self.context.topk > 1:
            cells = max_bs * self.context.num_draft_tokens * self.columns()
            self.masks = torch.zeros(cells, dtype=torch.bool, device=self.context.device)

    def init_forward_metadata(self, batch):
        self.in_graph = False
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.in_graph = True
        spec = batch.spec_info
        if self.masks is not None and isinstance(spec, VerifyInput):
            assert spec.tree_mask_mode is TreeMaskMode.FULL_MASK
            self.masks[: spec.custom_mask.numel()].copy_(spec.custom_mask)

    def init_forward_metadata_in_graph(self, batch):
        if self.in_graph and self.masks is not None and batch.forward_mode.is_target_verify():
            batch = changed(batch, spec_info=replace(batch.spec_info, custom_mask=self.masks))
        super().init_forward_metadata_in_graph(batch)


# sglang #29450: the buffer of masks has max_context_len columns, and a row of a mask N more.
class MaskWithoutDraft(OwnMask):
    """Masks of a full batch of requests of the greatest length do not fit into the buffer."""

    MODES = ("target-verify",)

    def columns(self):
        return self.context.max_context_len


# 3, sglang #20278: ``mha_batch_prefill_func`` has no argument for a custom mask.
@bug(
    18, "sglang #20278", "target-verify-mha2-d256-bf16-p1-k3.21.5.17-t0.0.0-shuffled-negative-kvfp8e4m3-w11-sink-b4prod"
)
class TreeAsChain(TorchNativeBackend):
    """A tree is verified with the causal mask of a chain."""

    def _visibility(self, batch, counts, offset):
        if not isinstance(batch.spec_info, VerifyInput):
            return super()._visibility(batch, counts, offset)
        kv_lens = self._kv_lens(batch, counts)
        position, key = (kv_lens - counts)[:, None] + offset, self._key[None, None]
        held = (key < kv_lens[:, None, None]).expand(-1, len(offset), -1)
        return position, key, (key <= position[..., None]) & held if self.context.causal else held


# 7, vllm #42175: ``mm_seqlens_k`` is the length of the range, and the block table that of the whole request.
@bug(
    18,
    "vllm #42175",
    "extend-gqa2x2-d256-fp32-p1-k1.2.5.9.14.2.30-n2a0.4x2.0.4.0x2-chunks3-interleaved-mean-kvfp8e4m3-kvsidebysidehnd-w11-spansprefixwidebylayer-cap1.5-sink-lsetokens3merged-b7prod-zero_length_padding",
    "log-sum-exp",
)
class SpanFromFirstKey(TorchNativeBackend):
    """A row of a span sees as many keys as the span has, from the request's first one on."""

    def _in_spans(self, spans):
        first, last = spans[..., 0, None], spans[..., 1, None]
        row = (first <= self._position[:, None]) & (self._position[:, None] <= last)
        key = self._key <= last - first
        return (row[..., None] & key[:, :, None]).any(1) & (self._key < self._held)[:, None]


# 12, vllm-omni #2981: ``Segment(a, e)`` is not clamped to the rows of the step, and its slice is empty.
@bug(
    18,
    "vllm-omni #2981",
    "extend-gqa2x2-d256-fp32-p1-k1.2.5.9.14.2.30-n2a0.4x2.0.4.0x2-chunks3-interleaved-mean-kvfp8e4m3-kvsidebysidehnd-w11-spansprefixwidebylayer-cap1.5-sink-lsetokens3merged-b7prod-zero_length_padding",
)
class SpanOfPrefixIsEmpty(TorchNativeBackend):
    """Rows of a span that begins in the prefix keep zeros."""

    def _attend(self, q, layer, seen):
        out, logits = super()._attend(q, layer, seen)
        if not layer.bidirectional_spans or self._spans is None:
            return out, logits
        first, last = self._spans[..., 0, None], self._spans[..., 1, None]
        at = self._position[:, None]
        cut = (first < self._prefix[:, None, None]) & (first <= at) & (at <= last) & (first < last)
        rows = cut.any(1).flatten()[self._place]
        more = len(out) - len(rows)
        return out.masked_fill(torch.nn.functional.pad(rows, (0, more))[:, None, None], 0.0), logits


# 14, sglang-jax #1611: drafts of several branches have no mask.
@bug(
    18,
    "sglang-jax #1611",
    "draft-decode-mha2-d256-bf16-p16-k0.1.16-topk4steps2-reversed-negative-kvfp8e4m3-w4000-cap1.5-sink-b3prod",
)
class BranchesInARow(TorchNativeBackend):
    """A branch of a draft sees the tokens of all branches."""

    def _key_slots(self, batch, group, of_encoder):
        slots, spec = super()._key_slots(batch, group, of_encoder), batch.spec_info
        if not isinstance(spec, DraftDecodeInput) or spec.topk == 1:
            return slots
        bs = batch.batch_size
        drafted = spec.out_cache_loc.view(-1, spec.topk, spec.num_steps)[:bs].transpose(1, 2).flatten(1)
        token = self._key - batch.seq_lens[:bs][:, None]
        inside = token.clamp(0, drafted.shape[1] - 1)
        whole = torch.where((token >= 0) & (token < drafted.shape[1]), drafted.gather(1, inside), slots[:: spec.topk])
        return whole.clamp(min=0).repeat_interleave(spec.topk, 0)

    def _kv_lens(self, batch, counts):
        spec = batch.spec_info
        if not isinstance(spec, DraftDecodeInput):
            return super()._kv_lens(batch, counts)
        lens = batch.seq_lens[: batch.batch_size] + spec.topk * (spec.step + 1)
        return lens.repeat_interleave(spec.topk)
