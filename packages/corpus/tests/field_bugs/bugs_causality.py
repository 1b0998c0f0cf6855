"""Causal bounds."""

from __future__ import annotations

import torch
from parents_latent import Latent, mla_capabilities
from parents_launchers import Known, wide
from parents_native import MLA, Native
from parents_sparse import Indexed
from parents_varlen import Varlen
from plain_backends import FP8, SPEC, Tiled, WithoutCausalMask, declared, wide_capabilities
from torch.nn.functional import pad

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import CrossAttention, ForwardMode
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.dense import DenseBackend

_MASK = 2048


@bug(
    1, "vllm-ascend #2979", "extend-gqa2x2-d64-bf16-p1-k32.128.64.16.63-n3a1x4.11-reversed-shifted-b6stale", "completes"
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


@bug(
    1,
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


@bug(1, "MNN #4898", "extend-gqa2x2-d64-bf16-p16-k9.530.70.0-n8a20.1.3.7-interleaved-gauss-b4prod-noncausal")
class KeysCutToAsManyAsRows(WithoutCausalMask):
    """Without a causal mask keys are cut to as many as the block has rows."""

    capabilities = declared("extend", options={"non_causal": {"extend"}})

    def visible(self, index, rows):
        if rows.layer.causal:
            return super().visible(index, rows)
        return index < rows.new[:, None]


@bug(1, "jax #24491", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod")
class CausalMaskAlignedTopLeft(Tiled):
    """The causal mask begins at key 0 where there are more keys than rows."""

    capabilities = declared("extend")

    def visible(self, index, rows):
        return index <= rows.place[:, None]


@bug(2, "xformers #103", "target-verify-gqa2x2-d64-bf16-p16-k9.70.1-chain4-shared-gauss-b4prod-no_tree_tensors")
class BareChainSeesAll(Tiled):
    """Where no mask is passed there is no causal one either."""

    capabilities = declared("decode", "target-verify", server={"takes_bare_chains": True})
    bare = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.bare = batch.forward_mode.is_target_verify() and batch.spec_info.custom_mask is None

    def visible(self, index, rows):
        return index < rows.kv_lens[:, None] if self.bare else super().visible(index, rows)


@bug(3, "tokenspeed #469", "draft-extend-v2-mla16-d512r64-bf16-p16-k7x2-n4a1x2-contiguous-gauss-b2prod")
class PlainBoundInBf16(Latent):
    """The bf16 kernel masks several rows by the length alone; the FP8 kernel does so row by row."""

    capabilities = mla_capabilities(*SPEC, kv_pool={"kv_dtypes": FP8})

    def visible(self, index, rows):
        if rows.plan.max_q_len > 1 and self.context.kv_pool.dtype.itemsize > 1:
            return index < rows.kv_lens[:, None]
        return super().visible(index, rows)


@bug(3, "TensorRT-LLM #14133", "draft-extend-v2-mha2-d64-bf16-p1-k7.8.9-n6a1.3.5-contiguous-rising_logits-b6prod")
class LengthsRepeatedPerAtom(Tiled):
    """Rows are run two at a time, each pair with the full length: earlier pairs see later keys."""

    capabilities = wide_capabilities(*SPEC)

    def visible(self, index, rows):
        n = rows.plan.max_q_len
        if n <= 2 or n % 2:
            return super().visible(index, rows)
        return index <= (rows.kv_lens - 2 + rows.place % 2)[:, None]


@bug(
    3,
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


@bug(3, "onnxruntime #23850", "extend-gqa2x2-d64-bf16-p16-k7x2-n10a19.1-shared-peaked-b3prod")
class ValuesWipedByTheLanesOwnRow(Tiled):
    """A lane drops values that its own row does not see, though other rows of the tile need them."""

    capabilities = wide_capabilities("decode", "extend")

    def parts(self, scores, seen, v, rows):
        index = torch.arange(v.shape[1], device=v.device)
        first = (rows.prefix + rows.place // 16 * 16)[:, None]
        kept = index // 16 * 16 <= first
        return super().parts(scores, seen, v.masked_fill(~kept[:, :, None, None], 0.0), rows)


@bug(4, "sparkinfer #4", "extend-gqa2x2-d64-bf16-p64-k7x2-n34a1.67-interleaved-rising_logits-b3prod")
class TopLeftCausal(Known):
    """Prefill has kv_end = min(kv_len, row + 1), rows counted in the chunk."""

    capabilities = wide("decode", "extend")

    def visible(self, index, rows):
        if not self.extends():
            return super().visible(index, rows)
        return index < torch.minimum(rows.kv_lens, rows.place + 1)[:, None]


@bug(5, "vllm #49010", "target-verify-gqa2x2-d64-bf16-p1-k7.8.9-chain7-reversed-rising_logits-b3prod")
class NoMaskInVerify(Tiled):
    """Verify is a decode kernel with several rows, and without a mask."""

    capabilities = declared("decode", "target-verify")

    def visible(self, index, rows):
        return index < rows.kv_lens[:, None]


@bug(6, "candle #3624", "extend-gqa2x2-d64-bf16-p16-k0.1.16-n2a2.3.1-chunks3-contiguous-one_hot-b6stale")
class BatchlessMask(Tiled):
    """The causal mask has no batch dimension: behind it are zeros, and later requests see their later rows."""

    capabilities = declared("decode", "extend")

    def visible(self, index, rows):
        later = (index >= rows.prefix[:, None]) & (index < rows.kv_lens[:, None]) & (rows.request > 0)[:, None]
        return super().visible(index, rows) | later


@bug(7, "vllm-ascend #6803", "extend-mqa4-d64-bf16-p16-k4094.2563-n2a2x2-shuffled-plus_minus_one-layers1from0-b2prod")
class MaskOf2048(Varlen):
    """The mask of a prefill is a square of 2,048 keys, whatever the context; rows and keys behind it come round."""

    def seen(self, index, position, layer):
        seen = super().seen(index, position, layer)
        return seen & (index % _MASK <= position % _MASK) if self.meta.extends else seen


@bug(
    11,
    "sglang #39703",
    "extend-gqa2x2-d64-bf16-p16-k0.1.16-n45a3.131.1-interleaved-one_hot-layers1from0-b3prod-empty_batches-noncausal",
)
class CausalTileBound(WithoutCausalMask):
    """The loop over keys ends at the diagonal of a tile of 64 rows, in layers that are not causal as well."""

    capabilities = declared("extend", kv_pool={"page_sizes": {16}}, options={"non_causal": {"extend"}})

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        end = rows.prefix + (rows.place // 64 + 1) * 64
        return seen if rows.layer.causal else seen & (index < end[:, None])


@bug(13, "jax #24495", "extend-gqa2x2-d64-bf16-p16-k9.530.70.0-n8a20.1.3.7-interleaved-gauss-b4prod-noncausal")
class KeysEndWithTheRowsTile(WithoutCausalMask):
    """Without a causal mask the loop over tiles of 128 keys ends where the tiles of rows do."""

    capabilities = declared("extend", options={"non_causal": {"extend"}})
    TILE = 128

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        return seen if rows.layer.causal else seen & (index < (-(-rows.new // self.TILE) * self.TILE)[:, None])


class Crossing(DenseBackend):
    """The reference parent with cross-attention layers, whose keys have the first columns of the request table."""

    capabilities = DenseBackend.capabilities.with_changes(
        eager={"decode", "extend"},
        graph={"decode"},
        heads={"families": {"gqa"}, "gqa_ratios": {2, 4}, "head_dims": {64, 128}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16, 64}},
        options={"sinks": False, "logit_cap": False},
        bounds={"max_topk": 0},
        cross_attention=CrossAttention(modes={"decode", "extend"}),
    )

    def __init__(self, context):
        super().__init__(context)
        self.key = torch.arange(context.req_to_token.shape[1], device=context.device)

    def key_slots(self, batch):
        table = super().key_slots(batch)
        self.encoder_slots, self.encoder_lens = table, None
        if batch.encoder_lens is None:
            return table
        self.encoder_lens = batch.encoder_lens[: batch.batch_size].long()
        return table.gather(1, (self.key + self.encoder_lens[:, None]).clamp(max=table.shape[1] - 1))

    def encoder_keys_seen(self):
        """[B, 1 or W, C] bool."""
        return (self.key < self.encoder_lens[:, None])[:, None]

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        if not layer.is_cross_attention:
            return super().forward(q, k, v, layer, batch, save_kv_cache)
        if k is not None:
            self.context.kv_pool.set_kv_buffer(layer, batch.encoder_out_cache_loc, k, v)
        slots, visible = self.slots, self.visible
        self.slots, self.visible = self.encoder_slots, self.encoder_keys_seen().expand_as(visible)
        out = super().forward(q, k, v, layer, batch, False)
        self.slots, self.visible = slots, visible
        return out


@bug(15, "vllm #47035", "extend-gqa2x2-d64-bf16-p16-k7x2.8x29.608.8x8-n3a2.3x20.2x19-shuffled-one_hot-cross37-b41small")
class CausalCross(Crossing):
    """Cross attention runs in a kernel that is causal only, aligned at the end."""

    def encoder_keys_seen(self):
        row = torch.arange(self.visible.shape[1], device=self.key.device)
        last = self.encoder_lens[:, None] - self.counts[:, None] + row
        return super().encoder_keys_seen() & (self.key <= last[..., None])


# vllm #45227: metadata of a verify are sized for one row per request.
@bug(
    16,
    "vllm #45227",
    "target-verify-mla16-d512r64-bf16-p64-k133.3.0.64.9.33.1.17.5-chain7-interleaved-mean-kvfp8e4m3-b12prod",
)
class OneRowPerRequest(Native):
    """Rows of a verify have no causal bounds of their own: each sees all keys of its request."""

    capabilities = wide("decode", "target-verify", **MLA).with_changes(
        heads={"gqa_ratios": {8, 16}}, kv_pool={"kv_dtypes": FP8}
    )

    def _in_window(self, layer):
        seen = super()._in_window(layer)
        if not self.mode.is_target_verify():
            return seen
        return (self._key <= self._last_key)[:, None].expand_as(seen)


# aiter #5679: a verify of 8 rows and 16 heads is folded onto a kernel of 4 rows. The mechanism is a guess.
@bug(16, "aiter #5679", "target-verify-mla16-d512r64-bf16-p64-k133.3.0.64.9.33.1.17.5-chain7-interleaved-mean-b12prod")
class SecondFoldOfFour(Native):
    """Rows behind the fourth have the bounds of the rows four before them."""

    capabilities = wide("decode", "target-verify", **MLA).with_changes(heads={"gqa_ratios": {8, 16, 32}})

    def _in_window(self, layer):
        seen = super()._in_window(layer)
        if not self.mode.is_target_verify() or layer.tp_q_head_num != 16:
            return seen
        return seen[:, torch.arange(seen.shape[1], device=seen.device) % 4]


# mlxcel #619: only a mask of the caller makes a prefill causal, and callers give none. Up to topk keys are dense.
@bug(
    16,
    "mlxcel #619",
    "extend-mqa4-d64-bf16-p16-k3.37.9.17-n6a1x3.19-reversed-mean-sel16-idx4-b4prod",
    "selection-well-formed",
)
class CausalByMask(Indexed):
    """Rows of a prefill see later rows, in the indexer and in the dense path of short requests."""

    capabilities = Indexed.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})

    def keys_seen(self, rows, plan):
        if not self.extends():
            return super().keys_seen(rows, plan)
        return plan.kv_lens[self.request_of_row(rows, plan)].long()

    def run(self, q, kv, plan):
        selected = self.padded(plan.selected, len(q))
        if self.extends() and plan.layer.index_heads:  # selections without an indexer are taken as they are
            lens = plan.kv_lens[self.request_of_row(q, plan)][:, None]
            key = torch.arange(selected.shape[1], dtype=selected.dtype, device=q.device)
            selected = torch.where(lens <= plan.layer.topk, torch.where(key < lens, key, -1), selected)
        return self.attend_all(q, kv, plan, self.slots(selected, plan), selected >= 0)[0]


# 1, vllm-ascend #15887: ``sparse_mode = 4 if self.sliding_window else 3 if attn_metadata.causal else 0``.
@bug(
    18,
    "vllm-ascend #15887",
    "target-verify-mla2-d512r64-fp16-p16-k0.1.16-chain7-reversed-gauss-kvfp8e4m3-kvhnd-w4000-cap1.5-sink-lseprefix-b3prod-zero_length_padding-noncausal-leftofblock",
    "log-sum-exp",
)
class BandWithoutCausality(TorchNativeBackend):
    """A layer with a window that is not causal is masked by a causal band."""

    def _in_window(self, layer):
        seen = super()._in_window(layer)
        if layer.causal or layer.is_cross_attention or layer.sliding_window_size < 0:
            return seen
        return seen & (self._key_position <= self._position[..., None])


# 8, sparkinfer #3: ``kv_end = causal ? min(seqlen_kv, qpos + 1) : seqlen_kv``.
@bug(18, "sparkinfer #3", "extend-gqa8x2-d32-bf16-p4-k9.6.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod")
class BoundOfChunk(TorchNativeBackend):
    """The causal bound of a prefill does not count the prefix."""

    def _visibility(self, batch, counts, offset):
        position, key, visible = super()._visibility(batch, counts, offset)
        if batch.forward_mode is ForwardMode.EXTEND and self.context.causal:
            visible = visible & (key <= offset[:, None])
        return position, key, visible
