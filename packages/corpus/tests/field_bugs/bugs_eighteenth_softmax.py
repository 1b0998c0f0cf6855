"""Masks, windows, spans and addresses of softmax attention; bugs of the eighteenth set.

The number before each class is that of ``eighteenth_set.md``.
"""

from __future__ import annotations

import math

import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import DraftDecodeInput, ForwardMode, VerifyInput
from attn_testkit_corpus.faults.catalogue import bug, helper

TILE = 16
SPLIT = 64


# 1, vllm-ascend #15887: ``sparse_mode = 4 if self.sliding_window else 3 if attn_metadata.causal else 0``.
@bug(
    "vllm-ascend #15887",
    "target-verify-mla16-d256r64-fp16-p16-k0.1.16-chain2-reversed-gauss-kvfp8e4m3-kvhnd-w4000-cap1.5-sink-lseprefix-b3prod-zero_length_padding-noncausal-leftofblock",
    "log-sum-exp",
)
class BandWithoutCausality(TorchNativeBackend):
    """A layer with a window that is not causal is masked by a causal band."""

    def _in_window(self, layer):
        seen = super()._in_window(layer)
        if layer.causal or layer.is_cross_attention or layer.sliding_window_size < 0:
            return seen
        return seen & (self._key_position <= self._position[..., None])


