"""Recurrent states and rows of formats; bugs of the sixteenth set. The number is that of ``sixteenth_set.md``.

Their parents, which are right, are in this file, too. ``MODES`` of a class without a case are those in which its bug
can show.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.backends.torch_native_sparse import TorchNativeSparsePackedBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.contract import ROW_FORMATS, ForwardMode
from attn_testkit_corpus.faults.catalogue import bug, helper

PLAIN = {"eager": {"decode", "extend"}, "graph": {"decode"}, "bounds": {"max_topk": 0}}
SPECULATES = {
    "eager": {"decode", "extend", "target-verify"},
    "graph": {"decode", "target-verify"},
    "bounds": {"max_topk": 1},
}


def of_states(family, modes, ratios=(1, 2, 4), **changes):
    """Capabilities of a family whose drafts are chains, without copies and without a second slot to read."""
    whole = TorchNativeStateBackend.capabilities
    few = {"trees": frozenset(), "snapshots": frozenset(), "continues": {"copy"}, "rollback": {"commit"}}
    return whole.with_changes(
        heads={"families": {family}, "gqa_ratios": set(ratios)}, state=replace(whole.state, **few | changes), **modes
    )


class TwoIndices(TorchNativeStateBackend):
    """Keeps the slots of states apart from those of windows; both are the same here."""

    in_graph = False

    def init_forward_metadata(self, batch):
        self.in_graph = False
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.in_graph = True
        super().init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode
        self.read, self.written = self.slots_of_states(batch)
        self.keeps = self.live if self.written is self.index else self.written > 0
        if not self.by_slots:
            # ``forward`` reads the states of these, and windows by ``windows``.
            self.taken = self.read

    def slots_of_states(self, batch):
        """[bs] int64 each: slots whose state is read and written."""
        return self.taken, self.index

    def pools(self, layer):
        self.current = super().pools(layer)
        return self.current

    def windows(self, held, state, columns):
        return super().windows(held if self.by_slots else self.current[0][self.index], state, columns)

    def store(self, pool, rows, index, live):
        if self.written is not self.index and rows.dim() == 4 and index is self.index and not self.by_slots:
            index, live = self.written, self.keeps
        super().store(pool, rows, index, live)


class Gdn(TwoIndices):
    """GDN, decode and extend."""

    capabilities = of_states("gdn", PLAIN)


class Gdn32(Gdn):
    """GDN with states in float32."""

    capabilities = of_states("gdn", PLAIN, dtypes={"fp32"})


class GdnPaddedByZero(Gdn):
    """GDN, padded requests have the index 0."""

    capabilities = of_states("gdn", PLAIN, padding={"skip_zero"})


class GdnCopies(TwoIndices):
    """GDN with copies for a prefix cache, and verified chains."""

    capabilities = of_states("gdn", SPECULATES, snapshots={64})


class GdnSlots(TwoIndices):
    """GDN with a slot for each node of a draft, as vLLM has it."""

    capabilities = of_states("gdn", SPECULATES, rollback={"slots"}, padding={"skip_zero"})


class Mamba(TwoIndices):
    """Mamba2, decode and extend."""

    capabilities = of_states("mamba", PLAIN)


class MambaCopies(TwoIndices):
    """Mamba2 with copies for a prefix cache."""

    capabilities = of_states("mamba", PLAIN, snapshots={16, 64})


class Kda(TwoIndices):
    """KDA, decode and extend."""

    capabilities = of_states("kda", PLAIN, (1,))


class KdaChains(TwoIndices):
    """KDA with verified chains."""

    capabilities = of_states("kda", SPECULATES, (1, 4))


class KdaSlots(TwoIndices):
    """KDA with a slot for each node of a draft."""

    capabilities = of_states("kda", SPECULATES, (1,), rollback={"slots"}, padding={"skip_zero"})


# 48: sparkinfer #604. The scan of a chunk reads the sum of gates in row 31, which holds 0 in a shorter chunk: what is
# stored is S + sum exp(-G_p) k_p u_p instead of exp(G) S + sum exp(G - G_p) k_p u_p. What rows read is right.
@bug(
    "sparkinfer #604",
    "extend-gdn4x2-d64-fp32-p16-k0.17.0-n4a1x2.9-shuffled-mild_decay-k128w4s32-b3prod",
    "state-matches-oracle",
)
class GateOfRow31(Gdn32):
    """The state behind a prefill lacks the decay of the rows of its last chunk, if that has fewer than 32."""

    chunk = 32

    def forward(self, mixed, a, b, layer, batch):
        out = super().forward(mixed, a, b, layer, batch)
        if self.mode is not ForwardMode.EXTEND:
            return out
        gate = torch.nn.functional.softplus(a.double() + layer.dt_bias.double())
        # [T + 1, Hv]: sums of the gates of all rows before.
        sums = torch.nn.functional.pad((-layer.A_log.double().exp() * gate).cumsum(0), (0, 0, 1, 0))
        end = self.first + self.counts
        lost = sums[end] - sums[end - self.counts % self.chunk]
        temporal = self.pools(layer)[1]
        state = temporal[self.index].double() * torch.exp(-lost)[..., None, None]
        self.store(temporal, state.to(temporal.dtype), self.index, self.live & (self.counts % self.chunk > 0))
        return out


# 49: transformers #46741. A step counts as a decode if the cache has a state, whatever the number of rows.
# The convolution makes one step, dt keeps the first row, and the one result stands for all rows.
@bug(
    "transformers #46741",
    "extend-mamba4x2-d128-bf16-p16-k64-n5a5-shuffled-weak_decay-k128w1sb16.slot0-layers3from5-b1nan",
)
class ContinuedAsDecode(Mamba):
    """A prefill that continues a state updates it by the first row of a request only."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.whole = self.counts
        if batch.forward_mode is ForwardMode.EXTEND:
            self.counts = torch.where(self.begun, self.counts.clamp(max=1), self.counts)

    def forward(self, mixed, a, b, layer, batch):
        out = super().forward(mixed, a, b, layer, batch)
        if self.mode is not ForwardMode.EXTEND:
            return out
        row = torch.arange(len(out), device=out.device)
        request = (torch.searchsorted(self.first + self.whole, row, right=True)).clamp(max=len(self.whole) - 1)
        inside = row < self.whole.sum()
        return torch.where((self.begun[request] & inside)[:, None, None], out[self.first[request]], out)


