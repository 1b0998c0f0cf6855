"""Recurrent states: gates, heads, chunks and convolutions."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_states import Gdn32, Kda, Mamba, Moded

from attn_testkit.contract import ForwardMode
from attn_testkit_corpus.faults.catalogue import bug, helper
from attn_testkit_corpus.faults.states import StateParent

CHUNKED_FROM = 9

PART = 256


@bug(
    14, "flashinfer #4219", "decode-mamba4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod", "output-contract"
)
class OutputIsKept(StateParent):
    """If no output is passed, all calls with equally many rows return the same tensor."""

    capabilities = StateParent.capabilities.with_changes(server={"output_lifetime": "model"})

    def forward(self, mixed, a, b, layer, batch):
        out = super().forward(mixed, a, b, layer, batch)
        kept = self.__dict__.setdefault("outputs", {}).setdefault(out.shape, torch.empty_like(out))
        return kept.copy_(out)


@bug(
    14,
    "sparkinfer #615",
    "decode-mamba4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod",
    "state-counts-tokens",
)
class DecodeReadsTransposed(StateParent):
    """A decode takes rows of a state for its columns, when it reads and when it stores."""

    capabilities = StateParent.capabilities.with_changes(
        eager={"decode", "extend"}, graph={"decode"}, bounds={"max_topk": 0}
    )

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.decodes = batch.forward_mode.is_decode()

    def pools(self, layer):
        conv, temporal = super().pools(layer)
        return conv, temporal.mT if self.decodes else temporal


@bug(
    14, "lattice #262", "decode-mamba4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod", "state-counts-tokens"
)
class ValueHeadsOfKeyHeads(StateParent):
    """The loop goes over as many heads as there are key heads; outputs and states of the others stay as they were."""

    def token(self, rows, state, gates, layer):
        after, read = super().token(rows, state, gates, layer)
        head = torch.arange(layer.v_heads, device=after.device) < layer.k_heads
        after = torch.where(head[:, None, None], after, state)
        return after, torch.where(head[:, None], read, torch.zeros_like(read))


@bug(
    15,
    "vllm-xpu-kernels #399",
    "extend-gdn4x2-d128-bf16-p16-k0.17.0-n4a1x2.9-shuffled-no_decay-k64w4s32-layers1from0-b3prod",
    "output-written",
)
class FeaturesOf256(StateParent):
    """Prefills of 8 rows or more write 256 features for each key head; value heads behind are not written."""

    capabilities = StateParent.capabilities.with_changes(
        heads={"families": {"gdn"}, "gqa_ratios": {3, 4}, "head_dims": {64, 128}},
        eager={"decode", "extend"},
        graph={"decode"},
        bounds={"max_topk": 0},
    )

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.prefills = batch.forward_mode == "extend" and self.most >= 8

    def forward(self, mixed, a, b, layer, batch):
        out = super().forward(mixed, a, b, layer, batch)
        if not self.prefills:
            return out
        ratio = layer.v_heads // layer.k_heads
        feature = torch.arange(layer.v_heads, device=out.device) % ratio * layer.v_dim
        feature = feature[:, None] + torch.arange(layer.v_dim, device=out.device)
        return torch.where(feature < 256, out, torch.empty_like(out))


class Lightning(StateParent):
    """The parent for Lightning, which has neither a convolution nor gates of its rows."""

    capabilities = StateParent.capabilities.with_changes(
        heads={"families": {"lightning"}, "gqa_ratios": {1}},
        state=replace(StateParent.declared_state(), conv_widths={1}),
    )

    def convolved(self, every, layer):
        return every[..., 0].float()

    def gates(self, a, b, layer):
        decay = torch.exp(-layer.slope)[None, :, None]
        return decay, torch.ones_like(decay)

    def token(self, rows, state, gates, layer):
        wide = layer.v_heads * layer.k_dim
        q, k = (part.reshape(-1, layer.v_heads, layer.k_dim) for part in (rows[:, :wide], rows[:, wide : 2 * wide]))
        v = rows[:, 2 * wide :].reshape(-1, layer.v_heads, layer.v_dim)
        after = state * gates[0][..., None] + v[..., None] * k[:, :, None]
        return after, torch.einsum("bhvk,bhk->bhv", after, q)


@bug(
    15,
    "vllm-ascend #10276",
    "extend-lightning2-d64-bf16-p16-k30.0.5.0-n1a1x4-shuffled-no_decay-k64w1s32-layers3from5-b4stale-overlap_scheduling",
    "finite",
)
class TailOfBlockIsLoaded(Lightning):
    """Rows behind a request in its last block of 64 are loaded, and count with weights of 0."""

    BLOCK = 64

    def forward(self, mixed, a, b, layer, batch):
        self.tails = None
        if batch.forward_mode == "extend" and len(mixed):
            more = mixed.untyped_storage().nbytes() // mixed.dtype.itemsize - mixed.storage_offset()
            rows = min(len(mixed) + self.BLOCK, (more - mixed.shape[1]) // mixed.stride(0) + 1)
            memory = mixed.as_strided((rows, mixed.shape[1]), mixed.stride())
            end = self.counts.cumsum(0)
            offset = torch.arange(self.BLOCK, device=mixed.device)
            row = end[:, None] + offset
            loaded = (offset < (-self.counts % self.BLOCK)[:, None]) & (row < rows)
            keys = memory[row.clamp(max=rows - 1)][..., : 2 * layer.v_heads * layer.k_dim].float()
            self.tails = (keys * 0.0).masked_fill(~loaded[..., None], 0.0).sum((1, 2))
        return super().forward(mixed, a, b, layer, batch)

    def token(self, rows, state, gates, layer):
        after, read = super().token(rows, state, gates, layer)
        if self.tails is None:
            return after, read
        return after + self.tails[:, None, None, None], read + self.tails[:, None, None]


# 48: sparkinfer #604. The scan of a chunk reads the sum of gates in row 31, which holds 0 in a shorter chunk: what is
# stored is S + sum exp(-G_p) k_p u_p instead of exp(G) S + sum exp(G - G_p) k_p u_p. What rows read is right.
@bug(
    16,
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
    16,
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


# 51: vllm #50649. Decodes of a mixed batch go through the chunk kernel as sequences of one row.
@bug(16, "vllm #50649", "extend-kda1x2-d64-fp32-p16-k0.17.0-n4a1x2.9-shuffled-mild_decay-k64w4s32-b3prod", "finite")
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


# 22, Arcaine #11: ``beta = tmp1.data()``, ``g = tmp1.data() + seq * heads``, of a product with rows of 2 * heads.
@bug(
    18,
    "Arcaine #11",
    "extend-rwkv2-d128-bf16-p16-k0.3.0-n16a15.16.17-shuffled-mild_decay-k128w1s32.zeroed.kv.strided-b3prod",
)
class GatesAsBlocks(Moded):
    """A prefill of more than 8 rows reads ``a`` and ``b`` as if their rows were contiguous."""

    def forward(self, mixed, a, b, layer, batch):
        if self.mode is ForwardMode.EXTEND and len(mixed) >= CHUNKED_FROM:
            a, b = (None if each is None else self.in_block(each) for each in (a, b))
        return super().forward(mixed, a, b, layer, batch)

    @helper
    def in_block(self, gates):
        return gates.as_strided(gates.shape, (gates.shape[1], 1), gates.storage_offset())


# 23, TileOPs #1963: the store of the first part's initial state was dropped by a compiler's pass.
class FirstPartUnwritten(Moded):
    """A long fresh prompt begins from a part of fresh memory that nothing was written to."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.long = self.counts > PART if self.mode is ForwardMode.EXTEND else None

    def forward(self, mixed, a, b, layer, batch):
        self.is_first = True
        return super().forward(mixed, a, b, layer, batch)

    def step(self, state, q, k, v, a, b, layer):
        if self.is_first and self.long is not None:
            unwritten = (self.long & ~self.begun).view(-1, 1, 1, 1)
            state = torch.where(unwritten, torch.empty_like(state), state)
        self.is_first = False
        return super().step(state, q, k, v, a, b, layer)


