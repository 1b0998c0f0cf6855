"""Kernels that cover the wrong keys: tiles, rings, pages and windows.

Threads and triggers are in ``nineteenth_set.md``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_mode import KnowsMode

from attn_testkit.backends.torch_native import TorchNativeBackend, _Seen
from attn_testkit.contract import AttentionLayer, DraftDecodeInput, ForwardBatch, ForwardMode
from attn_testkit_corpus.faults.catalogue import bug, helper


class Moded(KnowsMode, TorchNativeBackend):
    """The healthy parent, which also knows the mode of its step."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.tokens, self.requests = batch.input_ids.shape[0], max(1, batch.batch_size)
        self.branches = isinstance(batch.spec_info, DraftDecodeInput)
        super().init_forward_metadata_in_graph(batch)

    @property
    def extends(self) -> bool:
        return self.mode is ForwardMode.EXTEND


@bug(
    19,
    "flashinfer #4992",
    "extend-mha2-d32-fp32-p1-k3.21.5.17-n34a1x3.130-chunks3-shared-gauss-kvsidebyside-w11-layers1from0-lsetokens3merged-b5nan-noncausal-leftofrow",
    "log-sum-exp",
)
class SplitsOfWindowAndTile(Moded):
    """flashinfer #4992: the scheduler estimates the keys of a tile of rows as window and tile, also without a causal
    mask."""

    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        seen, window = super()._in_window(layer), layer.sliding_window_size
        if not self.extends or layer.causal or window < 0 or layer.non_causal_window != "left":
            return seen
        packed = self.tokens // self.requests * layer.q_per_kv
        tile = 128 if packed > 64 and layer.head_dim < 256 else 64 if packed > 16 else 16
        rows = max(1, tile // layer.q_per_kv)
        offset = torch.arange(seen.shape[1], device=seen.device) // rows * rows
        start = (self._position[:, :1] + offset - window).clamp(min=0)
        covered = -(-(window + tile) // 128) * 128
        return seen & (self._key < (start + covered)[..., None])


@bug(
    19,
    "flash-linear-attention #1104",
    "extend-gqa8x2-d32-bf16-p4-k9.6.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod",
)
class StraddlingTileIsEarlier(Moded):
    """flash-linear-attention #1104: a tile of keys is earlier, or of the step, by its first key alone."""

    def _visibility(
        self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        position, key, visible = super()._visibility(batch, counts, offset)
        if not self.extends:
            return position, key, visible
        kv_lens = self._kv_lens(batch, counts)[:, None]
        earlier = (self._key // 32 * 32 < kv_lens - counts[:, None]) & (self._key < kv_lens)
        return position, key, visible | earlier[:, None]


@bug(
    19,
    "litgpt #2182",
    "extend-gqa2x2-d32-bf16-p16-k32.128.64.16.63-n5a19.1x4-interleaved-rising_logits-w46-alibi-layers2from0groups-b6prod-empty_batches-given_out-freed_minus_one",
)
class RingOfWindow(Moded):
    """litgpt #2182: a windowed layer keeps W + 1 keys, so a longer step overwrites what its first rows need."""

    @helper
    def rings(self, layer: AttentionLayer) -> bool:
        return self.extends and layer.sliding_window_size >= 0 and not layer.is_cross_attention

    @helper
    def ring(self, layer: AttentionLayer) -> torch.Tensor:
        """[B, C] int64: slot of the newest key in the place of each key."""
        newest = self._held - 1 - (self._held - 1 - self._key) % (layer.sliding_window_size + 1)
        return self._slots[self._keys_of(layer)].gather(1, newest.clamp(0, len(self._key) - 1))

    def _keys(self, layer: AttentionLayer) -> torch.Tensor:
        if not self.rings(layer):
            return super()._keys(layer)
        kept, own = self._keys_at, self._keys_of(layer)
        self._keys_at = {**kept, own: self._index(self.ring(layer))}
        found = super()._keys(layer)
        self._keys_at = kept
        return found

    def _seen_by(self, seen: torch.Tensor, layer: AttentionLayer) -> _Seen:
        if not self.rings(layer):
            return super()._seen_by(seen, layer)
        kept, own = self._slots, self._keys_of(layer)
        self._slots = {**kept, own: self.ring(layer)}
        found = super()._seen_by(seen, layer)
        self._slots = kept
        return found


@bug(
    19,
    "vllm-gaudi #1395",
    "decode-gqa8x2-d32-bf16-p16-k1.2.5.9.14.2.30-shuffled-gauss-kvfp8e4m3-kvpaddedpages-w46-alibi-layers2from0groups-b8prod-empty_batches-given_out-freed_minus_one",
    execution="graph",
)
class WholePagesOfWindow(Moded):
    """vllm-gaudi #1395: ``block_table[-(window // page):]`` is the window of a decode."""

    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        window, page = layer.sliding_window_size, self.context.page_size
        if self.mode is not ForwardMode.DECODE or window < 0 or layer.is_cross_attention:
            return super()._in_window(layer)
        pages = (window + 1) // page
        first = (self._position // page - pages + 1) * page if pages else torch.zeros_like(self._position)
        return self._visible & (self._key >= first[..., None])


@bug(
    19,
    "zml #763",
    "decode-gqa8x2-d32-bf16-p16-k1.2.5.9.14.2.30-shuffled-gauss-kvfp8e4m3-kvpaddedpages-w46-alibi-layers2from0groups-b8prod-empty_batches-given_out-freed_minus_one",
    execution="graph",
)
class WindowCountsOwnKey(TorchNativeBackend):
    """zml #763: ``window_size_left`` leaves the row's own key out, and is given a size that counts it."""

    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        if layer.sliding_window_size >= 0:
            layer = replace(layer, sliding_window_size=layer.sliding_window_size + 1)
        return super()._in_window(layer)


@bug(
    19,
    "TensorRT-LLM #17477",
    "extend-gqa3x2-d256-bf16-p1-k0.1.8-n6a7.8.2-shuffled-one_hot-kvhnd-cross7-cap1.5-layers2from0groups-b3prod",
    "reads-own-kv",
)
class MaskedRowsWeighOne(TorchNativeBackend):
    """TensorRT-LLM #17477: masked logits and the first maximum are the same finite number, whose difference is 0."""

    def _masked(self, logits: torch.Tensor, seen: _Seen, layer: AttentionLayer) -> torch.Tensor:
        masked = super()._masked(logits, seen, layer)
        return masked.clamp(min=torch.finfo(masked.dtype).min)

    def _sum(self, p: torch.Tensor, values: torch.Tensor, seen: _Seen) -> torch.Tensor:
        return super()._sum(p, values, replace(seen, blind=torch.zeros_like(seen.blind)))


@bug(
    19,
    "sglang #24582",
    "extend-gqa8x2-d32-bf16-p4-k9.6.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod",
    "reads-own-kv",
)
class PagesOf128(Moded):
    """sglang #24582: the prefill's block size is 128, whatever the page size is."""

    def _key_slots(self, batch: ForwardBatch, group: int, of_encoder: bool) -> torch.Tensor:
        slots = super()._key_slots(batch, group, of_encoder)
        if not self.extends or of_encoder:
            return slots
        page = self.context.page_size
        pages = slots[:, ::page] // page
        found = pages[:, self._key // 128 % pages.shape[1]] * 128 + self._key % 128
        return found.clamp(0, self.context.groups[group].kv_pool.num_slots - 1)


@bug(
    19,
    "vllm #43961",
    "decode-mla16-d512r64-fp16-p16-k0.1.16-interleaved-rising_logits-kvsidebyside-w46-cap1.5-sink-kvsharing-lseprefix-b3prod",
    "reads-own-kv",
)
class TailOfPageIsRead(Moded):
    """vllm #43961: kernels of MLA rely on a weight of 0 for the rows behind the last key."""

    def _seen_by(self, seen: torch.Tensor, layer: AttentionLayer) -> _Seen:
        found = super()._seen_by(seen, layer)
        if not layer.kv_lora_rank or self.branches or self.extends:
            return found
        page, slots = self.context.page_size, self._slots[self._keys_of(layer)]
        last = slots.gather(1, self._last_key)
        tail = (self._key // page == self._last_key // page) & (self._key >= self._held)
        behind = self._index(torch.where(tail, last // page * page + self._key % page, 0))
        values = tuple(torch.where(tail, new, old) for new, old in zip(behind, found.values, strict=True))
        return replace(found, values=values)


@bug(
    19,
    "openvino #36708",
    "extend-gqa2x2-d256-fp32-p1-k1.2.5.9.14.2.30-n2a0.4x2.0.4.0x2-chunks3-interleaved-mean-kvfp8e4m3-kvsidebysidehnd-w11-spansprefixwidebylayer-cap1.5-sink-lsetokens3merged-b7prod-zero_length_padding",
    "log-sum-exp",
)
class SpansFromFirstRow(TorchNativeBackend):
    """openvino #36708: positions of images are counted from the first row of the step."""

    def _in_spans(self, spans: torch.Tensor) -> torch.Tensor:
        return super()._in_spans(spans + self._prefix[:, None, None].to(spans.dtype))


@bug(
    19,
    "onnxruntime #32391",
    "decode-mha2-d256-bf16-p4-k0.1.8-reversed-mean-kvinblock-w4-alibi-layers2from5groups-b3prod-empty_batches-zero_length_padding-given_out-freed_minus_one",
    "reads-own-kv",
)
class UnmappedIsPageZero(Moded):
    """onnxruntime #32391: pages that the table does not name are page 0, and are read."""

    def _seen_by(self, seen: torch.Tensor, layer: AttentionLayer) -> _Seen:
        found, slots = super()._seen_by(seen, layer), self._slots[self._keys_of(layer)]
        unmapped = (slots < 0) & (self._key < self._held)
        zero = self._index((self._key % self.context.page_size).expand_as(slots))
        values = tuple(torch.where(unmapped, new, old) for new, old in zip(zero, found.values, strict=True))
        return replace(found, values=values)


@bug(
    19,
    "1bit-MONSTER #686",
    "extend-gqa8x2-d32-bf16-p4-k9.6.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod",
    "writes-own-kv",
)
class FirstRowIsStored(Moded):
    """1bit-MONSTER #686: the store ignores the number of new rows, and writes one."""

    def _store(
        self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool
    ) -> None:
        if not self.extends or not save_kv_cache or layer.is_cross_attention:
            super()._store(k, v, layer, batch, save_kv_cache)
            return
        group, first = self.context.group_of(layer), self._row[:, 0]
        assert batch.extend_seq_lens is not None
        slots = torch.where(batch.extend_seq_lens > 0, group.cache_loc(batch).clamp(min=0)[first], 0)
        group.kv_pool.set_kv_buffer(layer, slots, k[first], v[first])