# 2, vllm #40176: without the causal mask the last tile of new keys ends among the rows of the next request.
@bug(
    "vllm #40176",
    "extend-mla2-d256r32-fp32-p16-k0.1.16-n11a17.15.1-chunks3-contiguous-peaked-kvfp8e4m3-kvinblock-w11-cap1.5-sink-lseprefix-b4prod-noncausal-leftofrow",
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


# 3, sglang #20278: ``mha_batch_prefill_func`` has no argument for a custom mask.
@bug("sglang #20278", "target-verify-mha2-d256-bf16-p1-k7.8.9-t0.0.0-shuffled-negative-kvfp8e4m3-w11-sink-b3prod")
class TreeAsChain(TorchNativeBackend):
    """A tree is verified with the causal mask of a chain."""

    def _visibility(self, batch, counts, offset):
        if not isinstance(batch.spec_info, VerifyInput):
            return super()._visibility(batch, counts, offset)
        kv_lens = self._kv_lens(batch, counts)
        position, key = (kv_lens - counts)[:, None] + offset, self._key[None, None]
        held = (key < kv_lens[:, None, None]).expand(-1, len(offset), -1)
        return position, key, (key <= position[..., None]) & held if self.context.causal else held


# 4, attorch #14: the head is a quotient of strides, which is below 1 if heads come before tokens.
@bug(
    "attorch #14",
    "extend-gqa3x2-d256-bf16-p1-k7.8.9-n6a7.8.2-shuffled-one_hot-kvhnd-cross7-cap1.5-layers2from0groups-b3prod",
)
class FirstHeadForAll(TorchNativeBackend):
    """In pages with heads first every KV head is read as the first one."""

    @helper
    def first(self, rows):
        return rows[:, :1].expand_as(rows) if self.context.kv_pool.layout.endswith("hnd") else rows

    def _keys(self, layer):
        return self.first(super()._keys(layer))

    def _values(self, layer, seen):
        return self.first(super()._values(layer, seen))


# 5, sglang #16267: the page table is translated by the table of slots.
@bug(
    "sglang #16267",
    "extend-gqa2x2-d32-bf16-p16-k32.128.64.16.63-n5a1x4.19-interleaved-rising_logits-w46-alibi-layers2from0groups-b6prod-empty_batches-given_out-freed_minus_one",
    "reads-own-kv",
)
class PagesAsSlots(TorchNativeBackend):
    """Page p of a windowed group is looked up at column p."""

    def _key_slots(self, batch, group, of_encoder):
        slots = super()._key_slots(batch, group, of_encoder)
        ids, size = self.context.groups[group].layer_ids, self.context.page_size
        windowed = any(each.sliding_window_size >= 0 for each in self.context.layers if each.layer_id in ids)
        if not self.context.kv_groups or not windowed or of_encoder:
            return slots
        return slots[:, self._key // size] // size * size + self._key % size


# 6, sglang #25889: ``cached_loc`` outlives the mapping that it was made of.
@bug(
    "sglang #25889",
    "extend-gqa2x2-d32-bf16-p16-k32.128.64.16.63-n5a1x4.19-interleaved-rising_logits-w46-alibi-layers2from0groups-b6prod-empty_batches-given_out-freed_minus_one",
    "writes-own-kv",
)
class SlotsRemembered(TorchNativeBackend):
    """The slots of new tokens in a windowed group are those of the step before, if it had as many."""

    kept = None

    def _store(self, k, v, layer, batch, save_kv_cache):
        group = self.context.group_of(layer)
        if not self.context.kv_groups or layer.is_cross_attention or layer.sliding_window_size < 0:
            super()._store(k, v, layer, batch, save_kv_cache)
        elif save_kv_cache:
            loc = group.cache_loc(batch)
            if self.kept is None or len(self.kept) != len(loc):
                self.kept = loc.clone()
            group.kv_pool.set_kv_buffer(layer, self.kept.clamp(min=0), k, v)


# 7, vllm #42175: ``mm_seqlens_k`` is the length of the range, and the block table that of the whole request.
@bug(
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


# 8, sparkinfer #3: ``kv_end = causal ? min(seqlen_kv, qpos + 1) : seqlen_kv``.
@bug("sparkinfer #3", "extend-gqa8x2-d32-bf16-p4-k9.6.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod")
class BoundOfChunk(TorchNativeBackend):
    """The causal bound of a prefill does not count the prefix."""

    def _visibility(self, batch, counts, offset):
        position, key, visible = super()._visibility(batch, counts, offset)
        if batch.forward_mode is ForwardMode.EXTEND and self.context.causal:
            visible = visible & (key <= offset[:, None])
        return position, key, visible


# 9, tokenspeed #571: the softmax of the prefill runs in base 2, and so does its log-sum-exp.
@bug(
    "tokenspeed #571",
    "extend-mla2-d256r32-fp32-p16-k0.1.16-n11a17.15.1-chunks3-contiguous-peaked-kvfp8e4m3-kvinblock-w11-cap1.5-sink-lseprefix-b4prod-noncausal-leftofrow",
    "log-sum-exp",
)
class PrefillInBase2(TorchNativeBackend):
    """The log-sum-exp of a prefill is in base 2, and e is declared."""

    def forward_return_lse(self, q, k, v, layer, batch, save_kv_cache=True, *, part):
        out, lse = super().forward_return_lse(q, k, v, layer, batch, save_kv_cache, part=part)
        return out, lse / math.log(2) if batch.forward_mode is ForwardMode.EXTEND else lse


# 10, onnxruntime #32239: the number of splits is that of the lengths at the capture.
@bug(
    "onnxruntime #32239",
    "decode-gqa3x2-d32-fp16-p128-k600.70.12-reversed-gauss-kvfp8e4m3-kvsidebysidehnd-w4000-spanswidebylayer-sink-lsepages2merged-b3prod-zero_length_padding",
    "log-sum-exp",
    execution="graph",
)
class SplitsOfCapture(TorchNativeBackend):
    """A decode graph launches as many KV splits as the keys at its capture needed."""

    capabilities = TorchNativeBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})
    splits = None

    def init_forward_metadata(self, batch):
        self.splits = None
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        decodes = batch.forward_mode is ForwardMode.DECODE and batch.batch_size
        if in_capture:
            longest = int(batch.seq_lens_cpu[: batch.batch_size].max()) if decodes else 0
            self.splits = max(1, -(-longest // SPLIT)) if decodes else None

    def _visibility(self, batch, counts, offset):
        position, key, visible = super()._visibility(batch, counts, offset)
        return position, key, visible if self.splits is None else visible & (key < self.splits * SPLIT)


# 11, hip-ep #882: a layer that shares KV is right with one KV head only.
@bug(
    "hip-ep #882",
    "extend-gqa2x2-d256-fp16-p32-k32.128.64.16.63-n28a3.131.1x3-contiguous-negative-kvhnd-local64-alibi-qqbias-layers3from0varied-kvsharing-b8nan-empty_batches-zero_length_padding",
    "reads-own-kv",
)
class SharedInOtherOrder(TorchNativeBackend):
    """A layer that reads the KV of another takes the tokens of a page for heads."""

    def _buffers(self, layer):
        if layer.kv_sharing_target_layer_id < 0:
            return super()._buffers(layer)
        pages = self.context.group_of(layer).kv_pool.get_kv_pages(layer.layer_id)
        found = [side.contiguous().view(len(side), side.shape[2], side.shape[1], -1).transpose(1, 2) for side in pages]
        return tuple(side.flatten(0, 1) for side in found) if self._has_slot_views else tuple(found)


# 12, vllm-omni #2981: ``Segment(a, e)`` is not clamped to the rows of the step, and its slice is empty.
@bug(
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


# 13, ssd #23: the cache is given in place of new keys, and its block table is not.
@bug("ssd #23", "extend-gqa8x2-d32-bf16-p4-k9.6.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod", "reads-own-kv")
class PoolAsPacked(TorchNativeBackend):
    """A prefill with any prefix reads the pool as if the keys of all requests were packed from its first slot on."""

    def _key_slots(self, batch, group, of_encoder):
        slots = super()._key_slots(batch, group, of_encoder)
        extends = batch.forward_mode is ForwardMode.EXTEND
        if of_encoder or not extends or not any(batch.extend_prefix_lens_cpu):
            return slots
        lens = batch.seq_lens[: batch.batch_size].long()
        packed = (lens.cumsum(0) - lens)[:, None] + self._key
        return packed.clamp(max=self.context.groups[group].kv_pool.num_slots - 1)


# 14, sglang-jax #1611: drafts of several branches have no mask.
@bug(
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