# 50: vllm #53051. ``_is_uniform_decode`` looks at shapes only: each request as many rows as a draft has nodes.
class TakenForVerify(GdnSlots):
    """A prefill in which each request has as many rows as a draft has nodes stores no state and no window."""

    MODES = ("extend",)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.uniform = False
        if batch.forward_mode is ForwardMode.EXTEND and self.context.topk:
            self.uniform = set(batch.extend_seq_lens_cpu) == {self.context.num_draft_tokens}

    def store(self, pool, rows, index, live):
        if not self.uniform:
            super().store(pool, rows, index, live)


# 51: vllm #50649. Decodes of a mixed batch go through the chunk kernel as sequences of one row.
@bug(
    "vllm #50649",
    "extend-kda1x2-d64-fp32-p16-k0.17.0-n4a1x2.9-shuffled-mild_decay-k64w4s32-b3prod",
    "finite",
)
class OneRowIsNaN(Kda):
    """A request that continues a state by one row, next to one with more rows, gets NaN."""

    def forward(self, mixed, a, b, layer, batch):
        out = super().forward(mixed, a, b, layer, batch)
        if self.mode is not ForwardMode.EXTEND:
            return out
        alone = self.begun & (self.counts == 1) & (self.counts.max() > 1)
        temporal = self.pools(layer)[1]
        nan = torch.full_like(temporal[self.index], torch.nan)
        self.store(temporal, nan, self.index, self.live & alone)
        row = torch.arange(len(out), device=out.device)
        request = torch.searchsorted(self.first + self.counts, row, right=True).clamp(max=len(self.counts) - 1)
        hit = alone[request] & (row == self.first[request])
        return out.masked_fill(hit[:, None, None], torch.nan)


# 52: ATOM #1436. The kernels skip negative indices; padded requests of vLLM's full graphs have the null block 0.
@bug(
    "ATOM #1436",
    "decode-gdn4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32.null-b4prod",
    "writes-own-state",
    execution="graph",
)
class PaddingIsNotNegative(GdnPaddedByZero):
    """Padded requests of a replayed decode read and write slot 0."""

    def stores(self, indices):
        return indices >= 0 if self.in_graph else super().stores(indices)


