"""Recurrent states; bugs of the fourteenth set."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.states import StateParent


@bug("flashinfer #4219", "decode-mamba4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod", "output-contract")
class OutputIsKept(StateParent):
    """If no output is passed, all calls with equally many rows return the same tensor."""

    capabilities = StateParent.capabilities.with_changes(server={"output_lifetime": "model"})

    def forward(self, mixed, a, b, layer, batch):
        out = super().forward(mixed, a, b, layer, batch)
        kept = self.__dict__.setdefault("outputs", {}).setdefault(out.shape, torch.empty_like(out))
        return kept.copy_(out)


@bug(
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
    "sparkinfer #615", "decode-mamba4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod", "state-counts-tokens"
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


@bug("lattice #262", "decode-mamba4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod", "state-counts-tokens")
class ValueHeadsOfKeyHeads(StateParent):
    """The loop goes over as many heads as there are key heads; outputs and states of the others stay as they were."""

    def token(self, rows, state, gates, layer):
        after, read = super().token(rows, state, gates, layer)
        head = torch.arange(layer.v_heads, device=after.device) < layer.k_heads
        after = torch.where(head[:, None, None], after, state)
        return after, torch.where(head[:, None], read, torch.zeros_like(read))
