"""Recurrent states; bugs of the eighteenth set.

The number before each class is that of ``eighteenth_set.md``. The case of a class without one costs too much.
"""

from __future__ import annotations

import torch

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.contract import ForwardMode
from attn_testkit_corpus.faults.catalogue import bug, helper

CHUNKED_FROM = 9
PART = 256


class KnowsMode(TorchNativeStateBackend):
    """Healthy: knows the mode of its step."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode


# 22, Arcaine #11: ``beta = tmp1.data()``, ``g = tmp1.data() + seq * heads``, of a product with rows of 2 * heads.
@bug(
    "Arcaine #11",
    "extend-gdn4x2-d64-fp32-p16-k0.3.0-n16a15.16.17-shuffled-mild_decay-k64w4s32-b3prod-wider_buffers",
)
class GatesAsBlocks(KnowsMode):
    """A prefill of more than 8 rows reads ``a`` and ``b`` as if their rows were contiguous."""

    def forward(self, mixed, a, b, layer, batch):
        if self.mode is ForwardMode.EXTEND and len(mixed) >= CHUNKED_FROM:
            a, b = (None if each is None else self.in_block(each) for each in (a, b))
        return super().forward(mixed, a, b, layer, batch)

    @helper
    def in_block(self, gates):
        return gates.as_strided(gates.shape, (gates.shape[1], 1), gates.storage_offset())


# 23, TileOPs #1963: the store of the first part's initial state was dropped by a compiler's pass.
class FirstPartUnwritten(KnowsMode):
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


# 24, vllm #56531: a batch of which no row has a draft takes the path without speculation.
@bug(
    "vllm #56531",
    "target-verify-mamba4x2-d64-fp16-p16-k66.33.1-chain4-loop4-shuffled-mild_decay-k64w4s32.slots_in_decode-b4prod",
    "lossless",
)
class NoDraftNothingAccepted(KnowsMode):
    """A decode reads the first slot and column 0 of the window, whatever the verify before accepted."""

    def taken_slots(self, state):
        return self.index if state.sources is None and self.decodes else super().taken_slots(state)

    def init_forward_metadata_in_graph(self, batch):
        self.decodes = batch.forward_mode is ForwardMode.DECODE
        super().init_forward_metadata_in_graph(batch)

    def windows(self, held, state, columns):
        return held[..., :columns] if self.decodes else super().windows(held, state, columns)


# 25, vllm #50272: the window of the short convolution is not rolled back.
@bug(
    "vllm #50272",
    "target-verify-gdn4x2-d64-fp32-p16-k5.1.30-chain3-shuffled-unit_keys-k64w4s32-b4prod",
    "conv-window-exact",
)
class WindowOfRejected(TorchNativeStateBackend):
    """A commit stores the window behind the last node, and the state behind the last accepted one."""

    def copy_nodes(self, steps, index, live):
        place = torch.arange(len(steps), device=steps.device)
        for layer in self.states.layers:
            for number, (pool, scratch) in enumerate(zip(self.pools(layer), self.scratch(layer), strict=True)):
                node = torch.full_like(steps, scratch.shape[1] - 1) if number == 0 else steps.clamp(min=0)
                self.store(pool, scratch[place, node], index.clamp(min=0), live & (steps >= 0))


# 26, flash-linear-attention #1194: decode is detected by ``max_seqlen == len(cu_seqlens) - 1``.
@bug(
    "flash-linear-attention #1194",
    "extend-mamba2x2-d128-bf16-p16-k30.0.5.0-n3a2x2.3.4-shuffled-mild_decay-k128w4s32.zeroed.kv.strided-b4prod",
)
class PackedAsDecode(KnowsMode):
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
    "sglang #38975",
    "decode-kda4x2-d128-bf16-p16-k3.1.12.7.2.20.5-shuffled-weak_decay-k128w1s32.null.zeroed.kv.strided.snap64-b8prod",
)
class BetaInModelDtype(KnowsMode):
    """A decode rounds the sigmoid of ``b`` to the model's dtype."""

    def gates(self, a, b, layer):
        decay, factor = super().gates(a, b, layer)
        if self.mode is ForwardMode.DECODE and layer.kind in ("gdn", "kda"):
            factor = factor.to(b.dtype).float()
        return decay, factor


# 28, vllm #42792: ``conv_state_indices`` is one tensor for reading and writing.
@bug(
    "vllm #42792",
    "decode-kda4x2-d64-fp32-p16-k3.1.12.7.2.20.5-shuffled-strong_decay-k64w2s32.slot0.source.kv.snap16-b7prod",
    "reads-own-state",
)
class WindowOfOwnSlot(TorchNativeStateBackend):
    """A request that continues a state of the prefix cache reads its window from its own slot."""

    def pools(self, layer):
        self.current = super().pools(layer)
        return self.current

    def windows(self, held, state, columns):
        own = held if state.sources is None else self.current[0][self.index]
        return super().windows(own, state, columns)