# 53: vllm #57266. States are known at ends of chunks, which a stride of (grid // chunk) chunks walks: with a chunk of
# three quarters of the grid that is one chunk for a block. Windows are copied by another kernel, rightly.
@bug(
    "vllm #57266",
    "extend-mamba4x2-d128-fp32-p16-k0.3.0-n16a15.16.17-shuffled-weak_decay-k64w4s16.zeroed.snap16-layers3from5-b3prod",
    "state-matches-oracle",
)
class CopiesAtChunkEnds(MambaCopies):
    """A copy of a prefill has the state behind three quarters of the rows that it should include."""

    def forward(self, mixed, a, b, layer, batch):
        self.done = 0
        return super().forward(mixed, a, b, layer, batch)

    def step(self, *given):
        self.done += 1
        return super().step(*given)

    def store(self, pool, rows, index, live):
        copies = self.snapshot is not None and index is self.snapshot.slots
        if self.mode is ForwardMode.EXTEND and rows.dim() == 4 and copies:
            live = (self.snapshot.rows > 0) & (self.snapshot.rows * 3 // 4 == self.done)
        super().store(pool, rows, index, live)


# 54: sglang #30047. Track indices moved from the arguments into metadata; the verify path of Ascend lost them.
@bug(
    "sglang #30047",
    "target-verify-gdn1x2-d64-fp16-p16-k1.70.9-chain2-shuffled-no_decay-k64w2sb16.null.kv.snap64-layers3from5-b5stale",
    "state-matches-oracle",
)
class CommitsWithoutCopies(GdnCopies):
    """The commit behind a verify makes no copies for the prefix cache."""

    def commit(self, steps, state):
        super().commit(steps, replace(state, snapshot=None))


# 55: ik_llama.cpp #1932. Subgraphs of tokens share scratch buffers from the third sequence on; windows are right.
@bug(
    "ik_llama.cpp #1932", "decode-gdn4x2-d64-fp32-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod", "state-counts-tokens"
)
class TwoBuffers(Gdn):
    """In a decode of three requests or more, each reads the state of one of the last two."""

    def slots_of_states(self, batch):
        bs = len(self.taken)
        if not batch.forward_mode.is_decode() or bs < 3:
            return super().slots_of_states(batch)
        place = torch.arange(bs, device=self.taken.device)
        return self.taken[bs - 1 - (bs - 1 - place) % 2], self.index


# 56: mlx-lm #1736. The mask of the rows of padding on the right is dropped; windows follow the lengths.
@bug(
    "mlx-lm #1736",
    "extend-gdn4x2-d64-fp32-p16-k0.17.0-n4a1x2.9-shuffled-mild_decay-k128w4s32-b3prod",
    "state-matches-oracle",
)
class PaddingUpdatesStates(Gdn32):
    """Shorter requests of a prefill are padded with rows of zeros, which update their states."""

    def forward(self, mixed, a, b, layer, batch):
        # The windows before the step are overwritten by it; those after the rows follow from them.
        out = super().forward(mixed, a, b, layer, batch)
        if self.mode is not ForwardMode.EXTEND:
            return out
        conv, temporal = self.pools(layer)
        bs = len(self.counts)
        window = conv[self.index][..., : layer.conv_width - 1]
        state = temporal[self.index].float()
        zeros = tuple(each.new_zeros(bs, each.shape[1]) for each in (mixed, a, b))
        for token in range(min(batch.extend_seq_lens_cpu), self.width):
            padding = token >= self.counts
            one, moved = self.convolved(zeros[0], window, layer)
            after, _ = self.step(state, *self.split(one, layer), zeros[1], zeros[2], layer)
            window = torch.where(padding[:, None, None], moved, window)
            state = torch.where(padding[:, None, None, None], after, state)
        self.store(temporal, state.to(temporal.dtype), self.index, self.live)
        return out


# 57: tt-metal #54850. The slot is a host scalar when the trace is captured; eager steps pass the real one. There it is
# that of prefills, which no graph of states has here; a decode of a graph has the same slots.
@bug(
    "tt-metal #54850",
    "decode-kda1x2-d64-fp16-p16-k3.1.12.7.2.20.5-shuffled-weak_decay-k64w4s32.zeroed.strided-b7nan",
    "replay-follows-batch",
    execution="graph",
)
class SlotsOfTrace(Kda):
    """A replay reads and writes the states of the slots of its capture; windows follow the batch."""

    def __init__(self, context):
        super().__init__(context)
        self.traced = []

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            self.traced.append(batch.state.indices.long().clamp(min=0).clone())

    def slots_of_states(self, batch):
        return (self.traced[-1], self.traced[-1]) if self.in_graph else super().slots_of_states(batch)


# 58: sglang #39219. ``fused_kda_conv_gating_verify`` rolls the window into ``conv_state``, which the commit would do.
class VerifyStoresWindows(KdaChains):
    """A verify stores the window behind the last node in the slot of each request."""

    MODES = ("target-verify",)

    def forward(self, mixed, a, b, layer, batch):
        out = super().forward(mixed, a, b, layer, batch)
        if self.mode.is_target_verify():
            behind = self.scratch(layer)[0][: len(self.index), self.width - 1]
            self.store(self.pools(layer)[0], behind, self.index, self.live)
        return out


# 59: vllm #52792. The builder derives the slot as ``block_table[:, 0]``, a strided view; the kernel of the recurrence
# loads ``state_indices + i``. The convolution takes the stride.
class FirstColumnAsContiguous(KdaSlots):
    """A decode reads and writes the state of slot i of the flat table of slots, which has several for a request."""

    MODES = ("decode",)

    def slots_of_states(self, batch):
        table = self.states.req_to_state
        if not batch.forward_mode.is_decode() or table.dim() < 2:
            return super().slots_of_states(batch)
        bs = batch.batch_size
        flat = table[batch.req_pool_indices[:bs].long()].reshape(-1)[:bs].long()
        return flat, flat


class Rows(TorchNativeFormatsBackend):
    """Stores rows itself, by page and slot, in the layout with tokens first."""

    def _store(self, k, v, layer, batch, save_kv_cache):
        if not save_kv_cache:
            return
        group = self.context.group_of(layer)
        self.put(group.kv_pool, (k, v), layer, group.cache_loc(batch).clamp(min=0).long(), batch)

    def put(self, pool, given, layer, slots, batch):
        """Store rows of K and V [T, Hk, D] in ``slots`` [T]."""
        packed = self.packed_of(layer, batch)
        scales = (layer.k_scale, layer.k_head_scales), (layer.v_scale, layer.v_head_scales)
        for part, rows in enumerate(given):
            rows = rows.reshape(-1, layer.tp_k_head_num, layer.head_dim)
            rows = packed.pack(packed.divided(rows, *scales[part]))
            inside = packed.nbytes - packed.nbytes_apart
            self.put_numbers(pool, part, rows[..., :inside], layer, slots)
            if packed.nbytes_apart:
                self.put_scales(pool, part, rows[..., inside:], layer, slots)

    def packed_of(self, layer, batch):
        return self.context.kv_pool.rows_of(layer)

    def places(self, slots):
        return slots // self.context.page_size, slots % self.context.page_size

    def put_numbers(self, pool, part, rows, layer, slots):
        pool.get_kv_pages(layer.layer_id)[part].index_put_(self.places(slots), rows)

    def put_scales(self, pool, part, rows, layer, slots):
        pool.get_scale_pages(layer.layer_id)[part].index_put_(self.places(slots), rows)


def of_format(*names, layouts=("nhd",), **changes):
    return TorchNativeFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": set(names), "kv_layouts": set(layouts), "kv_groups": False, "page_sizes": {16, 64}},
        cross_attention={"modes": frozenset()},
        lse=None,
        **changes,
    )