# 26, flash-linear-attention #1194: decode is detected by ``max_seqlen == len(cu_seqlens) - 1``.
@bug(
    18,
    "flash-linear-attention #1194",
    "extend-mamba1x2-d128-bf16-p16-k30.0.5.0-n3a2x2.3.4-shuffled-weak_decay-k128w4s32.zeroed.kv.strided-b4prod",
)
class PackedAsDecode(Moded):
    """Each row of a packed prefill is convolved with the window before the step."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        extends = self.mode is ForwardMode.EXTEND
        self.confused = extends and batch.batch_size > 1 and max(batch.extend_seq_lens_cpu) == batch.batch_size

    def forward(self, mixed, a, b, layer, batch):
        self.window_before = None
        return super().forward(mixed, a, b, layer, batch)

    def convolved(self, rows, window, layer):
        if self.window_before is None:
            self.window_before = window
        return super().convolved(rows, self.window_before if self.confused else window, layer)


# 27, sglang #38975: ``tl.sigmoid(b_val).to(b.dtype.element_ty).to(tl.float32)``.
@bug(
    18,
    "sglang #38975",
    "decode-gdn4x2-d64-bf16-p16-k3.1.12.7.2.20.5.4x18.2x18.13x17.8x18.3x17.21x18.6x8.606.6x8-shuffled-mild_decay-k64w1sb16.null.source.kv.strided.snap16-layers1from0-b131nan-empty_batches-overlap_scheduling",
)
class BetaInModelDtype(Moded):
    """A decode rounds the sigmoid of ``b`` to the model's dtype."""

    def gates(self, a, b, layer):
        decay, factor = super().gates(a, b, layer)
        if self.mode is ForwardMode.DECODE and layer.kind in ("gdn", "kda"):
            factor = factor.to(b.dtype).float()
        return decay, factor
