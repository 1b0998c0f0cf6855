"""Recurrent states; bugs of the fifteenth set."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.states import StateParent
from attn_testkit_corpus.faults.states_of_servers import SlotsParent, SnapshotsParent


@bug(
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


@bug(
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
    "vllm-ascend #11408",
    "target-verify-mamba4x2-d64-bf16-p16-k5-chain2-shuffled-strong_decay-k64w4s32.null.slots-b2nan",
    "writes-own-state",
    execution="graph",
)
class PaddedRequestsKeepSlots(SlotsParent):
    """Slots and counts of padded requests of a verify in a graph are those of the last replay."""

    eager = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        few = {"dtype": torch.int32, "device": self.context.device}
        self.kept = torch.full((max_bs, self.context.num_draft_tokens), -1, **few)
        self.kept_counts = torch.ones(max_bs, **few)

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False
        if not batch.forward_mode.is_target_verify():
            return
        given, counts = super().listed(batch), batch.state.num_accepted
        kept = self.kept[: len(given)]
        kept.copy_(given if in_capture else torch.where(given > 0, given, kept))
        if counts is not None:
            live = (given[:, 0] > 0)[: len(counts)]
            kept = self.kept_counts[: len(counts)]
            kept.copy_(counts if in_capture else torch.where(live, counts, kept))

    def listed(self, batch):
        if self.eager or not batch.forward_mode.is_target_verify():
            return super().listed(batch)
        return self.kept[: batch.batch_size]

    def last_accepted(self, counts):
        return super().last_accepted(counts if self.eager else self.kept_counts[: len(counts)])


@bug(
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