class Nvfp4(Rows):
    """NVFP4 with scales apart."""

    capabilities = of_format("nvfp4")


class Fp8PerTokenHead(Rows):
    """FP8 with a scale for each token and head behind its row."""

    capabilities = of_format("fp8_per_token_head")


class Int8PerTokenHead(Rows):
    """Integers of 8 bits with a scale for each token and head behind their row."""

    capabilities = of_format("int8_per_token_head")


class Fp8PerHead(Rows):
    """FP8 with scales of heads."""

    capabilities = of_format("fp8_per_head")


class Int8Apart(Rows):
    """Integers of 8 bits with scales apart, pages with heads first."""

    capabilities = of_format("int8_per_token_head_apart", layouts=("hnd",))


class Fp8(TorchNativeBackend):
    """FP8 with a scale for each layer."""

    capabilities = TorchNativeBackend.capabilities.with_changes(
        heads={
            "families": {"mha", "gqa", "mqa"},
            "mla_rope_dims": set(),
            "gqa_ratios": {1, 2, 4, 8, 16},
            "head_dims": {64, 128},
            "heads_by_layer": False,
            "wider_keys": set(),
        },
        kv_pool={"kv_dtypes": {"fp8_e4m3"}, "kv_layouts": {"nhd"}, "kv_groups": False, "page_sizes": {16, 64, 128}},
        precision={"dtypes": {"bf16", "fp16"}},
        cross_attention={"modes": frozenset()},
        lse=None,
        options={"sinks": False},
    )


