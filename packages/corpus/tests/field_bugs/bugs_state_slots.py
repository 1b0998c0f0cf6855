"""Recurrent states: their slots, windows, copies, and what a commit stores."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_states import Gdn, GdnCopies, GdnSlots, KdaChains, KdaSlots, MambaCopies, Moded

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.contract import ForwardMode
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.states import StateParent
from attn_testkit_corpus.faults.states_of_servers import SnapshotsParent


@bug(
    14,
    "flashinfer #3490",
    "decode-mamba4x2-d64-bf16-p16-k1.70.9-shuffled-no_decay-k64w4s32.strided-layers1from0-b5stale",
    "state-matches-oracle",
)
class PoolIsCopied(StateParent):
    """A pool whose slots lie apart is reshaped to a contiguous one, and the copy is updated."""

    capabilities = StateParent.capabilities.with_changes(
        eager={"decode"},
        graph={"decode"},
        state=replace(StateParent.declared_state(), strided=True),
        bounds={"max_topk": 0},
    )

    def pools(self, layer):
        conv, temporal = super().pools(layer)
        return conv, temporal.contiguous()


@bug(
    15,
    "sglang #34043",
    "target-verify-gdn4x2-d64-bf16-p16-k33.5.12-chain4-shuffled-mild_decay-"
    "k64w4s32.snap16-layers1from0-b4prod-multi_mode",
    "state-matches-oracle",
)
class NoCopiesIfSpeculating(SnapshotsParent):
    """Prefills of an instance that speculates make no copies for the prefix cache."""

    def init_forward_metadata_in_graph(self, batch):
        self.skips = batch.forward_mode == "extend" and "target-verify" in self.context.modes
        super().init_forward_metadata_in_graph(batch)

    def copied_rows(self, rows):
        return torch.zeros_like(rows) if self.skips else rows


@bug(
    15,
    "vllm-ascend #9720",
    "extend-mamba4x2-d64-bf16-p16-k0-n20a20-shuffled-no_decay-k64w4s32-layers3from5-b1prod",
    "reads-own-state",
)
class WindowsOfSlots(StateParent):
    """If no request of a prefill has a state, its convolution begins with the windows that the slots hold."""

    def before(self, layer):
        window, state = super().before(layer)
        conv, _ = self.pools(layer)
        return torch.where(self.begun.any(), window, conv[self.index]), state


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


# 53: vllm #57266. States are known at ends of chunks, which a stride of (grid // chunk) chunks walks: with a chunk of
# three quarters of the grid that is one chunk for a block. Windows are copied by another kernel, rightly.
@bug(
    16,
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
    16,
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
    16,
    "ik_llama.cpp #1932",
    "decode-gdn4x2-d64-fp32-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod",
    "state-counts-tokens",
)
class TwoBuffers(Gdn):
    """In a decode of three requests or more, each reads the state of one of the last two."""

    def slots_of_states(self, batch):
        bs = len(self.taken)
        if not batch.forward_mode.is_decode() or bs < 3:
            return super().slots_of_states(batch)
        place = torch.arange(bs, device=self.taken.device)
        return self.taken[bs - 1 - (bs - 1 - place) % 2], self.index


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


# 24, vllm #56531: a batch of which no row has a draft takes the path without speculation.
@bug(
    18,
    "vllm #56531",
    "target-verify-mamba4x2-d64-fp16-p16-k66.33.1-chain4-loop4-shuffled-mild_decay-k64w4s32.slots_in_decode-b4prod",
    "lossless",
)
class NoDraftNothingAccepted(Moded):
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
    18,
    "vllm #50272",
    "target-verify-gdn4x2-d64-fp32-p16-k5.1.30-chain2-shuffled-unit_keys-k64w4s32-b4prod",
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


# 28, vllm #42792: ``conv_state_indices`` is one tensor for reading and writing.
@bug(
    18,
    "vllm #42792",
    "decode-mamba1x2-d128-fp32-p16-k3.1.12.7.2.20.5-shuffled-like_keys-k128w2s32.zeroed.source.strided.snap16-b7stale",
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