class PackedMla(TorchNativeSparsePackedBackend):
    """Packed rows of MLA with float32 scales that are not powers of two."""

    capabilities = TorchNativeSparsePackedBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_ds_mla"}})


# 60: vllm #50084. ``swizzle_scale_offset`` of trtllm-gen: scale s of token t of four lies at 4 s + t of their scales.
@bug(
    "vllm #50084",
    "draft-extend-gqa8x2-d256-bf16-p16-k1.2.5.9.14.2.30-n6a6x7-contiguous-mean-kvnvfp4-w4-b7prod",
    "writes-own-kv",
)
class ScalesOfFourTokens(Nvfp4):
    """Scales of values are stored with four tokens interleaved; numbers, and scales of keys, lie in linear order."""

    def put_scales(self, pool, part, rows, layer, slots):
        if part == 0:
            super().put_scales(pool, part, rows, layer, slots)
            return
        page, slot = self.places(slots)
        width = rows.shape[-1]
        flat = torch.arange(width, device=rows.device) * 4 + slot[:, None] % 4
        token, column = slot[:, None] // 4 * 4 + flat // width, flat % width
        scales = pool.get_scale_pages(layer.layer_id)[1].permute(0, 1, 3, 2)
        scales.index_put_((page[:, None].expand_as(token), token, column), rows.transpose(1, 2))


# 61: kvcached #424. ``get_kv_cache_shape`` without ``cache_dtype_str`` gives rows of D bytes instead of D + 4.
@bug(
    "kvcached #424",
    "decode-mha2-d128-bf16-p16-k21-reversed-mean-kvfp8pertokenhead-w11-b2prod",
    "writes-own-kv",
)
class StepsWithoutScales(Fp8PerTokenHead):
    """Numbers are written and read with steps of D bytes; scales lie where rows of D + 4 bytes have them."""

    @helper
    def narrow(self, rows, layer):
        """[pages, page_size, Hk, D] of [pages, page_size, Hk, D + 4]: the same memory with shorter steps."""
        pages, size, heads, _ = rows.shape
        d = layer.head_dim
        return rows.as_strided((pages, size, heads, d), (size * heads * d, heads * d, d, 1), rows.storage_offset())

    def put_numbers(self, pool, part, rows, layer, slots):
        pages, places = pool.get_kv_pages(layer.layer_id)[part], self.places(slots)
        self.narrow(pages, layer).index_put_(places, rows[..., : layer.head_dim])
        pages[..., layer.head_dim :].index_put_(places, rows[..., layer.head_dim :])

    def _rows(self, part, places, layer):
        pages = self.context.kv_pool.get_kv_pages(layer.layer_id)[part]
        return torch.cat([self.narrow(pages, layer)[places], pages[places][..., layer.head_dim :]], -1)


# 62: vllm #54563. ``pow2_fp32`` extracts the exponent of a scale that the writer stores as amax / 448.
@bug(
    "vllm #54563",
    "target-verify-mla2-d128r64-bf16-p64-k3.133.33.17-chain7-shared-gauss-kvfp8dsmla-sink-sel1-idx4reuse-b4prod",
)
class ScalesAsPowersOfTwo(PackedMla):
    """A scale counts as the power of two at or below it."""

    def read(self, kv, slot, layer):
        keys, _ = super().read(kv, slot, layer)
        packed = self.context.kv_pool.rows_of(layer)
        plane = packed.scale_planes[0]
        scales = packed.raw(kv[0].flatten(0, 1)[slot], plane).contiguous().view(torch.float32)
        smaller = (scales.view(torch.int32) & 0x7F800000).view(torch.float32) / scales
        latent = keys[..., : layer.kv_lora_rank] * smaller.repeat_interleave(plane.tile, -1)
        return torch.cat([latent, keys[..., layer.kv_lora_rank :]], -1), latent


# 63: sgl-kernel-xpu #305. Only the split path folds the descales in. The thread does not say from which length on keys
# are split; here a batch whose longest context has more than 512 keys is.
@bug("sgl-kernel-xpu #305", "decode-mha2-d64-bf16-p128-k7x2-shuffled-gauss-kvfp8e4m3-b5prod")
class DecodeWithoutSplits(Fp8):
    """A decode of short contexts leaves out the scales of K and V."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.decodes = batch.forward_mode.is_decode()
        if batch.batch_size:
            self.unsplit = batch.seq_lens[: batch.batch_size].max() <= 512

    def _attend(self, q, layer, seen):
        out, logits = super()._attend(q, layer, seen)
        if not self.decodes:
            return out, logits
        plain, _ = super()._attend(q, replace(layer, k_scale=1.0, v_scale=1.0), seen)
        return torch.where(self.unsplit, plain, out), logits


# 64: FreeToken #309. Scales are not handed to the kernel.
@bug(
    "FreeToken #309",
    "draft-decode-mha2-d128-bf16-p16-k21-topk1steps4-shared-rising_logits-kvint8pertokenhead-w0-b1prod",
)
class IntegersWithoutScales(Int8PerTokenHead):
    """Attention takes the integers for keys and values."""

    def _numbers(self, rows, part, layer):
        return rows[..., : layer.head_dim].contiguous().view(torch.int8).float().transpose(1, 2).contiguous()


# 65: vllm #51363. The call of FA4 drops ``k_descale`` and ``v_descale``; that of FA3 has them.
@bug("vllm #51363", "decode-mha2-d128-bf16-p16-k21-reversed-mean-kvfp8perhead-w11-b2prod")
class PathWithoutHeadScales(Fp8PerHead):
    """Attention leaves out the scales of heads, by which the writer divided."""

    def _numbers(self, rows, part, layer):
        return super()._numbers(rows, part, replace(layer, k_head_scales=None, v_head_scales=None))


# 66: aiter #3894. The thread says no more than that the flat index is wrong in the other layout of pages.
@bug(
    "aiter #3894",
    "decode-mha2-d128-bf16-p16-k21-reversed-mean-kvint8pertokenheadapart-kvhnd-w11-b2prod",
    "reads-own-kv",
)
class ScaleIndexOfTokensFirst(Int8Apart):
    """The scale of a token and head is read where pages with tokens first would have it."""

    def _rows(self, part, places, layer):
        pool = self.context.group_of(layer).kv_pool
        rows = pool.get_kv_pages(layer.layer_id)[part][places]
        scales = pool.get_scale_pages(layer.layer_id)[part]
        _, _, heads, width = scales.shape
        steps = scales.stride(0), heads * width, width, 1
        wrong = scales.as_strided(scales.shape, steps, scales.storage_offset())
        return torch.cat([rows, wrong[places]], -1)


# 67: mlxcel #717. ``maximum(absmax / 127, 1.0)`` in the path of a single stream; batches are quantized elsewhere.
@bug(
    "mlxcel #717",
    "draft-decode-mha2-d128-bf16-p16-k21-topk1steps4-shared-rising_logits-kvint8pertokenhead-w0-b1prod",
    "writes-own-kv",
    execution="graph",
)
class ScaleAtLeastOne(Int8PerTokenHead):
    """The scales of a batch of one request are 1 at least."""

    def packed_of(self, layer, batch):
        packed = super().packed_of(layer, batch)
        if batch.batch_size != 1:
            return packed
        form = ROW_FORMATS["int8_per_token_head"]
        numbers, scales = form.planes
        return replace(packed, format=replace(form, planes=(numbers, replace(scales, smallest=1.0))))
